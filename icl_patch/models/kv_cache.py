"""Key-value caches: empty ones, both streams of one, room for tokens to come, and fixed places for
a compiled step.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from icl_patch.errors import UnsupportedModelError


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache as the model would make it itself: of its own class, if it has one."""
    home = sys.modules[type(model).__module__]
    for kind in vars(home).values():
        own = isinstance(kind, type) and kind.__module__ == home.__name__
        if own and issubclass(kind, DynamicCache):
            return kind()
    return DynamicCache(config=model.config)


def stack_cache(cache: Cache, batch: int) -> None:
    """Repeat a cache of B rows as both streams of a cache of 2B, in place."""
    if not cache.is_compileable:
        cache.batch_select_indices(torch.arange(2 * batch) % batch)
        return
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.keys is not None:  # as before the first token, and where a layer shares another's
            layer.keys, layer.values = (
                layer.keys.repeat(2, 1, 1, 1),
                layer.values.repeat(2, 1, 1, 1),
            )
            layer.batch_size = 2 * batch


def append_empty(cache: Cache, start: int, count: int) -> None:
    """Put ``count`` slots of zeros behind the first ``start`` slots of a dynamic cache, in place;
    later slots are dropped.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        for name in ("keys", "values"):
            held = getattr(layer, name)[..., :start, :]
            empty = held.new_zeros(*held.shape[:-2], count, held.shape[-1])
            setattr(layer, name, torch.cat([held, empty], -2))


class ReservedLayer(DynamicLayer):
    """A dynamic cache's layer with room for tokens to come: a step writes its token in place, where
    the library copies the layer.

    The room grows by a quarter at a time, up to ``capacity`` tokens. What the library's own methods
    (``crop``, ``batch_select_indices``, …) make of the layer is taken as it is; beyond the capacity
    it grows as theirs does.
    """

    _LEAST = 256  # tokens that it grows by

    def __init__(self, layer: DynamicLayer, capacity: int) -> None:
        super().__init__()
        vars(self).update(vars(layer))
        self._capacity = capacity
        self._rooms: dict[str, Tensor] = {}
        for name in ("keys", "values"):
            self._make_room(name, getattr(self, name).shape[-2])

    def _make_room(self, name: str, tokens: int) -> None:
        held = getattr(self, name)
        size = max(tokens, min(tokens + max(tokens // 4, self._LEAST), self._capacity))
        self._rooms[name] = held.new_empty(*held.shape[:-2], size, held.shape[-1])
        self._rooms[name][..., : held.shape[-2], :] = held
        setattr(self, name, self._rooms[name][..., : held.shape[-2], :])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the tokens' keys and values; all of them."""
        if not (self._takes("keys", key_states) and self._takes("values", value_states)):
            return super().update(key_states, value_states, *args, **kwargs)
        return self._append("keys", key_states), self._append("values", value_states)

    def _append(self, name: str, states: Tensor) -> Tensor:
        start = getattr(self, name).shape[-2]
        stop = start + states.shape[-2]
        if stop > self._rooms[name].shape[-2]:
            self._make_room(name, stop)
        self._rooms[name][..., start:stop, :] = states
        held = self._rooms[name][..., :stop, :]
        setattr(self, name, held)
        return held

    def _takes(self, name: str, states: Tensor) -> bool:
        """Whether what the layer holds lies where it was put, with room after it or to be made."""
        room, held = self._rooms[name], getattr(self, name)
        if (
            held is None
            or held.dim() != room.dim()
            or held.stride() != room.stride()
            or held.shape[:-2] != room.shape[:-2]
        ):
            return False
        return held.data_ptr() == room.data_ptr() and held.shape[-2] + states.shape[-2] <= max(
            room.shape[-2], self._capacity
        )


def reserve(cache: Cache, capacity: int) -> None:
    """Give the layers of a dynamic cache room for ``capacity`` tokens, in place; windows, states
    and static caches are left as they are.
    """
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.keys is not None and layer.keys.dim() == 4:
            cache.layers[index] = ReservedLayer(layer, capacity)


def static_cache(cache: Cache, capacity: int) -> Cache:
    """A cache with a fixed place for each of ``capacity`` tokens in every layer, also where the
    model has a window: its mask knows.

    Raises:
        UnsupportedModelError: ``cache``, of one token at least, keeps something else than keys and
            values.
    """
    held: list[Any] = cache.layers
    layers: list[Any] = []
    for layer in held:
        nothing = getattr(layer, "keys", ()) is None  # it shares another layer's
        if not nothing and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(
                f"expected a cache of keys and values to fix in place, got a {type(layer).__name__}"
            )
        layers.append(layer if nothing else StaticLayer(max_cache_len=capacity))
        if not nothing:
            layers[-1].update(layer.keys, layer.values)  # the places are made by the first
    return Cache(layers=layers)


def copy_cache(cache: Cache, static: Cache, length: int) -> None:
    """Put a dynamic cache of ``length`` tokens into a static one, in place.

    Tokens that a window of the dynamic cache has dropped stay 0.
    """
    layers: list[Any] = static.layers
    for index, layer in enumerate(layers):
        if not isinstance(layer, StaticLayer):
            continue
        layer.reset()
        if length:
            held: Any = cache.layers[index]
            gone = length - held.keys.shape[-2]
            layer.cumulative_length += gone
            if isinstance(layer, StaticSlidingWindowLayer):
                layer.cumulative_length_int += gone
            layer.update(held.keys, held.values)
