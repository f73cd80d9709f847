"""Changing the result of one product inside a module of the model's.

A router turns its logits ``F.linear(z, W)`` into a choice of experts. Llama 4's experts multiply by
``torch.bmm`` and continue with an activation and a second product. A patch belongs between the
product and the arithmetic after it. If ranks share a matrix's inputs, it belongs between the
product and the sum over the ranks. The forwards of transformers' classes have no hook there, and
each class and version would need a copy of its forward. So a TorchFunctionMode intercepts the
product, only while the module runs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from icl_patch.errors import UnsupportedModelError


class Replacing(TorchFunctionMode):
    """Within ``with`` the functions of a table run in place of torch's."""

    def __init__(self, table: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.table.get(function, function)(*args, **kwargs or {})


class FirstProductChanged(Replacing):
    """Within ``with`` the result of the first call of ``product`` is replaced by ``change`` of it.

    Args:
        product: ``torch.nn.functional.linear`` or ``torch.bmm``.
        change: from the result of the first product to its replacement.

    Attributes:
        calls: of ``product``.
    """

    def __init__(self, product: Callable[..., Tensor], change: Callable[[Tensor], Tensor]) -> None:
        super().__init__({product: self._changed})
        self.product, self.change = product, change
        self.calls = 0

    def _changed(self, *args: Any, **kwargs: Any) -> Tensor:
        out = self.product(*args, **kwargs)
        self.calls += 1
        return self.change(out) if self.calls == 1 else out


def with_linear_changed(module: nn.Module, change: Callable[[Tensor], Tensor], *inputs: Any) -> Any:
    """``module(*inputs)`` when the result of its only linear product is replaced by ``change`` of
    it.
    """
    with FirstProductChanged(F.linear, change) as products:
        out = module(*inputs)
    if products.calls != 1:
        raise UnsupportedModelError(
            f"expected one linear product in {type(module).__name__}, got {products.calls}"
        )
    return out
