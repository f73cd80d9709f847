"""Recording the operators of a decode step as it runs.

A value is known by its memory. A view is where and how it lies in the memory that an operator has
made, so a chain of reshapes is one view.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from icl_patch.recording.memory import memory_of

_READ = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class View:
    """A tensor in the memory of a value, by its number: how it lies there."""

    value: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def at(cls, value: int, tensor: Tensor) -> "View":
        """A tensor in the memory of value number ``value``. Where a stride does not matter, it is
        that of a contiguous tensor.
        """
        strides, next_stride = [], 1
        for length, stride in zip(tensor.shape[::-1], tensor.stride()[::-1], strict=True):
            strides.append(next_stride if length == 1 else stride)
            next_stride = strides[-1] * length
        return cls(value, tuple(tensor.shape), tuple(strides[::-1]), int(tensor.storage_offset()))

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one behind the other."""
        return self.stride == _contiguous_strides(self.shape)

    def reshaped(self, shape: tuple[int, ...]) -> "View":
        """The same elements of a contiguous view in another shape."""
        return View(self.value, shape, _contiguous_strides(shape), self.offset)

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an operator; ``made`` are the numbers of the values that it made, None for a result
    in its inputs' memory. ``several``: whether it returns a tuple.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[int | None, ...]
    several: bool

    @property
    def writes(self) -> bool:
        """Whether it changes an input."""
        mutable: bool = self.target._schema.is_mutable
        return mutable


def tensors_in(part: Any) -> list[Any]:
    """The tensors and views in the arguments or results of a call."""
    return [x for x in tree_leaves(part) if isinstance(x, (Tensor, View))]


def _reads_numbers(function: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the host gets to know numbers, or a shape that depends on them."""
    if function.overloadpacket is torch.ops.aten.index_put_:
        return False  # whichever numbers it finds in a mask, its result has the input's shape
    if function.overloadpacket is torch.ops.aten.index:
        return any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1]))
    return any(tag in function.tags for tag in _READ)


def _is_random(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it draws random numbers; attention does for a dropout alone."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    has_dropout = any(argument.name == "dropout_p" for argument in function._schema.arguments)
    return not has_dropout or bool(by_name(function, args, kwargs).get("dropout_p", 0.0))


def by_name(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names; defaults are left out."""
    names = (argument.name for argument in function._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


class NoHostReads(TorchFunctionMode):
    """Within this context reading a tensor's numbers on the host, which no operator does, raises an
    error.
    """

    _READS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in self._READS:
            raise RuntimeError(f"it reads a tensor's numbers on the host ({function.__name__})")
        return function(*args, **kwargs or {})


class OperatorRecorder(TorchDispatchMode):
    """Within this context the operators that run are kept, in order.

    Attributes:
        values: what they made, which stays alive: no other tensor gets its memory.
        written: the memory that an operator wrote into.
        constant: the memory that depends on nothing from before the step: its numbers are the same
            in every step, so the host may read them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.values: list[Tensor] = []
        self.written: set[int] = set()
        self.constant: set[int] = set()
        self._alive: list[Tensor] = []  # made of the host's numbers, as ``torch.tensor`` does
        self._number: dict[tuple[int, torch.dtype], int] = {}
        self._made: set[int] = set()  # the values' memory

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = {memory_of(x) for x in tensors_in((args, kwargs))}
        if function is torch.ops.aten.lift_fresh.default:
            self._alive.append(result)
            self.constant |= given
        known = isinstance(function, OpOverload)
        if not known or (_reads_numbers(function, args) and not given <= self.constant):
            raise RuntimeError(f"it reads a tensor's numbers on the host ({function})")
        if _is_random(function, args, kwargs):
            raise RuntimeError(f"it draws random numbers ({function})")
        if any(x.is_conj() or x.is_neg() for x in tensors_in((args, kwargs, result))):
            raise RuntimeError(f"it reads or makes a view with other numbers ({function})")
        several = isinstance(result, (tuple, list))
        arguments, keywords = self.known(args), self.known(kwargs)
        made = tuple(self._keep(x, given) for x in (result if several else (result,)))
        call = Call(function, arguments, keywords, made, several)
        if call.writes:
            named = by_name(function, args, kwargs)
            for argument in function._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.written |= {memory_of(x) for x in tensors_in(named.get(argument.name))}
            self.constant -= self.written
        elif given <= self.constant:
            self.constant |= {memory_of(x) for x in tensors_in(result)}
        if call.writes or any(number is not None for number in made):
            self.calls.append(call)
        return result

    def _keep(self, result: Any, given: set[int]) -> int | None:
        """The number of a new value; None for one in the memory of an input."""
        if not isinstance(result, Tensor):
            return None
        memory = memory_of(result)
        place = memory, result.dtype
        if memory in given and (memory not in self._made or place in self._number):
            return None
        self._made.add(memory)
        self._number[place] = number = len(self.values)
        self.values.append(result)
        return number

    def known(self, part: Any) -> Any:
        """Tensors that were recorded as views; others, from before the step, stay tensors."""

        def view(x: Any) -> Any:
            number = self._number.get((memory_of(x), x.dtype))
            return x if number is None else View.at(number, x)

        return tree_map_only(Tensor, view, part)


def key_of(part: Any) -> Any:
    """Equal for the same call of the same tensors."""
    if isinstance(part, (tuple, list)):
        return tuple(key_of(x) for x in part)
    if isinstance(part, dict):
        return tuple((name, key_of(x)) for name, x in part.items())
    if isinstance(part, Tensor):
        return memory_of(part), part.dtype, View.at(-1, part)
    if isinstance(part, float):
        return float, part.hex()  # -0.0 is another number than 0.0
    return type(part), part
