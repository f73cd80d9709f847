"""PatchedRMSNorm: an RMSNorm with a scale per token."""

import torch
from torch import Tensor, nn

from icl_patch import ops
from icl_patch.layers.device_hooks import weight_of
from icl_patch.layers.patched_module import PatchedModule, matches_rows


class PatchedRMSNorm(PatchedModule):
    """An RMSNorm with a scale per token: ``y = m' ⊙ x / sqrt(mean(x²) + eps)``.

    Args:
        base_layer: an RMSNorm with a ``weight`` (n,) and its eps as ``eps`` or
            ``variance_epsilon``.
        scale_offset: the scale is ``offset + weight`` (1 for Gemma, 0 for Llama).
        cast_first: whether the normalised input is rounded to the model's dtype before it is scaled
            (Llama) or after (Gemma). ``BlockSpec`` has both as they were found in the model.

    Raises:
        TypeError: the module has no weight or no eps.

    Source: Goldwaser et al. (2025), Lemma 10.
    """

    _PATCH = ("new_scale",)
    new_scale: Tensor | None

    def __init__(
        self,
        base_layer: nn.Module,
        *,
        scale_offset: float,
        cast_first: bool,
    ) -> None:
        super().__init__(base_layer)
        eps = getattr(base_layer, "eps", getattr(base_layer, "variance_epsilon", None))
        if eps is None or not isinstance(getattr(base_layer, "weight", None), Tensor):
            raise TypeError(
                f"expected an RMSNorm with a weight and an eps, got {type(base_layer).__name__}"
            )
        self.eps = float(eps)
        self.scale_offset, self.cast_first = scale_offset, cast_first

    @property
    def scale(self) -> Tensor:
        """m, the base module's effective scale: (n,) fp32, as the base computes it in any dtype;
        fp64 of an fp64 weight to which nothing is added.
        """
        weight = weight_of(self.base_layer)
        if self.scale_offset == 0 and weight.dtype == torch.float64:
            return weight.detach()
        return self.scale_offset + weight.float()

    def normalize(self, x: Tensor) -> Tensor:
        """``Norm(x)`` before the scale, fp32, rounded where the base module rounds."""
        normalized = ops.rms_normalize(x.float(), self.eps)
        return normalized.to(x.dtype).to(normalized.dtype) if self.cast_first else normalized

    def set_patch(self, new_scale: Tensor) -> None:
        """Use the scale m', (..., n) per row or (n,), from now on; an fp64 scale makes the output
        fp64. The forward raises ValueError for another shape.
        """
        self.replay(new_scale=new_scale)

    def _replay(self, x: Tensor) -> Tensor:
        """(..., n) -> (..., n)."""
        assert self.new_scale is not None
        if not matches_rows(self.new_scale, x):
            raise ValueError(
                f"expected new_scale (n,) or one for each row of x {tuple(x.shape)}, got"
                f" {tuple(self.new_scale.shape)}"
            )
        return self.apply_scale(x, self.new_scale)

    def apply_scale(self, x: Tensor, new_scale: Tensor) -> Tensor:
        """``m' ⊙ Norm(x)`` in x's dtype, or in fp64 for an fp64 ``m'``; with the base's own scale
        the base's own bits.
        """
        normalized = self.normalize(x)
        if new_scale.dim() > 1:
            new_scale = new_scale.reshape(x.shape)
        y = normalized * new_scale.to(torch.promote_types(new_scale.dtype, normalized.dtype))
        return y if new_scale.dtype == torch.float64 else y.to(x.dtype)

    def in_one_launch(self, x: Tensor, new_scale: Tensor | None = None) -> Tensor:
        """``m' ⊙ Norm(x)``, or the base module's output, by our op: equal to theirs up to rounding;
        with the base's scale both have the same bits.
        """
        rows = x.reshape(-1, x.shape[-1])
        scale, offset = (
            (self.base_layer.weight, self.scale_offset)
            if new_scale is None
            else (new_scale.reshape(rows.shape), 0.0)
        )
        assert isinstance(scale, Tensor)
        return ops.rms_norm(
            rows, scale, self.eps, scale_offset=offset, cast_first=self.cast_first
        ).reshape(x.shape)


def rms_norm_form(module: nn.Module, x: Tensor, output: Tensor) -> tuple[float, bool] | None:
    """``scale_offset`` and ``cast_first`` of an RMSNorm that maps x to ``output``, bit for bit;
    None if the module is no such norm.

    Raises:
        TypeError: the module has no weight or no eps.
    """
    for scale_offset in (0.0, 1.0):
        for cast_first in (True, False):
            norm = PatchedRMSNorm(module, scale_offset=scale_offset, cast_first=cast_first)
            y = norm.apply_scale(x, norm.scale)
            if bool(((y == output) | (y.isnan() & output.isnan())).all()):
                return scale_offset, cast_first
    return None
