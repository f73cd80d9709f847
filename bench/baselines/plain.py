"""The model's own decode step: eager, compiled, and as a CUDA graph over a static cache."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from icl_patch.bench.decode_steps import Step
from icl_patch.bench.timing import captured


class GraphedStep(Step):
    """A step over a static cache, on a GPU as a CUDA graph; prepared at its first call."""

    def __init__(self, run: Callable[[], Tensor], static: "StaticContext") -> None:
        super().__init__(run, static.rewind, static.cache)
        self._static = static
        self._run_once = run
        self._replay: Callable[[], Tensor] | None = None

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The logits (B, V)."""
        if self._replay is None:
            self._replay = self._prepare()
        return self._replay()

    def _step(self) -> Tensor:
        logits = self._run_once()
        self.rewind()
        return logits

    def _prepare(self) -> Callable[[], Tensor]:
        replay = self._step
        if self._step().is_cuda:
            output: list[Tensor] = []
            graph = captured(lambda: output.__setitem__(slice(None), [self._step()]), 1)

            def replay() -> Tensor:
                graph.replay()
                return output[0]

        self._static.restore()
        return replay

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Within this context no CUDA graph hides the step from a profiler."""
        replay, self._replay = self._replay, self._step
        try:
            yield
        finally:
            self._replay = replay


class CompiledStep(GraphedStep):
    """The same through ``torch.compile``, without a graph break."""

    traced = True

    def _prepare(self) -> Callable[[], Tensor]:
        started = time.perf_counter()
        self._run_once = torch.compile(self.run, fullgraph=True, dynamic=False)
        self._step()
        self.compile_seconds = time.perf_counter() - started
        return super()._prepare()


class StaticContext:
    """All tokens but the last in a static cache (B rows), and how to undo a step on top of it.

    A layer with a full window moves it by a token at every step, which does not change the work.
    ``restore`` moves it back to the start.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.cache = static_cache(model, ids)
        run: Any = model
        run(ids[:, :-1], past_key_values=self.cache, logits_to_keep=1)
        layers: list[Any] = self.cache.layers
        self._windows = [layer for layer in layers if layer.is_sliding]
        full = [
            layer for layer in self._windows if layer.cumulative_length_int >= layer.max_cache_len
        ]
        self.lengths = [layer.cumulative_length for layer in layers if layer not in full]
        self._saved = [
            (place, place.clone()) for layer in full for place in (layer.keys, layer.values)
        ]

    def rewind(self) -> None:
        """Shorten the cache by one token; one launch for all layers."""
        if self.lengths:
            torch._foreach_sub_(self.lengths, 1)
        for layer in self._windows:
            layer.cumulative_length_int -= 1

    def restore(self) -> None:
        """Restore the windows' contents."""
        for place, saved in self._saved:
            place.copy_(saved)


def static_cache(model: PreTrainedModel, ids: Tensor) -> StaticCache:
    """An empty static cache with room for exactly ``ids``."""
    return StaticCache(config=model.config, max_cache_len=ids.shape[1])


def dynamic_cache(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    """All tokens but the last in the model's own cache, which can be cropped by a token."""
    cache = DynamicCache(config=model.config)
    run: Any = model
    run(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
    cache.activate_past_recording()
    return cache


def plain_step(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> Step:
    """The model's own step, as ``model.generate`` takes it."""
    run: Any = model
    token = ids[:, -1:].clone()
    return Step(
        lambda: run(token, past_key_values=cache, logits_to_keep=1).logits[:, -1],
        lambda: cache.crop(-1),
        cache,
    )


def static_plain_step(
    model: PreTrainedModel, ids: Tensor, static: StaticContext
) -> Callable[[], Tensor]:
    """The model's own step over a static cache, its mask and positions with it."""
    run: Any = model
    token, position = ids[:, -1:].clone(), torch.full_like(ids[:, -1:], ids.shape[1] - 1)

    def step() -> Tensor:
        logits: Tensor = run(
            token, position_ids=position, past_key_values=static.cache, logits_to_keep=1
        ).logits[:, -1]
        return logits

    return step
