"""Two-stream batches: the tokens of a sequence, and how the model is run on them.

Rows ``[:B]`` are the context stream, rows ``[B:]`` the reduced stream. Both get the same tokens and positions; the reduced rows'
attention hides the absorbed tokens, see :mod:`icl_patch.attention`.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from icl_patch.attention import Visibility, restricted_attention
from icl_patch.calling import call
from icl_patch.errors import UnsupportedModelError
from icl_patch.positions import rotated_as_one_call, switch_lengths


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache as the model would make it itself."""
    return DynamicCache(config=model.config)


def stack_cache(cache: Cache, batch: int) -> None:
    """Repeat a cache of B rows as both streams of a cache of 2B, in place."""
    if not cache.is_compileable:
        cache.batch_select_indices(torch.arange(2 * batch) % batch)
        return
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.keys is not None:  # as before the first token, and where a layer shares another's
            layer.keys, layer.values = layer.keys.repeat(2, 1, 1, 1), layer.values.repeat(2, 1, 1, 1)
            layer.batch_size = 2 * batch


class ReservedLayer(DynamicLayer):
    """A dynamic cache's layer with room for tokens to come: a step writes its token in place, where the library copies the layer.

    The room grows by a quarter at a time, up to ``capacity`` tokens. What the library's own methods (``crop``, ``batch_select_indices``, …)
    make of the layer is taken as it is; beyond the capacity it grows as theirs does.
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

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
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
        if held is None or held.dim() != room.dim() or held.stride() != room.stride() or held.shape[:-2] != room.shape[:-2]:
            return False
        return held.data_ptr() == room.data_ptr() and held.shape[-2] + states.shape[-2] <= max(room.shape[-2], self._capacity)


def reserve(cache: Cache, capacity: int) -> None:
    """Give the layers of a dynamic cache room for ``capacity`` tokens, in place; windows, states and static caches are left as they are."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.keys is not None and layer.keys.dim() == 4:
            cache.layers[index] = ReservedLayer(layer, capacity)


def static_cache(cache: Cache, capacity: int) -> Cache:
    """A cache with a fixed place for each of ``capacity`` tokens in every layer, also where the model has a window: its mask knows.

    Raises:
        UnsupportedModelError: ``cache``, of one token at least, keeps something else than keys and values.
    """
    held: list[Any] = cache.layers
    layers: list[Any] = []
    for layer in held:
        nothing = getattr(layer, "keys", ()) is None  # it shares another layer's
        if not nothing and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(f"expected a cache of keys and values to fix in place, got a {type(layer).__name__}")
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


@dataclass(frozen=True)
class Sequences:
    """``C = [P, Y, X]`` of a batch, split where the model is run: first ``head = [P, Y]``, then ``tail``, which holds the kept tokens.

    ids int64, masks bool; ``absorbed`` marks the tokens hidden from the reduced stream. The head is left-padded, the tail right-padded,
    with no padding in between: differences of slots are differences of positions.

    Attributes:
        head_ids, head_mask, head_absorbed: (B, H).
        tail_ids, tail_mask: (B, S).
        tail_absorbed: (S,) absorbed spans after the first, between kept tokens.
    """

    head_ids: Tensor
    head_mask: Tensor
    head_absorbed: Tensor
    tail_ids: Tensor
    tail_mask: Tensor
    tail_absorbed: Tensor

    @property
    def ids(self) -> Tensor:
        """(B, H + S)."""
        return torch.cat([self.head_ids, self.tail_ids], 1)

    @property
    def mask(self) -> Tensor:
        """(B, H + S)."""
        return torch.cat([self.head_mask, self.tail_mask], 1)

    @property
    def absorbed(self) -> Tensor:
        """(B, H + S)."""
        return torch.cat([self.head_absorbed, self.tail_absorbed.expand_as(self.tail_mask)], 1)

    @property
    def positions(self) -> Tensor:
        """(B, H + S) int64; padding has the position of the token before it, or 0."""
        return (self.mask.long().cumsum(1) - 1).clamp(min=0)

    @property
    def longest(self) -> Tensor:
        """() int64, the tokens of the longest row."""
        return self.mask.sum(1).max()

    @property
    def kept_columns(self) -> Tensor:
        """The tail's columns of kept tokens."""
        return (~self.tail_absorbed).nonzero().squeeze(1)

    @property
    def kept_slots(self) -> Tensor:
        """(T,) the kept tokens' slots in the whole sequence."""
        return self.head_ids.shape[1] + self.kept_columns

    def advanced(self, token_ids: Tensor) -> "Sequences":
        """The sequences one token later: the tail, one token, joins the absorbed head, and ``token_ids`` (B,) are the new tail."""
        assert self.tail_ids.shape[1] == 1
        everything = torch.ones_like(self.tail_mask)
        return Sequences(
            head_ids=torch.cat([self.head_ids, self.tail_ids], 1),
            head_mask=torch.cat([self.head_mask, everything], 1),
            head_absorbed=torch.cat([self.head_absorbed, everything], 1),
            tail_ids=token_ids.unsqueeze(1),
            tail_mask=everything,
            tail_absorbed=self.tail_absorbed,
        )


def check_tensor(name: str, given: object) -> None:
    """Raises TypeError if what was given under this name is no tensor."""
    if not isinstance(given, Tensor):
        raise TypeError(f"expected {name} as a tensor, got {type(given).__name__}")


def _as_batch(name: str, ids: Tensor, mask: Tensor | None, batch: int | None) -> tuple[Tensor, Tensor]:
    check_tensor(f"{name}_ids", ids)
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"expected {name}_ids (B, T) of integers, got {tuple(ids.shape)} {ids.dtype}")
    if batch is not None and ids.shape[0] != batch:
        raise ValueError(f"expected {name}_ids with {batch} rows, got {ids.shape[0]}")
    if mask is None:
        return ids.long(), torch.ones_like(ids, dtype=torch.bool)
    check_tensor(f"{name}_mask", mask)
    if mask.shape != ids.shape:
        raise ValueError(f"expected {name}_mask {tuple(ids.shape)}, got {tuple(mask.shape)}")
    if mask.device != ids.device:
        raise ValueError(f"expected {name}_mask on {ids.device}, got {mask.device}")
    if not torch.equal(mask, mask.bool().to(mask.dtype)):
        raise ValueError(f"expected {name}_mask of True and False, got other values")
    return ids.long(), mask.bool()


def _check_padding(name: str, mask: Tensor, side: str) -> None:
    contiguous = mask.long().cummax(1).values if side == "left" else mask.long().flip(1).cummax(1).values.flip(1)
    if not torch.equal(contiguous.bool(), mask):
        raise ValueError(f"expected {name}_mask with padding on the {side} only")
    if not mask.any(1).all():
        raise ValueError(f"expected at least one token in every row of {name}_ids, row {int((~mask.any(1)).nonzero()[0])} has none")


def _spans(absorbed: list[tuple[int, int]] | None, width: int) -> list[tuple[int, int]]:
    if absorbed is None:
        return [(0, width)]
    if not all(isinstance(span, tuple | list) and len(span) == 2 for span in absorbed):
        raise TypeError(f"expected absorbed as a list of (start, stop), got {absorbed}")
    spans = sorted((int(start), int(stop)) for start, stop in absorbed)
    previous = 0
    for start, stop in spans:
        if not previous <= start < stop <= width:
            raise ValueError(f"expected absorbed spans (start, stop) within {width} columns, not empty and apart, got {absorbed}")
        previous = stop
    if not spans:
        raise ValueError("expected at least one absorbed span, got none")
    return spans


def check_context(context_ids: Tensor, context_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """A left-padded context as int64 ids and bool mask; raises ValueError if it is not one."""
    ids, mask = _as_batch("context", context_ids, context_mask, None)
    if 0 in ids.shape:
        raise ValueError(f"expected at least one row and one token in context_ids, got {tuple(ids.shape)}")
    _check_padding("context", mask, "left")
    return ids, mask


def absorb_all_but_last(ids: Tensor, mask: Tensor) -> Sequences:
    """A checked context as sequences whose last token is the kept one; a context of one token has nothing to absorb."""
    return Sequences(
        head_ids=ids[:, :-1],
        head_mask=mask[:, :-1],
        head_absorbed=mask[:, :-1],
        tail_ids=ids[:, -1:],
        tail_mask=mask[:, -1:],
        tail_absorbed=torch.zeros_like(mask[0, -1:]),
    )


def run(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    cache: Cache,
    visibility: Visibility | None = None,
    *,
    longest: Tensor | int,
    last_logits: int = 0,
    **model_inputs: Any,
) -> Tensor:
    """One forward of the model: ids (B, T), mask over all slots of the cache (B, S), positions (B, T) -> logits (B, T, V).

    The cache grows by T tokens. With ``visibility`` the attention is restricted to what it allows.
    ``longest``: the number of tokens of the longest row of the whole sequences; this call may get a
    part of them. ``last_logits``: how many of the last tokens' logits are wanted, 0 for all.
    """
    restricted = nullcontext() if visibility is None else restricted_attention(model, visibility)
    with restricted, rotated_as_one_call(model, longest):
        logits = call(model, ids, mask, positions, cache, last_logits, **model_inputs)
    if mask.shape[1] == 1:  # recurrent layers leave padding out in calls of several tokens only
        _forget(cache, ~mask[:, 0].bool())
    return logits


def _forget(cache: Cache, rows: Tensor) -> None:
    """Make the recurrent states of rows (B,) bool what they are before the first token."""
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            for state in getattr(layer, name, {}).values():
                if state is not None:
                    state.masked_fill_(rows.reshape(-1, *[1] * (state.dim() - 1)), 0)


def run_head(model: PreTrainedModel, sequences: Sequences, cache: Cache, *, chunk: int | None = None, **model_inputs: Any) -> None:
    """Put the head into an empty cache, as the untouched model does; ``chunk`` tokens a call, or all at once."""
    width = sequences.head_ids.shape[1]
    positions = sequences.positions
    for start in range(0, width, chunk or width):
        part = slice(start, min(start + (chunk or width), width))
        run(
            model,
            sequences.head_ids[:, part],
            sequences.head_mask[:, : part.stop],
            positions[:, part],
            cache,
            longest=sequences.longest,
            last_logits=1,
            **model_inputs,
        )


def switches(model: PreTrainedModel, sequences: Sequences) -> bool:
    """Whether LongRoPE takes other factors for these sequences than without their last token."""
    lengths = switch_lengths(model)
    return bool(lengths) and int(sequences.longest) - 1 in lengths


def run_tail(model: PreTrainedModel, sequences: Sequences, cache: Cache, columns: slice = slice(None)) -> Tensor:
    """The model with its context: columns of the tail on top of a cache of all before them -> logits (B, S, V)."""
    start = sequences.head_ids.shape[1]
    columns = slice(*columns.indices(sequences.tail_ids.shape[1]))
    positions = sequences.positions[:, start:][:, columns]
    mask = sequences.mask[:, : start + columns.stop]
    ids, longest = sequences.tail_ids[:, columns], sequences.longest
    return run(model, ids, mask, positions, cache, longest=longest)


def run_two_streams(model: PreTrainedModel, sequences: Sequences, cache: Cache) -> Tensor:
    """Both streams of the tail on top of a cache of the head of 2B rows -> logits (2B, S, V)."""
    positions = sequences.positions[:, sequences.head_ids.shape[1] :]
    ids, mask, positions = (x.repeat(2, 1) for x in (sequences.tail_ids, sequences.mask, positions))
    visibility = two_stream_visibility(sequences)
    return run(model, ids, mask, positions, cache, visibility, longest=sequences.longest)


def two_stream_visibility(sequences: Sequences) -> Visibility:
    """The context rows see everything, the reduced rows everything but the absorbed tokens."""
    everything = torch.ones_like(sequences.absorbed)
    return Visibility(torch.cat([everything, ~sequences.absorbed]))


def assemble(
    context_ids: Tensor,
    kept_ids: Tensor,
    *,
    prefix_ids: Tensor | None = None,
    context_mask: Tensor | None = None,
    kept_mask: Tensor | None = None,
    prefix_mask: Tensor | None = None,
    absorbed: list[tuple[int, int]] | None = None,
) -> Sequences:
    """Lay out prefix, context and kept tokens; arguments as in :meth:`icl_patch.ContextPatcher.compute`.

    Raises:
        ValueError: a shape, a mask or a span does not fit.
    """
    context_ids, context_mask = check_context(context_ids, context_mask)
    kept_ids, kept_mask = _as_batch("kept", kept_ids, kept_mask, context_ids.shape[0])
    if kept_ids.device != context_ids.device:
        raise ValueError(f"expected kept_ids on {context_ids.device}, got {kept_ids.device}")
    if kept_ids.shape[1] == 0:
        raise ValueError(f"expected at least one kept token, got kept_ids {tuple(kept_ids.shape)}")
    _check_padding("kept", kept_mask, "right")
    spans = _spans(absorbed, context_ids.shape[1])
    split = spans[0][1]
    hidden = torch.zeros(context_ids.shape[1], dtype=torch.bool, device=context_ids.device)
    for start, stop in spans:
        hidden[start:stop] = True
    empty = ~context_mask[:, spans[0][0] : split].any(1)
    if empty.any():
        raise ValueError(f"expected a token in the first absorbed span of every row, row {int(empty.nonzero()[0])} has only padding there")
    head = [(context_ids[:, :split], context_mask[:, :split], hidden[:split].expand(context_ids.shape[0], -1))]
    if prefix_ids is not None:
        prefix_ids, prefix_mask = _as_batch("prefix", prefix_ids, prefix_mask, context_ids.shape[0])
        head.insert(0, (prefix_ids, prefix_mask, torch.zeros_like(prefix_mask)))
    elif prefix_mask is not None:
        raise ValueError("expected prefix_ids with prefix_mask, got prefix_mask alone")
    head_ids, head_mask, head_absorbed = (torch.cat(parts, 1) for parts in zip(*head, strict=True))
    # a stable sort of the mask moves the padding to the left and keeps the tokens in order
    order = head_mask.long().sort(dim=1, stable=True).indices
    head_ids, head_mask, head_absorbed = (part.gather(1, order) for part in (head_ids, head_mask, head_absorbed))
    return Sequences(
        head_ids=head_ids,
        head_mask=head_mask,
        head_absorbed=head_absorbed & head_mask,
        tail_ids=torch.cat([context_ids[:, split:], kept_ids], 1),
        tail_mask=torch.cat([context_mask[:, split:], kept_mask], 1),
        tail_absorbed=torch.cat([hidden[split:], torch.zeros_like(kept_mask[0])]),
    )
