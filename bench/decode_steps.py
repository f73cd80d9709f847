"""Decode steps that can be repeated.

A step runs the last token of ``ids`` (B, C) on top of a cache of the tokens before it, returns the
next logits (B, V), and restores the cache.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from icl_patch.generation.compiled_step import Captured, CompileOptions, use_compiled_step
from icl_patch.generation.decode_state import DecodeState
from icl_patch.generation.decode_step import decode_one_token


class Step:
    """A step: ``run`` takes it, ``rewind`` restores the cache.

    Attributes:
        traced: the step is compiled: it calls none of the model's modules.
        compile_seconds: the time to compile it.
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
        """Within this context no CUDA graph hides the step from a profiler."""
        yield


class LazyStep(Step):
    """A step built at its first call, so that a failure to build it fails no other step."""

    def __init__(self, build: Callable[[], Step]) -> None:
        super().__init__(lambda: self.step()())
        self._build = build
        self._step: Step | None = None

    def step(self) -> Step:
        """The step, built now if it is not yet."""
        if self._step is None:
            self._step = self._build()
            self.cache, self.traced, self.compile_seconds = (
                self._step.cache,
                self._step.traced,
                self._step.compile_seconds,
            )
        return self._step

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Within this context no CUDA graph hides the step from a profiler."""
        with self.step().observable():
            yield


class StaticCacheStep(Step):
    """Our step over static buffers: compiled, as a CUDA graph, or both."""

    _WARM_UP = 5  # calls until it is traced, compiled and, at the fourth, captured

    def __init__(self, state: DecodeState, token: Tensor, options: CompileOptions) -> None:
        use_compiled_step(state, options, return_context_logits=False)
        step: Any = state.run_step
        self._compiled_step, self.traced = step, options.inductor
        super().__init__(lambda: decode_one_token(state, token).logits, state.rewind, state.cache)
        started = time.perf_counter()
        for number in range(self._WARM_UP):
            self()
            if options.inductor and number == 1:
                self.compile_seconds = time.perf_counter() - started

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Within this context no CUDA graph hides the step from a profiler."""
        run = self._compiled_step.run
        try:
            self._compiled_step.run = run.run if isinstance(run, Captured) else run
            yield
        finally:
            self._compiled_step.run = run
