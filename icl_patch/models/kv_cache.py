"""Key-value caches: new ones, room for later tokens, the fixed buffers of a compiled step."""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from icl_patch.errors import UnsupportedModelError
from icl_patch.models.pipeline import ElsewhereLayer, mark_elsewhere


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache as the model would make it itself: of its own class, if it has one."""
    home = sys.modules[type(model).__module__]
    for kind in vars(home).values():
        own = isinstance(kind, type) and kind.__module__ == home.__name__
        if own and issubclass(kind, DynamicCache):
            return kind()
    cache = DynamicCache(config=model.config)
    mark_elsewhere(model, cache)
    return cache


def holds_states_alone(cache: Cache) -> bool:
    """Whether every layer of a cache is recurrent, so that none has keys or counts tokens."""
    return bool(cache.layers) and all(cache.is_linear)


def is_empty(cache: Cache) -> bool:
    """Whether a cache has seen no token yet."""
    if holds_states_alone(cache):
        return not cache.has_previous_state()
    return cache.get_seq_length() == 0


def append_empty(cache: Cache, start: int, count: int) -> None:
    """Put ``count`` slots of zeros behind the first ``start`` slots of a dynamic cache, in place;
    later slots are dropped.
    """
    for layer in cache.layers:
        for name in ("keys", "values") if not isinstance(layer, ElsewhereLayer) else ():
            held = getattr(layer, name)[..., :start, :]
            empty = held.new_zeros(*held.shape[:-2], count, held.shape[-1])
            setattr(layer, name, torch.cat([held, empty], -2))


class ReservedLayer(DynamicLayer):
    """A dynamic layer with room for later tokens: a step writes its token in place, where
    transformers' layer copies all tokens.

    The room grows by a quarter at a time, up to ``capacity`` tokens, and beyond that by one call's
    tokens. If another method (``crop``, ``batch_select_indices``, …) has replaced the tensors, the
    next token makes new room for them.
    """

    _LEAST = 256  # tokens that the room grows by

    def __init__(self, layer: DynamicLayer, capacity: int) -> None:
        super().__init__()
        vars(self).update(vars(layer))
        self._capacity = capacity
        self._buffers: dict[str, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the tokens' keys and values; returns those of all tokens."""
        return self._append("keys", key_states), self._append("values", value_states)

    def _append(self, name: str, states: Tensor) -> Tensor:
        held = getattr(self, name)
        start, stop = held.shape[-2], held.shape[-2] + states.shape[-2]
        buffer = self._buffers.get(name)
        if buffer is None or stop > buffer.shape[-2] or not _is_prefix(held, buffer):
            size = max(stop, min(stop + max(stop // 4, self._LEAST), self._capacity))
            buffer = held.new_empty(*held.shape[:-2], size, held.shape[-1])
            buffer[..., :start, :] = held
            self._buffers[name] = buffer
        buffer[..., start:stop, :] = states
        held = buffer[..., :stop, :]
        setattr(self, name, held)
        return held


def _is_prefix(held: Tensor, buffer: Tensor) -> bool:
    """Whether ``held`` are the first tokens of ``buffer``, in its memory."""
    return (
        held.data_ptr() == buffer.data_ptr()
        and held.stride() == buffer.stride()
        and held.shape[:-2] == buffer.shape[:-2]
    )


def reserve(cache: Cache, capacity: int) -> None:
    """Give the layers of a dynamic cache room for ``capacity`` tokens, in place; windows, states
    and static caches are left as they are, and heads whose place in memory would show in the bits
    of torch's attention.
    """
    for index, layer in enumerate(cache.layers):
        if (
            type(layer) is DynamicLayer
            and layer.keys is not None
            and layer.keys.dim() == 4
            and _is_aligned(layer.keys)
            and _is_aligned(layer.values)
        ):
            cache.layers[index] = ReservedLayer(layer, capacity)


def _is_aligned(states: Any) -> bool:
    """Whether each token has whole vectors of 16 bytes, so that room moves no head off them."""
    return states.shape[-1] * states.itemsize % 16 == 0


class FixedLayer(StaticLayer):
    """A static layer that writes one token into the column ``slot``, (1,) int64, of its buffers.

    The layers of a cache share the slot, where transformers' static layers have a counter each.
    """

    def __init__(self, capacity: int, slot: Tensor) -> None:
        super().__init__(max_cache_len=capacity)
        self._slot, self.cumulative_length = slot, slot[0]

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the token's keys and values; returns the whole buffers."""
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self._slot, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self._slot, value_states.to(self.values.dtype))
        return self.keys, self.values


def fixed_cache(cache: Cache, capacity: int, slot: Tensor) -> Cache:
    """A cache of zeros with ``capacity`` columns in every layer, which are written at ``slot``.

    A layer with a sliding window has as many columns as the others: its mask knows the window.

    Raises:
        UnsupportedModelError: ``cache``, of one token at least, holds something else than keys and
            values.
    """
    held: list[Any] = cache.layers
    layers: list[Any] = []
    for layer in held:
        if getattr(layer, "keys", ()) is None:  # it shares another layer's
            layers.append(layer)
            continue
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(
                f"expected a cache of keys and values to fix in place, got a {type(layer).__name__}"
            )
        layers.append(FixedLayer(capacity, slot))
        layers[-1].lazy_initialization(layer.keys, layer.values)
    return Cache(layers=layers)


def copy_cache(cache: Cache, fixed: Cache, length: int) -> None:
    """Copy a dynamic cache of ``length`` tokens into a fixed one.

    The columns of tokens that a sliding window has dropped are 0.
    """
    for source, target in zip(cache.layers, fixed.layers, strict=False):
        if isinstance(target, FixedLayer):
            for name in ("keys", "values"):
                buffer = getattr(target, name).zero_()
                if length:
                    states = getattr(source, name)
                    buffer[:, :, length - states.shape[2] : length] = states
