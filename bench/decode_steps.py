"""Decode steps that can be taken over and over: the model's own, those that apply a patch, and
Algorithm 1 with every ``W + ΔW`` built.

A step takes the last token of ``ids`` (B, C) on top of a cache of those before it, gives the next
logits (B, V), and puts the cache back.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer

from icl_patch.generation.compiled_step import Captured, fix
from icl_patch.generation.decode_step import Decoding, decode_one_token


class Step:
    """A step: ``run`` takes it, ``rewind`` puts back what it did to the cache.

    Attributes:
        traced: whether the model's modules no longer run in it. compile_seconds: what it took to
            make, where it is compiled.
    """

    traced = False
    compile_seconds: float | None = None

    def __init__(
        self,
        run: Callable[[], Tensor],
        rewind: Callable[[], object] = lambda: None,
        cache: Cache | None = None,
    ) -> None:
        self.run, self.rewind, self.cache = run, rewind, cache

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The logits (B, V)."""
        logits = self.run()
        self.rewind()
        return logits

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Within this context the step runs as a profiler can see into it, without a CUDA graph."""
        yield


class LazyStep(Step):
    """A step that is made when it is first taken: what fails then, fails for it alone."""

    def __init__(self, make: Callable[[], Step]) -> None:
        super().__init__(lambda: self.made()())
        self._make = make
        self._made: Step | None = None

    def made(self) -> Step:
        """The step itself."""
        if self._made is None:
            self._made = self._make()
            self.cache, self.traced, self.compile_seconds = (
                self._made.cache,
                self._made.traced,
                self._made.compile_seconds,
            )
        return self._made

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Within this context the step runs as a profiler can see into it, without a CUDA graph."""
        with self.made().observable():
            yield


class StaticCacheStep(Step):
    """Our step on buffers that never move: compiled, as a CUDA graph, or both."""

    _WARM_UP = 5  # it is traced, compiled, and captured at the fourth

    def __init__(self, state: Decoding, token: Tensor, *, compiled: bool, graph: bool) -> None:
        fix(state, both=False, compiled=compiled, graph=graph)
        made: Any = state.step
        self._fixed, self.traced = made, compiled
        layers: list[Any] = state.cache.layers
        counters = [
            made.step_inputs.positions,
            made.step_inputs.slot,
            *(layer.cumulative_length for layer in layers if isinstance(layer, StaticLayer)),
        ]

        def rewind() -> None:
            torch._foreach_sub_(counters, 1)
            state.length -= 1
            state.steps -= 1

        super().__init__(lambda: decode_one_token(state, token).logits, rewind, state.cache)
        begun = time.perf_counter()
        for number in range(self._WARM_UP):
            self()
            if compiled and number == 1:
                self.compile_seconds = time.perf_counter() - begun

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Within this context the step runs as a profiler can see into it, without a CUDA graph."""
        kept = self._fixed._run
        try:
            self._fixed._run = kept._run if isinstance(kept, Captured) else kept
            yield
        finally:
            self._fixed._run = kept
