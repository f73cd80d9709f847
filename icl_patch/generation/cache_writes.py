"""The writes of a token's key and value into the cache, in the operation that then attends over
this cache: one call in place of three, and on CUDA two launches in place of four. With a row for
each stream it also puts the values of the rows without the context behind the attention: one call
in place of five.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator, MutableSequence, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icl_patch.generation.operator_recorder import Call, View, key_of, tensors_in
from icl_patch.recording.memory import memory_of

_aten = torch.ops.aten
# natively and in Triton: of both streams, and of the rows with the context alone
_PAIRS = ("icl_patch::attention_pair", "icl_patch::triton_attention_pair")
_SINGLE = ("icl_patch::decode_attention", "icl_patch::triton_decode_attention")
_WITH_WRITES = dict.fromkeys((_PAIRS[0], _SINGLE[0]), "write_and_attend")
_WITH_WRITES |= dict.fromkeys((_PAIRS[1], _SINGLE[1]), "triton_write_and_attend")


class _Attention(NamedTuple):
    """A call that attends, at place ``behind`` the own values of as many rows are put behind its
    result, as value ``made``. They are those in column ``slot`` of the cache, or ``own``.
    """

    call: Call
    behind: int
    made: int
    slot: Any = None
    own: View | None = None


def with_cache_writes(
    calls: Sequence[Call],
    values: Sequence[Tensor],
    whole: MutableSequence[View],
    is_written: Callable[[Any], bool],
    outputs: Container[int],
) -> list[Call]:
    """The calls; two writes of one column and the attention of both streams over what they wrote
    are one, at the attention's place.

    They stay apart if another call reads or writes this memory between them, or if the step writes
    into what they copy.

    Args:
        calls: of a step, in order. values: what they make.
        whole: how each value lies in its memory; changed for the attention's output.
        is_written: whether the step writes into the memory of a tensor or view.
        outputs: the values that the step gives.
    """
    result, attentions = dict(enumerate(calls)), dict(_attentions(calls, whole, outputs))
    last: dict[int, int] = {}  # by memory: the call that last read or wrote it
    for place, call in enumerate(calls):
        memory = [
            memory_of(x if isinstance(x, Tensor) else values[x.value])
            for x in tensors_in((call.args, call.kwargs))
        ]
        if (found := attentions.get(place)) is not None:
            keys, cached = (last.get(x, place) for x in memory[1:3])
            together = _together(found, calls[keys], calls[cached], is_written)
            if together is not None:
                for gone in {found.behind, keys, cached} - {place}:
                    del result[gone]
                result[place] = together
                (rows, heads, _), width = call.args[0].shape, call.args[2].shape[3]
                whole[found.made] = whole[found.made].reshaped((2 * rows, heads * width))
        last |= dict.fromkeys(memory, place)
    return list(result.values())


def _attentions(
    calls: Sequence[Call], whole: Sequence[View], outputs: Container[int]
) -> Iterator[tuple[int, _Attention]]:
    """The attentions of both streams, by their places."""
    makers = {number: place for place, call in enumerate(calls) for number in call.made}
    views = [x for call in calls for x in tensors_in((call.args, call.kwargs))]
    readers = Counter(x.value for x in views if isinstance(x, View))
    for place, call in enumerate(calls):
        name, number = call.target._schema.name, call.made[0]
        if name in _PAIRS and not call.kwargs and number is not None:
            yield place, _Attention(call, place, number, slot=call.args[3])
        parts: Sequence[Any] = call.args[0] if call.target is _aten.cat.default else ()
        if len(parts) != 2 or call.args[1:] not in ((), (0,)) or number is None:
            continue
        y, own = parts
        if not (isinstance(y, View) and isinstance(own, View)):
            continue
        attends = makers.get(y.value)
        if attends is None or calls[attends].target._schema.name not in _SINGLE:
            continue
        alone = readers[y.value] == 1 and y.value not in outputs
        if not alone or calls[attends].kwargs or not _is_all(y, whole):
            continue
        copied = calls[makers[own.value]] if own.value in makers else call
        if copied.target is _aten.clone.default and _is_all(own, whole):
            own = copied.args[0]
        if isinstance(own, View):
            yield attends, _Attention(calls[attends], place, number, own=own)


def _is_all(x: View, whole: Sequence[View]) -> bool:
    """Whether a view has all elements of a value, in their order."""
    value = whole[x.value]
    return value.is_contiguous and x.is_contiguous and x.reshaped(value.shape) == value


def _together(
    attention: _Attention,
    write_key: Call,
    write_value: Call,
    is_written: Callable[[Any], bool],
) -> Call | None:
    """One call of these three; None if they have to stay apart."""
    call, _, made, slot, own = attention
    query, keys, values, *rest = call.args
    if write_key is write_value:
        return None
    if not (_writes_into(keys, write_key) and _writes_into(values, write_value)):
        return None
    column, key, value = write_key.args[2], write_key.args[3], write_value.args[3]
    if own is None:
        del rest[0]
    else:
        slot = column
    if not key_of(slot) == key_of(column) == key_of(write_value.args[2]):
        return None
    if not all(isinstance(x, View) and x.elements for x in (query, key, value)):
        return None
    rows, heads, width = query.shape
    flat = _flat(value, own, heads)
    if flat is None or any(map(is_written, (column, slot, key, value))):
        return None
    query = View(
        query.value,
        (rows, heads, 1, width),
        (*query.stride[:2], width * query.stride[2], query.stride[2]),
        query.offset,
    )
    return replace(
        call,
        target=getattr(torch.ops.icl_patch, _WITH_WRITES[call.target._schema.name]).default,
        args=(query, keys, values, key, flat, column, *rest),
        made=(made,),
    )


def _writes_into(cache: View | Tensor, call: Call) -> bool:
    """Whether a call writes one token (B, G, 1, ·) into a cache (B, G, S, ·) that a step finds."""
    if call.target is not _aten.index_copy_.default or not isinstance(cache, Tensor):
        return False
    written, _, column, x = call.args
    return (
        key_of(written) == key_of(cache)
        and cache.dim() == 4
        and tuple(column.shape) == (1,)
        and tuple(x.shape) == (*cache.shape[:2], 1, cache.shape[3])
    )


def _flat(x: View, own: View | None, heads: int) -> View | None:
    """A view (B, G, 1, E) as (B, G E); with the ``own`` values of all heads, those of the rows
    behind it, as (2B, G E). None if its heads lie apart, or if these are others.
    """
    rows, groups, _, width = x.shape
    row, group, _, element = x.stride
    if groups > 1 and group != width * element:
        return None
    if own is None:
        return View(x.value, (rows, groups * width), (row, element), x.offset)
    if rows == 1:
        row = own.offset - x.offset
    shape, stride = (rows, groups, heads // groups, width), (row, group, 0, element)
    behind = View(x.value, shape, stride, x.offset + rows * row)
    if own.value != x.value or row < 0 or not torch.equal(_places(own), _places(behind)):
        return None
    return View(x.value, (2 * rows, groups * width), (row, element), x.offset)


def _places(x: View) -> Tensor:
    """Where the elements of a view lie in its memory, in order."""
    places = torch.tensor(x.offset)
    for length, stride in zip(x.shape, x.stride, strict=True):
        places = places.unsqueeze(-1) + stride * torch.arange(length)
    return places.flatten()
