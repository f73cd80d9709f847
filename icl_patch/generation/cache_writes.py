"""The writes of a token's key and value into the cache, in the operation that then attends over
this cache: one call in place of three, and on CUDA two launches in place of four.
"""

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from icl_patch.generation.operator_recorder import Call, View, key_of, tensors_in
from icl_patch.recording.memory import memory_of

_aten = torch.ops.aten
# natively and in Triton
_WITH_WRITES = {
    "icl_patch::attention_pair": "write_and_attend",
    "icl_patch::triton_attention_pair": "triton_write_and_attend",
}


def with_cache_writes(
    calls: Sequence[Call],
    values: Sequence[Tensor],
    whole: MutableSequence[View],
    is_written: Callable[[Any], bool],
) -> list[Call]:
    """The calls; two writes of one column and the attention of both streams over what they wrote
    are one, at the attention's place.

    They stay apart if another call reads or writes this memory between them, or if the step writes
    into what they copy.

    Args:
        calls: of a step, in order. values: what they make.
        whole: how each value lies in its memory; changed for the attention's output.
        is_written: whether the step writes into the memory of a tensor or view.
    """
    result = dict(enumerate(calls))
    last: dict[int, int] = {}  # by memory: the call that last read or wrote it
    for place, call in enumerate(calls):
        memory = [
            memory_of(x if isinstance(x, Tensor) else values[x.value])
            for x in tensors_in((call.args, call.kwargs))
        ]
        if call.target._schema.name in _WITH_WRITES:
            keys, cached = (last.get(x, place) for x in memory[1:3])
            together = _together(call, calls[keys], calls[cached], is_written)
            if together is not None:
                result[place] = together
                del result[keys], result[cached]
                (output,) = call.made
                assert output is not None
                rows, heads, width = whole[output].shape
                whole[output] = whole[output].reshaped((rows, heads * width))
        last |= dict.fromkeys(memory, place)
    return list(result.values())


def _together(
    attention: Call,
    write_key: Call,
    write_value: Call,
    is_written: Callable[[Any], bool],
) -> Call | None:
    """One call of these three; None if they have to stay apart."""
    query, keys, values, slot, *rest = attention.args
    if write_key is write_value or attention.kwargs:
        return None
    if not (_writes_into(keys, write_key) and _writes_into(values, write_value)):
        return None
    column, key, value = write_key.args[2], write_key.args[3], write_value.args[3]
    if not key_of(slot) == key_of(column) == key_of(write_value.args[2]):
        return None
    if not all(isinstance(x, View) and x.elements for x in (query, key, value)):
        return None
    flat = _flat(value)
    if flat is None or any(map(is_written, (column, slot, key, value))):
        return None
    rows, heads, width = query.shape
    query = View(
        query.value,
        (rows, heads, 1, width),
        (*query.stride[:2], width * query.stride[2], query.stride[2]),
        query.offset,
    )
    name = _WITH_WRITES[attention.target._schema.name]
    return replace(
        attention,
        target=getattr(torch.ops.icl_patch, name).default,
        args=(query, keys, values, key, flat, column, *rest),
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


def _flat(x: View) -> View | None:
    """A view (B, G, 1, E) as (B, G E); None if its heads lie apart."""
    rows, groups, _, width = x.shape
    if groups > 1 and x.stride[1] != width * x.stride[3]:
        return None
    return View(x.value, (rows, groups * width), (x.stride[0], x.stride[3]), x.offset)
