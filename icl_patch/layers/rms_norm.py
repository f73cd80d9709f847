"""PatchedRMSNorm: an RMSNorm with a scale per token; and which modules of a model are RMSNorms."""

import copy
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from icl_patch import ops
from icl_patch.layers.attachment import PassForward, forward_of_others, take_ended
from icl_patch.layers.device_hooks import forward_beneath, hooks_of, is_accelerates, weight_of
from icl_patch.layers.patched_module import (
    PatchedModule,
    matches_rows,
    other_rows,
    rows_of,
    untouched,
    with_base,
)
from icl_patch.metrics import linf
from icl_patch.tolerances import rounding_limit

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
        tried: whether the caller knows that the module is such a norm. Otherwise it is tried on
            random rows.

    Hooks of the base module, and global ones, run with a patch too.

    Raises:
        TypeError: the module has no weight (n,) or no eps, or computes something else.

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
        tried: bool = False,
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
        if not tried:
            _check_form(self)

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
        fp64 of an fp64 weight to which nothing is added, or that the base adds to in fp64.
        """
        weight = weight_of(self.base_layer)
        if weight.dtype == torch.float64 and (self.scale_offset == 0 or self._in_fp64):
            return self.scale_offset + weight.detach()
        return self.scale_offset + weight.float()

    @cached_property
    def _in_fp64(self) -> bool:
        """Whether the base computes fp64 rows in fp64, and not in fp32 as transformers' classes."""
        base: Any = self.base_layer
        like, x = _random_call(base, len(base.weight), torch.float64, _device_of(base))
        expected = (self.scale_offset + like.weight) * ops.rms_normalize(x, self.eps)
        limit = torch.finfo(torch.float32).eps ** 1.5  # between the roundings of both
        return bool((linf(type(base).forward(like, x), expected) <= limit).all())

    def normalize(self, x: Tensor) -> Tensor:
        """``Norm(x)`` before the scale, fp32, in fp64 if the base computes x so; rounded where the
        base module rounds.
        """
        wide = x if x.dtype == torch.float64 and self._in_fp64 else x.float()
        normalized = ops.rms_normalize(wide, self.eps)
        return normalized.to(x.dtype).to(normalized.dtype) if self.cast_first else normalized

    def _dtype_of(self, x: Tensor) -> torch.dtype:
        """The dtype of the base's output: after a rounding it multiplies by its weight."""
        base: Any = self.base_layer
        return torch.promote_types(x.dtype, base.weight.dtype) if self.cast_first else x.dtype

    def set_patch(self, new_scale: Tensor) -> None:
        """Use the scale m', (..., n) per row or (n,), from now on; an fp64 scale makes the output
        fp64. The forward raises ValueError for another shape.
        """
        base: Any = self.base_layer
        if base.weight.dtype == torch.float64:
            _ = self._in_fp64  # torch.compile cannot try it
        self.replay(new_scale=new_scale)

    def _replay(self, x: Tensor) -> Tensor:
        """(..., n) -> (..., n)."""
        assert self.new_scale is not None
        if not matches_rows(self.new_scale, x):
            raise ValueError(other_rows("new_scale", self.new_scale, x, f"({x.shape[-1]},)"))
        # an attached model's hooks are its patcher's matter
        if self.attachment is not None or untouched(self.base_layer):
            return self.apply_scale(x, self.new_scale)
        return self._inside_hooks(x, self.new_scale)

    def _inside_hooks(self, x: Tensor, new_scale: Tensor) -> Tensor:
        """:meth:`apply_scale` as the base's forward, inside its hooks and those of all modules."""
        base, thread = self.base_layer, [threading.get_ident()]
        if forward_of_others(base) is not None:
            raise ValueError(
                f"expected {type(base).__name__} with its own forward to patch, got another"
                " forward: take it away first"
            )
        forward = PassForward(base, partial(self.apply_scale, new_scale=new_scale), thread)
        try:
            forward.put()
            y: Tensor = base(x)
            return y
        finally:
            thread[0] = 0
            take_ended(base)

    def apply_scale(self, x: Tensor, new_scale: Tensor) -> Tensor:
        """``m' ⊙ Norm(x)``, (..., n) -> (..., n): in the dtype of the base's output by our op, with
        the bits of :meth:`in_one_launch` where ``m'`` is the base's scale; in fp64 for an fp64
        ``m'``.
        """
        if new_scale.dim() > 1:
            new_scale = new_scale.reshape(x.shape)
        if torch.float64 in (x.dtype, new_scale.dtype) or self._dtype_of(x) != x.dtype:
            return self._scaled(x, new_scale)
        return self._by_op(x, new_scale, 0.0)

    def _scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        """``m' ⊙ Norm(x)`` by torch's operators; with the base's own scale the base's own bits."""
        normalized = self.normalize(x)
        y = normalized * scale.to(torch.promote_types(scale.dtype, normalized.dtype))
        return y if scale.dtype == torch.float64 else y.to(self._dtype_of(x))

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
            form: Any = {"scale_offset": scale_offset, "cast_first": cast_first}
            norm = PatchedRMSNorm(module, **form, tried=True)
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
            yield PatchedRMSNorm(base, scale_offset=form[0], cast_first=form[1], tried=True)


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
    device = _device_of(module)
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


def _random_call(
    module: nn.Module, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Any, Tensor]:
    """A copy of a norm with a random weight, and random rows for it."""
    weight = nn.Parameter(random_rows(width, (1.0,))[0].to(device, dtype))
    like = copy.copy(module)
    vars(like).update(_parameters={**module._parameters, "weight": weight})
    return like, random_rows(width, _SCALES).to(device, dtype)


@torch.no_grad()
def _tried(
    module: nn.Module, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, bool] | None:
    like, x = _random_call(module, width, dtype, device)
    try:
        return rms_norm_form(like, x, type(module).forward(like, x))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the module's own code takes other inputs: no RMSNorm
        return None


@torch.no_grad()
def _check_form(norm: PatchedRMSNorm) -> None:
    """Raises TypeError if the base of a norm is none of its form, up to rounding; in fp32."""
    base: Any = norm.base_layer
    form: Any = {"scale_offset": norm.scale_offset, "cast_first": norm.cast_first}
    wanted = f"expected an RMSNorm with a scale of {norm.scale_offset:g} + weight (n,) alone"
    name = f"{type(base).__module__}.{type(base).__qualname__}"
    parameters = {name: tuple(x.shape) for name, x in base._parameters.items() if x is not None}
    if base.weight.dim() != 1 or parameters.keys() - {"weight"}:
        raise TypeError(f"{wanted}, got {name} with {parameters}")
    like, x = _random_call(base, len(base.weight), torch.float32, _device_of(base))
    x = x.abs()  # an RMSNorm does not subtract their mean
    try:
        y = type(base).forward(like, x)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise TypeError(
            f"{wanted}, got {name}, which does not take rows (M, n): {error}"
        ) from error
    known = PatchedRMSNorm(like, **form, tried=True)
    limit = rounding_limit(torch.float32)
    fits = isinstance(y, Tensor) and y.shape == x.shape
    if not fits or not bool((linf(y, known._scaled(x, known.scale)) <= limit).all()):
        raise TypeError(f"{wanted}, got {name}, which computes something else")


def _device_of(norm: Any) -> torch.device:
    """Where a copy of a norm is tried."""
    return torch.device("cpu") if norm.weight.is_meta else norm.weight.device
