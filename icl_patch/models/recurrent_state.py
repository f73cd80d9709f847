"""Recurrent layers: which models have them, and the state of those that keep it in their
modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import Cache, PreTrainedModel

from icl_patch.models.kv_cache import new_cache
from icl_patch.models.module_search import modules_holding

# Attributes in which modules keep a recurrent state of their own.
_STATES = ("conv1d_state", "recurrent_states")
_KEPT = "icl_patch_module_states"


def _holders(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in modules_holding(model, _STATES)
        for name in _STATES
        if name in vars(module)
    ]


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether some layer's state sums up the tokens before, so that no mask can hide one of
    them.
    """
    cache = new_cache(model)
    in_cache = hasattr(cache, "linear_cache") or any(
        hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states")
        for layer in cache.layers
    )
    return in_cache or bool(_holders(model))


@contextmanager
def module_states(model: PreTrainedModel, cache: Cache) -> Iterator[None]:
    """Within this context the modules' own states are those of ``cache``; afterwards they are
    restored.

    An empty cache belongs to the state that the modules start from. The states after the pass are
    kept with the cache.
    """
    holders = _holders(model)
    if not holders:
        yield
        return
    before: list[Any] = [getattr(module, name) for module, name in holders]
    kept: list[Any] = getattr(cache, _KEPT, [None] * len(holders))
    try:
        for (module, name), state in zip(holders, kept, strict=True):
            setattr(module, name, state)
        yield
        setattr(cache, _KEPT, [getattr(module, name) for module, name in holders])
    finally:
        for (module, name), state in zip(holders, before, strict=True):
            setattr(module, name, state)
