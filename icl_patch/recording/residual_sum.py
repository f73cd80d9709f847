"""A tensor that notices the sum it goes into.

Some blocks go on from the sum of their residual stream and their writer's output instead of ending
with it: no module of theirs ends at the sum, so no hook can see it or round it. The writer's output
is handed over as an :class:`ResidualSum`, which can.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ADDITIONS = ("add", "add_", "__add__", "__radd__", "__iadd__")
OnSum = Callable[[Tensor], Tensor | None]


class ResidualSum(Tensor):
    """A writer's output, of which the first addition hands its sum to ``on_sum``; the result is a
    plain tensor, as of everything else.
    """

    on_sum: list[OnSum]

    @classmethod
    def of(cls, out: Tensor, on_sum: OnSum, *, first: bool = False) -> "ResidualSum":
        """``out``, with ``on_sum`` called with the sum before (``first``) or after those that are
        called already.

        A tensor that ``on_sum`` returns takes the sum's place.
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
