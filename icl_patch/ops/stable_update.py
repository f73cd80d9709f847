"""The formula of the stable update: how the norm behind the MLP and its scale change. And that
norm for both streams of a recording.

The native library computes the update in csrc/common/stable_update.h.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from icl_patch.checks import check_record_norm, check_stable_scale
from icl_patch.ops import dispatch, native
from icl_patch.ops.direction import Direction, read_direction
from icl_patch.ops.dispatch import Op, constants, native_serves
from icl_patch.ops.linear import add_low_rank
from icl_patch.ops.norms import rms_norm
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
    RMS of h, with h as the fallback. It inverts m̃, which is m with each ``|m_k|`` raised to at
    least ``0.25 rms m`` (:func:`floor_scale`), so that every coordinate can be reached and none
    loses digits. The new scale ``m' = m̃ - μ ⊘ m̃`` makes up for the rest. A row with a delta of 0
    does not change.

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
    args = constants(delta, scale, hidden_down, eps)
    if not native_serves(delta.device.type):
        return reference_stable_scale(*args)
    return StableScale(*_stable_scale(*args))


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


class NormRecord(NamedTuple):
    """y_pair (2M, d), both streams' outputs of the norm; u (M, d) fp32, the direction of h, and
    new_scale (M, d) fp32, the patch; status (M,) int8, of the inversion.
    """

    y_pair: Tensor
    u: Tensor
    direction: Direction
    new_scale: Tensor
    status: Tensor


def record_norm(
    y_pair: Tensor,
    h: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out_dtype: torch.dtype | None = None,
    scale_offset: float = 0.0,
    cast_first: bool = True,
) -> NormRecord:
    """Both streams through the norm behind ``y = W h``, and the stable update between them:
    ``m ⊙ Norm(y_ctx)`` and ``m' ⊙ Norm(y + (h·v) u) ≈ delta + m ⊙ Norm(y)``, with ``m = o + w``, u
    and m' of :func:`stable_scale` and ``v = h/‖h‖²``.

    On CUDA this is one launch.

    Args:
        y_pair: (2M, d) float, the outputs of W: M rows of the context stream, then M of the reduced
            stream; in fp32 before their rounding where a replay adds u before it rounds.
        h: (M, K) float, the input of W in the reduced stream.
        delta: (M, d) float, the change of the norm's output.
        weight: w, (d,), any float dtype.
        eps, scale_offset, cast_first: as for :func:`rms_norm`.
        out_dtype: the model's dtype, to which y and the results are rounded; y_pair's by default.

    Returns:
        NormRecord(y_pair, u, direction, new_scale, status), with the bits of
        :func:`read_direction`, :func:`stable_scale`, :func:`add_low_rank` and :func:`rms_norm` one
        after the other, the new scale rounded to fp32; on CUDA those of a replay. The result is
        not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or ``eps`` does not fit.

    Source: Goldwaser et al. (2025), Appendix B.
    """
    dtype = out_dtype or y_pair.dtype
    y, u, v, inverse_norm2, new_scale, status = _record_norm(
        *constants(y_pair, h, delta, weight), eps, dtype, scale_offset, cast_first
    )
    return NormRecord(y, u, Direction(v, inverse_norm2), new_scale, status)


def reference_record_norm(
    y_pair: Tensor,
    h: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    scale_offset: float = 0.0,
    cast_first: bool = True,
) -> tuple[Tensor, ...]:
    """:func:`record_norm` by the other ops."""
    context, plain = y_pair.chunk(2)
    scale = weight.to(accumulation_dtype(weight)) + scale_offset
    direction = read_direction(h)
    update = stable_scale(delta, scale, plain, eps)
    y = add_low_rank(plain, h, update.u, direction.v, out_dtype=dtype)
    new_scale = update.new_scale.float()
    rows = [
        rms_norm(x, m, eps, cast_first=cast_first)
        for x, m in ((context.to(dtype), scale), (y, new_scale))
    ]
    v, inverse_norm2, _ = direction
    return torch.cat(rows), update.u, v, inverse_norm2, new_scale, update.status


_record_norm = Op(
    "record_norm",
    check_record_norm,
    reference_record_norm,
    # it adds up as the native products do on the CPU, and as Triton's do on CUDA
    native_if=lambda *_: dispatch.backend == "auto",
    triton_if=lambda y_pair, *_: y_pair.is_cuda and native_serves("cuda"),
    triton=lambda _kernels, *args: torch.ops.icl_patch.record_norm.default(*args),
)
