"""The model's own decode step: eager, and compiled over a static cache."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from icl_patch.bench.decode_steps import Step


class StaticContext:
    """All tokens but the last in a static cache (B rows), and how to undo a step on top of it.

    A layer with a full window moves it by a token at every step, which does not change the work.
    ``restore`` moves it back to the start.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
        run: Any = model
        run(ids[:, :-1], past_key_values=self.cache, logits_to_keep=1)
        layers: list[Any] = self.cache.layers
        self._windows = [layer for layer in layers if layer.is_sliding]
        full = [
            layer for layer in self._windows if layer.cumulative_length_int >= layer.max_cache_len
        ]
        self._lengths = [layer.cumulative_length for layer in layers if layer not in full]
        self._saved = [(x, x.clone()) for layer in full for x in (layer.keys, layer.values)]

    def rewind(self) -> None:
        """Shorten the cache by one token; one launch for all layers."""
        if self._lengths:
            torch._foreach_sub_(self._lengths, 1)
        for layer in self._windows:
            layer.cumulative_length_int -= 1

    def restore(self) -> None:
        """Restore the windows' contents."""
        for keys_or_values, saved in self._saved:
            keys_or_values.copy_(saved)


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


def compiled_step(model: PreTrainedModel, ids: Tensor, static: StaticContext) -> Step:
    """The model's own step over a static cache, with its mask and positions: through
    ``torch.compile`` without a graph break, and on a GPU as a CUDA graph.
    """
    model_run: Any = model
    token, position = ids[:, -1:].clone(), torch.full_like(ids[:, -1:], ids.shape[1] - 1)

    def run() -> Tensor:
        logits: Tensor = model_run(
            token, position_ids=position, past_key_values=static.cache, logits_to_keep=1
        ).logits[:, -1]
        return logits

    started = time.perf_counter()
    call: Callable[[], Tensor] = torch.compile(run, fullgraph=True, dynamic=False)
    step = Step(call, static.rewind, static.cache)
    step()
    seconds = time.perf_counter() - started
    if ids.is_cuda:
        step = replace(step, run=_graph(step), rewind=lambda: None)
    static.restore()
    return replace(step, compile_seconds=seconds)


def _graph(step: Step) -> Callable[[], Tensor]:
    """Replay the step, its rewinding included, as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay
