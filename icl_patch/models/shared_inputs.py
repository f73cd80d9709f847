"""Linear maps that read one tensor, such as q, k and v, computed together."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from icl_patch import ops
from icl_patch.models.forward_override import Forward, linear_forward


class SharedInputs:
    """Forwards of linear maps, of which neighbours that read one tensor are computed by one op.

    The first pass finds them. In later passes the call of the first one computes all of them, and
    the outputs of the others are kept until they are called with the same tensor. A map that is
    called with another tensor, after a change of the tensor in place, or before the first one
    computes its own output. Nothing is kept after a pass.

    Args:
        modules: the linear maps that run through these forwards.
        others: the maps that read the input of the map called before them, by that map. If it is
            empty, the first pass fills it; then it serves other objects of the same model.
    """

    def __init__(self, modules: Iterable[nn.Linear], others: dict[Any, list[nn.Linear]]) -> None:
        self._modules, self._others, self._searches = frozenset(modules), others, not others
        # the first map that has read the last input, that input and its version
        self._first: Any = (None, None, 0)
        self._kept: dict[nn.Linear, Tensor] = {}

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """The context of each pass."""
        try:
            yield
            self._searches = False
        finally:
            self._first = (None, None, 0)
            self._kept.clear()

    def forward_of(self, module: nn.Linear) -> Forward:
        """The forward of one of the maps."""
        alone = linear_forward(module)

        def forward(x: Tensor) -> Tensor:
            # inference tensors do not count their changes
            if x.is_inference() or torch.is_autocast_enabled(x.device.type):
                return alone(x)
            first, given, version = self._first
            if given is not x or version != x._version:
                self._first = (module, x, x._version)
                self._kept.clear()
            elif module in self._kept:
                return self._kept.pop(module)
            elif self._searches and module is not first:
                self._others.setdefault(first, []).append(module)
            maps = [module, *(m for m in self._others.get(module, ()) if m in self._modules)]
            if len(maps) == 1:
                return alone(x)
            outputs = ops.patched_linears(
                x.reshape(-1, x.shape[-1]), [m.weight for m in maps], biases=[m.bias for m in maps]
            )
            own, *rest = (y.reshape(*x.shape[:-1], y.shape[-1]) for y in outputs)
            self._kept.update(zip(maps[1:], rest, strict=True))
            return own

        return forward
