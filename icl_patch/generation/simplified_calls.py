"""The calls that a step's program makes, of those that were recorded."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from icl_patch.generation.cache_writes import with_cache_writes
from icl_patch.generation.grouped_maps import grouped
from icl_patch.generation.operator_recorder import (
    Call,
    OperatorRecorder,
    View,
    key_of,
    tensors_in,
)
from icl_patch.generation.program_source import SIGNS
from icl_patch.recording.memory import memory_of

_aten = torch.ops.aten
# What these make depends on their input's shape alone.
_OF_SHAPES = {_aten.zeros_like, _aten.ones_like, _aten.full_like}
_OF_SHAPES |= {_aten.new_zeros, _aten.new_ones, _aten.new_full}
_COPIES = frozenset((_aten.clone, _aten._to_copy))
_JOINS = frozenset((_aten.cat.default, _aten.stack.default))


class Simplified:
    """The calls that a program makes, of those that were recorded.

    Left out are calls whose result is the same in every step, copies of what nobody changes, and
    what was computed before. Sums and products of rows are computed as rows, without the axes of
    length 1 around them, which would cost a view before and behind.

    Attributes:
        calls: in order. outputs: what the program gives; tensors that it makes are views.
        whole: how each value lies in its memory.
    """

    def __init__(self, recorder: OperatorRecorder, outputs: list[Any]) -> None:
        self._values, self._written = recorder.values, recorder.written
        self.whole = [View.at(number, value) for number, value in enumerate(recorder.values)]
        self._instead: dict[int, View | Tensor] = {}
        # of values that others were put together in: where each begins that is not the same always
        self._parts: dict[int, list[tuple[int, View]]] = {}
        self._constant = {*recorder.constant}  # memory of what is the same in every step
        self._before: dict[Any, Call] = {}
        simplified = (call for x in recorder.calls for call in self._simplified(x))
        calls = grouped(simplified, self._is_written)
        self.outputs: list[Any] = _with(self._resolved, outputs)
        needed = {x.value for x in self.outputs if isinstance(x, View)}
        calls = with_cache_writes(calls, self._values, self.whole, self._is_written, needed)
        self.calls: list[Call] = []
        for call in reversed(calls):
            if call.writes or needed & {*call.made}:
                self.calls.append(call)
                needed |= {
                    x.value for x in tensors_in((call.args, call.kwargs)) if isinstance(x, View)
                }
        self.calls.reverse()

    def _resolved(self, x: View | Tensor) -> View | Tensor:
        """What stands for a tensor in the program."""
        if isinstance(x, Tensor):
            return x
        for start, part in self._parts.get(x.value, ()) if x.is_contiguous else ():
            if start <= x.offset and x.offset + x.elements <= start + part.elements:
                return replace(x, value=part.value, offset=x.offset - start + part.offset)
        if (instead := self._instead.get(x.value)) is None:
            return x
        if isinstance(instead, Tensor):
            return instead.as_strided(x.shape, x.stride, x.offset)
        # of a copy or an earlier result, whose values lie in the same order
        shift = instead.offset - int(self._values[x.value].storage_offset())
        return replace(x, value=instead.value, offset=x.offset + shift)

    def _simplified(self, call: Call) -> Iterator[Call]:
        """What the program calls for it: nothing, itself or others."""
        args, kwargs = (_with(self._resolved, x) for x in (call.args, call.kwargs))
        call = replace(call, args=args, kwargs=kwargs)
        made = [number for number in call.made if number is not None]
        if call.writes or any(memory_of(self._values[number]) in self._written for number in made):
            yield call
            return
        given = tensors_in((args, kwargs))
        packet = call.target.overloadpacket
        if packet in _OF_SHAPES or all(self._is_constant(x) for x in given):
            for number in made:
                self._instead[number] = self._values[number]
                self._constant.add(memory_of(self._values[number]))
        elif any(map(self._is_written, given)):
            yield call
        elif packet in _COPIES and self._is_copy(given[0], self._values[made[0]]):
            self._instead[made[0]] = given[0]
        elif self._is_new(call):
            yield from self._joined(call)

    def _is_new(self, call: Call) -> bool:
        """Whether it computes what no call before it did."""
        before = self._before.setdefault(key_of((call.target, call.args, call.kwargs)), call)
        if before is not call:
            for again, first in zip(call.made, before.made, strict=True):
                if again is not None and first is not None:
                    self._instead[again] = View.at(first, self._values[first])
        return before is call

    def _joined(self, call: Call) -> Iterator[Call]:
        """The call; if it puts tensors one behind the other, with fewer parts."""
        number, joins = call.made[0], call.target in _JOINS and call.args[1:] in ((), (0,))
        parts = list(call.args[0]) if joins else []
        if number is None or not parts or not self._are_contiguous(self.whole[number], *parts):
            yield self._of_rows(call)
            return
        result, joined = self.whole[number], _neighbours(parts)
        same_dtype = len({self._values[x.value].dtype for x in (result, *parts)}) == 1
        if len(joined) == 1 and same_dtype:
            self._instead[number] = joined[0].reshaped(result.shape)
        elif len(joined) < len(parts):
            flat = [part.reshaped((part.elements,)) for part in joined]
            self.whole[number] = result.reshaped((result.elements,))
            yield replace(call, target=_aten.cat.default, args=(flat,))
        elif same_dtype and self._are_whole(parts):
            whole = [self.whole[part.value] for part in parts]
            rows, *shape = whole[0].shape
            self.whole[number] = result.reshaped((len(parts) * rows, *shape))
            yield replace(call, target=_aten.cat.default, args=(whole,))
        else:
            yield self._of_rows(call)

    @staticmethod
    def _are_contiguous(*parts: View | Tensor) -> bool:
        return all(isinstance(part, View) and part.is_contiguous for part in parts)

    def _are_whole(self, parts: Sequence[View]) -> bool:
        """Whether these are all of values of one shape."""
        whole = [self.whole[part.value] for part in parts]
        sizes = [x.elements for x in whole] == [x.elements for x in parts]
        return sizes and len({x.shape for x in whole}) == 1 and bool(whole[0].shape)

    def _of_rows(self, call: Call) -> Call:
        """The call with its operands and its result as rows, (·, n). An operand has as many rows as
        the result, or one.
        """
        number, is_cat = call.made[0], call.target is _aten.cat.default
        operands = list(call.args[0] if is_cat else call.args)
        views = [x if isinstance(x, View) else View.at(-1, x) for x in tensors_in(operands)]
        if len(views) < 2 or call.kwargs or not (call.target in SIGNS or is_cat):
            return call
        assert number is not None
        result, joins = self.whole[number], is_cat and call.args[1:] in ((), (0,))
        if not result.elements or not all(
            x.is_contiguous
            and x.shape[-1:] == result.shape[-1:] != ()
            and (joins or x.elements in (result.elements, x.shape[-1]))
            for x in (result, *views)
        ):
            return call

        def rows(x: View | Tensor) -> View | Tensor:
            short = (math.prod(x.shape[:-1]), x.shape[-1])
            return x.view(short) if isinstance(x, Tensor) else x.reshaped(short)

        if joins:
            dtype = self._values[number].dtype
            places = _places(operands)
            self._parts[number] = [x for x in places if self._values[x[1].value].dtype == dtype]
        self.whole[number] = result.reshaped((math.prod(result.shape[:-1]), result.shape[-1]))
        args = _with(rows, call.args)
        return replace(call, args=args)

    def _is_constant(self, x: View | Tensor) -> bool:
        return isinstance(x, Tensor) and memory_of(x) in self._constant

    def _is_written(self, x: View | Tensor) -> bool:
        return memory_of(x if isinstance(x, Tensor) else self._values[x.value]) in self._written

    def _is_copy(self, x: View | Tensor, copy: Tensor) -> bool:
        """Whether a copy lies in its memory as ``x``, which a call has made, in its own."""
        if isinstance(x, Tensor):
            return False
        value, other = self._values[x.value], View.at(-1, copy)
        if (value.dtype, value.device) != (copy.dtype, copy.device):
            return False
        return x.shape == other.shape and x.stride == other.stride


def _with(function: Callable[[Any], Any], arguments: Any) -> Any:
    """Arguments of a call, with each tensor and view replaced."""
    return tree_map_only((Tensor, View), function, arguments)


def _neighbours(parts: Iterable[View]) -> list[View]:
    """The parts; those that lie one behind the other in a value are one."""
    joined: list[View] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and (last.value, last.offset + last.elements) == (part.value, part.offset):
            joined[-1] = last.reshaped((last.elements + part.elements,))
        else:
            joined.append(part)
    return joined


def _places(parts: Iterable[View | Tensor]) -> Iterator[tuple[int, View]]:
    """Where each of the contiguous tensors that are put one behind the other begins."""
    start = 0
    for part in parts:
        if isinstance(part, View):
            yield start, part
        start += math.prod(part.shape)
