"""PatchedRouter: the router of a mixture of experts, with a change of its logits per token."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from icl_patch.layers.linear import PatchedLinear, add_bias_change
from icl_patch.layers.product_interception import with_linear_changed


class PatchedRouter(PatchedLinear):
    """A router: its linear map gives logits, by which it chooses experts; the patch changes the
    logits.

    The router's own arithmetic runs on from the changed logits.

    Source: Goldwaser et al. (2025), Lemma 7: the router is a reader like any other.
    """

    def with_logits(self, z: Tensor, change: Callable[[Tensor], Tensor], *others: Any) -> Any:
        """The base router's output when its logits (M, E) are replaced by ``change(logits)``;
        ``others`` are its further inputs.
        """
        return with_linear_changed(self.base_layer, change, z, *others)

    def _run(self, z: Tensor, *others: Any) -> Any:
        """(..., K) -> the base router's output."""
        if self.override is None:
            return self.with_logits(z, self._shown, *others)
        return self.override(self, z, *others)

    def _shown(self, logits: Tensor) -> Tensor:
        """The logits, which an observer sees."""
        if self.observer is not None:
            self.observer(logits)
        return logits

    def _replay(self, z: Tensor, *others: Any) -> Any:
        return self.with_logits(z, lambda logits: self._shown(self._changed(z, logits)), *others)

    def _changed(self, z: Tensor, logits: Tensor) -> Tensor:
        if self.bias_change is not None:
            return add_bias_change(logits, self.bias_change)
        return self._add_change(z, logits)
