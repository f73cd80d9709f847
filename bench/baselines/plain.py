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
    """A step over a static cache, on a GPU as a CUDA graph; made ready when it is first taken."""

    def __init__(self, run: Callable[[], Tensor], static: "StaticContext") -> None:
        super().__init__(run, static.rewind, static.cache)
        self._static = static
        self._whole = run
        self._replay: Callable[[], Tensor] | None = None

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The logits (B, V)."""
        if self._replay is None:
            self._replay = self._ready()
        return self._replay()

    def _step(self) -> Tensor:
        logits = self._whole()
        self.rewind()
        return logits

    def _ready(self) -> Callable[[], Tensor]:
        replay = self._step
        if self._step().is_cuda:
            held: list[Tensor] = []
            graph = captured(lambda: held.__setitem__(slice(None), [self._step()]), 1)

            def replay() -> Tensor:
                graph.replay()
                return held[0]

        self._static.restore()
        return replay

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Within this context the step runs as a profiler can see into it, without a CUDA graph."""
        kept, self._replay = self._replay, self._step
        try:
            yield
        finally:
            self._replay = kept


class CompiledStep(GraphedStep):
    """The same through ``torch.compile``, without a graph break; ``compile_seconds`` is what that
    took.
    """

    traced = True

    def _ready(self) -> Callable[[], Tensor]:
        begun = time.perf_counter()
        self._whole = torch.compile(self.run, fullgraph=True, dynamic=False)
        self._step()
        self.compile_seconds = time.perf_counter() - begun
        return super()._ready()


class StaticContext:
    """All tokens but the last in a static cache (B rows), and how a step on top of it is undone.

    A layer whose window is full moves it at every step: what it then holds is another token further
    on, and the work is the same. ``restore`` puts it back to the first.
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
        self._kept = [
            (place, place.clone()) for layer in full for place in (layer.keys, layer.values)
        ]

    def rewind(self) -> None:
        """Take back the length of one token; one launch for all layers."""
        if self.lengths:
            torch._foreach_sub_(self.lengths, 1)
        for layer in self._windows:
            layer.cumulative_length_int -= 1

    def restore(self) -> None:
        """Put back the windows' contents."""
        for place, kept in self._kept:
            place.copy_(kept)


def static_cache(model: PreTrainedModel, ids: Tensor) -> StaticCache:
    """An empty one with room for ``ids`` and no more."""
    return StaticCache(config=model.config, max_cache_len=ids.shape[1])


def dynamic_cache(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    """All tokens but the last in the model's own cache, which can be cut back by a token."""
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
