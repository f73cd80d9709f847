"""Writers' outputs as tensors that notice the sum they go into, or that no cast rounds.

Some blocks go on from the sum of their residual stream and their writer's output instead of ending
with it: no module of theirs ends at the sum, so no hook can see it or round it. The writer's output
is handed over as an :class:`ResidualSum`, which can. Other blocks cast their MLP's output to the
model's dtype before they add it; an :class:`Unrounded` writer's output reaches the sum in fp64.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CASTS = ("to", "type_as", "type", "float", "bfloat16", "half")
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
        made = Tensor._make_subclass(cls, out.as_subclass(Tensor))
        before = out.on_sum if isinstance(out, ResidualSum) else []
        made.on_sum = [on_sum, *before] if first else [*before, on_sum]
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = function(*args, **kwargs or {})
        made = made.as_subclass(Tensor) if isinstance(made, ResidualSum) else made
        if getattr(function, "__name__", "") not in _ADDITIONS:
            return made
        for on_sum in next(part for part in args if isinstance(part, ResidualSum)).on_sum:
            changed = on_sum(made)
            made = made if changed is None else changed
        return made


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
            made = function(*args, **kwargs or {})
        wide = isinstance(made, Tensor) and made.dtype == torch.float64
        return made.as_subclass(cls) if wide else made
