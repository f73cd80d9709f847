"""The formula of the stable update: how the norm behind the MLP and its scale change.

The native library computes it in csrc/common/rmsnorm_inverse.h.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from icl_patch.checks import check_stable_scale
from icl_patch.ops import native
from icl_patch.ops.dispatch import native_serves
from icl_patch.ops.reference import InversionStatus, accumulation_dtype, invert_rmsnorm

_stable_scale = native.op("stable_scale", check_stable_scale.results)


@dataclass(frozen=True)
class StableScale:
    """Result of :func:`stable_scale` for ``M`` rows of ``d`` coordinates.

    u: (M, d) fp32 (fp64 if an input is fp64), ``h_target - h_down``.
    new_scale: (M, d) fp64.
    shift, status, evaluations: as in :class:`icl_patch.ops.reference.RMSNormInverse`.
    """

    u: Tensor
    shift: Tensor
    new_scale: Tensor
    status: Tensor
    evaluations: Tensor


def stable_scale(
    delta: Tensor, scale: Tensor, hidden_down: Tensor, eps: float = 0.0
) -> StableScale:
    """The whole stable update of ``m ⊙ Norm(h)`` in one launch: ``h_target - h`` and ``m'`` with
    ``m' ⊙ Norm(h_target) = g``.

    The target is ``g = delta + m ⊙ Norm(h)``. ``h_target`` is :func:`invert_rmsnorm` of g at the
    RMS of h, with h as the fallback. The inverted scale has no ``|m_k|`` below ``0.25 rms m``
    (:func:`floor_scale`), so that every coordinate can be reached and none loses digits. The new
    scale ``m' = m - μ ⊘ m`` makes up for the rest. A row with a delta of 0 does not change.

    Args:
        delta: (M, d) of any float dtype and strides. All arithmetic is fp64.
        scale: m, (d,) or (M, d).
        hidden_down: h, (M, d). A row of zeros has no RMS to keep; its ``h_target`` has RMS 1.
        eps: the norm's.

    Returns:
        StableScale(u, shift, new_scale, status, evaluations), ``u = h_target - h`` rounded once.
        The result is not differentiable.

    Raises:
        TypeError: a dtype is not floating.
        ValueError: a shape, a device or ``eps`` does not fit.

    Source: Goldwaser et al. (2025), Appendix B, with ``Δm = r ⊘ h_norm`` in closed form.
    """
    check_stable_scale(delta, scale, hidden_down, eps)
    if not native_serves(delta.device.type):
        return reference_stable_scale(delta, scale, hidden_down, eps)
    with torch.no_grad():
        parts = _stable_scale(delta, scale, hidden_down, eps)
    return StableScale(*parts)


_SCALE_FLOOR = 0.25


def floor_scale(scale: Tensor, target: Tensor) -> Tensor:
    """The scale that the stable update inverts, (M, d): no ``|m_k|`` is below ``0.25 rms m``, or
    below ``0.25 rms g`` if all of m is 0.

    A small ``m_k`` leads to a small input of the norm and a large new scale. The new scale
    multiplies the input's rounding errors, because the input is the sum of ``h_down`` and a change
    of about its size. With ``m_k = 0`` no input can reach ``g_k``. The update may choose any
    ``m'``, so it inverts a floored scale instead. Then ``m'_k y_k = g_k`` for every k.
    """
    m = scale.double().expand(target.shape[0], -1)
    size = m.square().mean(1, keepdim=True)
    size = torch.where(size == 0, target.double().square().mean(1, keepdim=True), size)
    floor = _SCALE_FLOOR * size.sqrt()
    return torch.where(m.abs() < floor, torch.where(m < 0, -floor, floor), m)


def reference_stable_scale(
    delta: Tensor, scale: Tensor, hidden_down: Tensor, eps: float
) -> StableScale:
    """:func:`stable_scale` in plain torch."""
    h, m = hidden_down.double(), scale.double().expand(delta.shape)
    mean = h.square().mean(-1, keepdim=True)
    # h_down = 0 has no RMS to keep; the norm of h_target is free
    rms = torch.where(mean > 0, mean.sqrt(), 1.0).squeeze(-1)
    target = delta.double() + m * (h * torch.where(mean + eps > 0, (mean + eps).rsqrt(), 0.0))
    inverse = invert_rmsnorm(target, floor_scale(scale, target), rms, eps, h)
    unchanged = (delta == 0).all(-1)
    nothing = unchanged | (inverse.status == InversionStatus.BAD_RADIUS)
    u = (inverse.hidden - h).masked_fill(nothing.unsqueeze(1), 0)
    return StableScale(
        u=u.to(accumulation_dtype(delta, scale, hidden_down)),
        shift=inverse.shift.masked_fill(unchanged, 0),
        new_scale=torch.where(nothing.unsqueeze(1), m, inverse.new_scale),
        status=inverse.status.masked_fill(unchanged, int(InversionStatus.EASY)),
        evaluations=inverse.evaluations.masked_fill(unchanged, 0),
    )
