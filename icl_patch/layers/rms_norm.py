"""PatchedRMSNorm: an RMSNorm with a scale per token; and which modules of a model are RMSNorms."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from icl_patch import ops
from icl_patch.layers.attachment import forward_of_others
from icl_patch.layers.device_hooks import forward_beneath, hooks_of, is_accelerates, weight_of
from icl_patch.layers.patched_module import (
    PatchedModule,
    matches_rows,
    other_rows,
    rows_of,
    with_base,
)

# Scales of the rows that a module is tried on: the small one shows its eps, the large ones whether
# it clamps.
_SCALES = (1e-3, 1.0, 30.0, 1000.0)


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
        names = [name for name in ("eps", "variance_epsilon") if hasattr(base_layer, name)]
        if (
            not names
            or getattr(base_layer, names[0]) is None
            or not isinstance(getattr(base_layer, "weight", None), Tensor)
        ):
            raise TypeError(
                "expected an RMSNorm with a weight and an eps (or variance_epsilon), got"
                f" {type(base_layer).__name__}"
            )
        self._eps_name = names[0]
        self.scale_offset, self.cast_first = scale_offset, cast_first

    @property
    def eps(self) -> float:
        """The base module's eps as it is now; setting it sets that of the base."""
        return float(getattr(self.base_layer, self._eps_name))

    @eps.setter
    def eps(self, value: float) -> None:
        setattr(self.base_layer, self._eps_name, value)

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
            raise ValueError(other_rows("new_scale", self.new_scale, x, f"({x.shape[-1]},)"))
        return self.apply_scale(x, self.new_scale)

    def apply_scale(self, x: Tensor, new_scale: Tensor) -> Tensor:
        """``m' ⊙ Norm(x)``, (..., n) -> (..., n): in x's dtype by our op, with the bits of
        :meth:`in_one_launch` where ``m'`` is the base's scale; in fp64 for an fp64 ``m'``.
        """
        if new_scale.dim() > 1:
            new_scale = new_scale.reshape(x.shape)
        if torch.float64 in (x.dtype, new_scale.dtype):
            return self._scaled(x, new_scale)
        return self._by_op(x, new_scale, 0.0)

    def _scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        """``m' ⊙ Norm(x)`` by torch's operators; with the base's own scale the base's own bits."""
        normalized = self.normalize(x)
        y = normalized * scale.to(torch.promote_types(scale.dtype, normalized.dtype))
        return y if scale.dtype == torch.float64 else y.to(x.dtype)

    def in_one_launch(self, x: Tensor) -> Tensor:
        """The base module's output by our op: equal to the module's up to rounding."""
        base: Any = self.base_layer
        return self._by_op(x, base.weight, self.scale_offset)

    def _by_op(self, x: Tensor, scale: Tensor, offset: float) -> Tensor:
        rows = rows_of(x)
        scale = scale if scale.dim() == 1 else scale.reshape(rows.shape)
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
            y = norm._scaled(x, norm.scale)
            if bool(((y == output) | (y.isnan() & output.isnan())).all()):
                return scale_offset, cast_first
    return None


def rms_norms(model: PreTrainedModel) -> Iterator[PatchedRMSNorm]:
    """The RMSNorms of a model with a scale of ``w`` or ``1 + w`` in the model's dtype, as new
    patched norms. Norms beneath patched modules count too; a norm with a replaced forward does not,
    unless accelerate has replaced it.

    No table lists classes: a copy with random weights is tried on random rows.
    """
    dtype = model.dtype
    for module in model.modules():
        *_, base = with_base(module)
        if (form := _form_of(base, dtype)) is not None:
            yield PatchedRMSNorm(base, scale_offset=form[0], cast_first=form[1])


# Attributes of every module, and those that overrides, accelerate and transformers add.
_OF_ANY_MODULE = {
    *vars(nn.Module()),
    *("forward", "__reduce_ex__", "_old_forward", "_hf_hook", "_is_hf_initialized"),
}
_SETTINGS = (bool, int, float, str, tuple, type(None), torch.dtype)
_forms: dict[Any, tuple[float, bool] | None] = {}  # by everything that a module's form depends on


def _form_of(module: nn.Module, dtype: torch.dtype) -> tuple[float, bool] | None:
    weight = module._parameters.get("weight")
    if (
        type(weight) is not nn.Parameter
        or isinstance(weight.data, DTensor)
        or weight.dim() != 1
        or weight.dtype != dtype
        # the classes of transformers compute in fp32 even so, our op does not
        or dtype == torch.float64
        or not _runs_its_class(module)
    ):
        return None
    parts = {**module._parameters, **module._buffers, **module._modules}
    settings = {name: x for name, x in list(vars(module).items()) if name not in _OF_ANY_MODULE}
    known = all(isinstance(x, _SETTINGS) for x in settings.values())
    if not known or any(x is not None for name, x in parts.items() if name != "weight"):
        return None  # its output may depend on more than the trial varies
    device = torch.device("cpu") if weight.is_meta else weight.device
    kind = type(module), type(module).forward
    key = (*kind, module.training, *settings.items(), len(weight), dtype, device)
    if key not in _forms:
        _forms[key] = _tried(module, len(weight), dtype, device)
    return _forms[key]


def _runs_its_class(module: nn.Module) -> bool:
    """Whether nobody but passes and accelerate has replaced the module's forward."""
    forward = forward_of_others(module)
    if hooks_of(module) and is_accelerates(forward):
        forward = forward_beneath(module)
    return forward is None


def random_rows(width: int, scales: Sequence[float]) -> Tensor:
    """Three random rows for each of the scales, (M, width) fp32, to try a module on."""
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    return torch.cat([scale * rows for scale in scales])


@torch.no_grad()
def _tried(
    module: nn.Module, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, bool] | None:
    x = random_rows(width, _SCALES).to(device, dtype)
    weight = nn.Parameter(random_rows(width, (1.0,))[0].to(device, dtype))
    like = copy.copy(module)
    vars(like).update(_parameters={**module._parameters, "weight": weight})
    try:
        return rms_norm_form(like, x, type(module).forward(like, x))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the module's own code takes other inputs: no RMSNorm
        return None
