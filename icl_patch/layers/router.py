"""PatchedRouter: the router of a mixture of experts, with a change of its logits per token."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from icl_patch import ops
from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.patched_module import Mode


class _Product(TorchFunctionMode):
    """Within this context the result of a kind of product goes through ``change``."""

    def __init__(self, change: Callable[[Tensor], Tensor], kind: Any = F.linear) -> None:
        super().__init__()
        self.change, self.kind = change, kind
        self.products = 0

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **kwargs or {})
        if function is not self.kind:
            return out
        self.products += 1
        return self.change(out)


class PatchedRouter(PatchedLinear):
    """A router, whose linear map gives logits and which then chooses experts by them: the change is
    made to its logits.

    Its own arithmetic from the logits on is left to it: the one ``F.linear`` in it is intercepted.

    Source: Goldwaser et al. (2025), Lemma 7: the router is a reader like any other.
    """

    def with_logits(self, z: Tensor, change: Callable[[Tensor], Tensor], *others: Any) -> Any:
        """What the base router returns when its logits (M, E) are replaced by ``change(logits)``;
        ``others``: its further inputs.
        """
        with _Product(change) as product:
            out = self.base_layer(z, *others)
        if product.products != 1:
            raise UnsupportedModelError(
                f"{type(self.base_layer).__name__} makes {product.products} linear products,"
                " not one"
            )
        return out

    def _run(self, z: Tensor, *others: Any) -> Any:
        """(..., K) -> what the base router returns."""
        if self.mode is Mode.OFF and self.observer is None:
            return self.base_layer(z, *others)
        if self.mode is Mode.RECORD:
            assert self.recorder is not None
            return self.recorder(self, z, *others)
        return self.with_logits(z, lambda logits: self._replayed(z, logits), *others)

    def _replayed(self, z: Tensor, logits: Tensor) -> Tensor:
        if self.mode is Mode.REPLAY:
            assert self.u is not None and self.v is not None
            rows = z.reshape(-1, z.shape[-1])
            u, v = (self._by_row(factor, z, len(rows)) for factor in (self.u, self.v))
            logits = ops.add_low_rank(logits.reshape(len(rows), -1), rows, u, v).reshape(
                logits.shape
            )
        if self.observer is not None:
            self.observer(logits)
        return logits
