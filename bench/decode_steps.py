"""Decode steps that can be repeated.

A step runs the last token of ``ids`` (B, C) on top of a cache of the tokens before it, returns the
next logits (B, V), and restores the cache.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache


@dataclass(frozen=True, eq=False)
class Step:
    """A step: ``run`` computes the logits, ``rewind`` restores the cache.

    Attributes:
        compile_seconds: the time to compile it.
    """

    run: Callable[[], Tensor]
    rewind: Callable[[], object] = lambda: None
    cache: Cache | None = None
    compile_seconds: float | None = None

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The logits (B, V)."""
        logits = self.run()
        self.rewind()
        return logits


class LazyStep:
    """A step built at its first call, so that a failure to build it fails no other step."""

    def __init__(self, build: Callable[[], Step]) -> None:
        self._build = build

    @functools.cached_property
    def step(self) -> Step:
        """The step, built at its first use."""
        with torch.no_grad():
            return self._build()

    def __call__(self) -> Tensor:
        """The logits (B, V)."""
        return self.step()
