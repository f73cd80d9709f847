"""ResidualSum and Unrounded: a writer's output on its way to the block's sum.

Some blocks compute more after the sum of their residual stream and their writer's output. None of
their modules ends at the sum, so no hook can see or round it. There the writer's output becomes a
:class:`ResidualSum`. Other blocks cast their MLP's output to the model's dtype before they add it.
An :class:`Unrounded` output reaches the sum in fp64.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CASTS = ("to", "type_as", "type", "float", "bfloat16", "half")
_ADDITIONS = ("add", "add_", "__add__", "__radd__", "__iadd__")
OnSum = Callable[[Tensor], Tensor | None]


class ResidualSum(Tensor):
    """A writer's output. Its first addition calls ``on_sum`` with the sum; every operation on it
    returns a plain tensor.
    """

    on_sum: list[OnSum]

    @classmethod
    def of(cls, out: Tensor, on_sum: OnSum, *, first: bool = False) -> "ResidualSum":
        """``out`` as a ResidualSum; ``on_sum`` is called first or after its other functions.

        If ``on_sum`` returns a tensor, this replaces the sum.
        """
        result = Tensor._make_subclass(cls, out.as_subclass(Tensor))
        before = out.on_sum if isinstance(out, ResidualSum) else []
        result.on_sum = [on_sum, *before] if first else [*before, on_sum]
        return result

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs or {})
        result = result.as_subclass(Tensor) if isinstance(result, ResidualSum) else result
        if getattr(function, "__name__", "") not in _ADDITIONS:
            return result
        for on_sum in next(part for part in args if isinstance(part, ResidualSum)).on_sum:
            changed = on_sum(result)
            result = result if changed is None else changed
        return result


class Unrounded(Tensor):
    """A writer's output in fp64 that stays fp64 when the block casts it, and so does every tensor
    that the block makes of it.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in _CASTS and isinstance(args[0], Unrounded):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs or {})
        wide = isinstance(result, Tensor) and result.dtype == torch.float64
        return result.as_subclass(cls) if wide else result
