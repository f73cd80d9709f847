"""The typed face of every op: what a kernel can do better than a line of torch is reached through
here and nowhere else.

Each function checks its arguments, names what was expected and what came, and hands over to an
implementation: Triton's kernels on CUDA, the native library, or the plain torch of
:mod:`icl_patch.ops.reference`; :mod:`icl_patch.ops.dispatch` says which.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch.ops import native, reference
from icl_patch.ops.dispatch import (
    STREAM,
    TILE,
    at_once,
    is_traced,
    is_transformed,
    native_for,
    regime_of,
    triton_for,
    wanted,
    wants_gradients,
)
from icl_patch.ops.reference import InversionStatus, RMSNormInverse, StableScale

__all__ = [
    "Direction",
    "InversionStatus",
    "NormPair",
    "RMSNormInverse",
    "StableScale",
    "add_low_rank",
    "expert_linear",
    "gated_product",
    "invert_rmsnorm",
    "norm_pair",
    "patched_linear",
    "read_direction",
    "record_linear",
    "regime_of",
    "rms_norm",
    "rms_normalize",
    "stable_scale",
]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_METHODS = ("newton", "bisection")
_ACTIVATIONS = ("gelu_tanh", "silu")


class Direction(NamedTuple):
    """v (..., K), ``1/‖z‖²`` (...), and ``z·v`` (M, 1) where the kernels have summed it."""

    v: Tensor
    inverse_norm2: Tensor
    coeff: Tensor | None = None


class NormPair(NamedTuple):
    """z_pair (2M, d), both streams' normed rows; delta (M, d), ``hidden_ctx - hidden`` in fp32; the
    direction of z.
    """

    z_pair: Tensor
    delta: Tensor
    direction: Direction


def patched_linear(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    index: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    regime: str | None = None,
) -> Tensor:
    """``y = z Wᵀ + bias + Σ_r (z·v_r) u_r``: a linear map with a low-rank change of its weight,
    which is never built.

    Args:
        z: (M, K) float.
        weight: logically (N, K), any strides, z's dtype; fast with either dimension contiguous.
        u: per row (M, N) or (M, R, N); shared by all rows (1, R, N); a pool (P, R, N) with
            ``index``. Any float dtype. Without u and v the op is the plain linear map.
        v: as ``u`` with K for N.
        bias: (N,), z's dtype.
        index: (M,) integer rows of the pool; -1 gives the row the bits of the plain map. Not looked
            at on the host for CUDA tensors.
        out_dtype: of the result; z's dtype by default.
        regime: ``"stream"`` or ``"tile"`` for any number of rows; by default
            :func:`icl_patch.ops.dispatch.regime_of` says. Within a regime of our kernels a row's
            bits depend on nothing but the row, its factors, the weight and the bias.

    Returns:
        (M, N), accumulated in fp32 and rounded once; in fp64 where z, u, v or ``out_dtype`` is. On
        the CPU in the regime ``"tile"``, and where gradients are wanted, ``z Wᵀ + bias`` is torch's
        own and rounded to z's dtype first, as ``nn.Linear`` does.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit, or an index lies outside the pool.

    Source: Goldwaser et al. (2025), Lemmas 6 and 9.
    """
    if (native_ops := at_once(z)) is not None and (regime or regime_of(z, z.shape[0])) == STREAM:
        try:
            return native_ops.patched_linear(z, weight, u, v, bias, index, out_dtype)
        except RuntimeError:  # see at_once
            pass
    if (kernels := triton_for(z, weight, u, v, bias, out_dtype=out_dtype)) is not None and (
        u is None or u.dim() < 3 or u.shape[1] <= 64
    ):
        return kernels.patched_linear(
            z, weight, u, v, bias, index=index, out_dtype=out_dtype, regime=regime
        )
    _check_patched_linear(z, weight, bias)
    _check_regime(regime)
    if u is not None or v is not None:
        _check_factors(z, u, v, weight.shape[0], index)
    elif index is not None:
        raise ValueError("expected u and v with index, got none")
    streams = (regime or regime_of(z, len(z))) == STREAM and 1 in weight.stride()
    if (
        streams
        and (native_ops := native_for(z, weight, u, v, bias, out_dtype=out_dtype)) is not None
    ):
        return native_ops.patched_linear(z, weight, u, v, bias, _as_int64(index), out_dtype)
    if z.dtype != torch.float64 and torch.float64 in (
        out_dtype,
        *(x.dtype for x in (u, v) if x is not None),
    ):
        plain = patched_linear(z, weight, bias=bias, out_dtype=torch.float32, regime=regime)
        return _with_low_rank(plain, z, u, v, index, out_dtype or z.dtype)
    return _with_low_rank(F.linear(z, weight, bias), z, u, v, index, out_dtype or z.dtype)


def record_linear(
    z_pair: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    direction: Direction | None = None,
) -> tuple[Tensor, Tensor, Direction]:
    """Both streams through one linear map, reading W once: the outputs, and the patch they differ
    by.

    ``y_ctx = W z_ctx + b``, ``u = W z_ctx - W z`` and ``y = W z + b + (z·v) u`` with ``v =
    z/‖z‖²``.

    Args:
        z_pair: (2M, K) float: M rows of the context stream, then M of the reduced stream.
        weight, bias: as for :func:`patched_linear`.
        direction: :func:`read_direction` of the reduced rows; all maps that read one z share it.

    Returns:
        y_pair (2M, N) in z's dtype, u (M, N) fp32 (fp64 for fp64 z), and the direction.
        ``patched_linear(z, weight, u, direction.v, bias)`` gives y again, bit for bit, where our
        kernels multiply: not in fp64, nor by a weight of which neither side is contiguous.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.

    Source: Goldwaser et al. (2025), Lemma 6.
    """
    rows = z_pair.shape[0] // 2
    direction = read_direction(z_pair[rows:]) if direction is None else direction
    regime = regime_of(z_pair, rows)
    if regime == STREAM and (native_ops := at_once(z_pair)) is not None:
        try:
            y_pair, u = native_ops.record_linear(z_pair, weight, direction.v, bias)
            return y_pair, u, direction
        except RuntimeError:  # see at_once
            pass
    summed = direction.coeff is not None and not wants_gradients(z_pair, weight, bias, direction.v)
    if summed and (kernels := triton_for(z_pair, weight, bias, direction.v)) is not None:
        y_pair, u, _ = kernels.record_linear(z_pair, weight, bias, direction=direction)
        return y_pair, u, direction
    _check_patched_linear(z_pair, weight, bias)
    if len(z_pair) % 2:
        raise ValueError(f"expected z_pair (2M, K), got {tuple(z_pair.shape)}")
    z = z_pair[rows:]
    if direction.v.shape != z.shape:
        raise ValueError(
            f"expected a direction of {tuple(z.shape)}, got {tuple(direction.v.shape)}"
        )
    if (
        regime == STREAM
        and 1 in weight.stride()
        and (native_ops := native_for(z_pair, weight, bias, direction.v)) is not None
    ):
        y_pair, u = native_ops.record_linear(z_pair, weight, direction.v, bias)
        return y_pair, u, direction
    plain_ctx, plain = patched_linear(
        z_pair, weight, bias=bias, out_dtype=reference.accumulation_dtype(z), regime=regime
    ).chunk(2)
    u = plain_ctx - plain
    return (
        torch.cat([plain_ctx.to(z.dtype), _with_low_rank(plain, z, u, direction.v, None, z.dtype)]),
        u,
        direction,
    )


def add_low_rank(
    y: Tensor,
    z: Tensor,
    u: Tensor,
    v: Tensor,
    *,
    index: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``y + Σ_r (z·v_r) u_r``: the low-rank term on an output that some other module computed
    (quantised, convolutional, …).

    ``patched_linear(z, W, u, v, b)`` bit for bit where y is ``patched_linear(z, W, None, None, b,
    out_dtype=torch.float32)``.

    Args:
        y: (M, N) float, the plain output.
        z: (M, K) float, the input it came from.
        u, v, index: as for :func:`patched_linear`.
        out_dtype: of the result; y's dtype by default.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit, or an index lies outside the pool.
    """
    if (native_ops := at_once(z)) is not None:
        try:
            return native_ops.add_low_rank(y, z, u, v, index, out_dtype)
        except RuntimeError:  # see at_once
            pass
    _check_matrix("y", y)
    _check_matrix("z", z)
    if y.shape[0] != z.shape[0]:
        raise ValueError(
            f"expected y and z with the same number of rows, got {tuple(y.shape)} and"
            f" {tuple(z.shape)}"
        )
    _check_floats(y=y, z=z)
    _check_factors(z, u, v, y.shape[1], index)
    return _with_low_rank(y, z, u, v, index, out_dtype or y.dtype)


def _with_low_rank(
    y: Tensor,
    z: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    index: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """:func:`add_low_rank` with arguments that fit; without factors y alone."""
    if not out_dtype.is_floating_point:
        raise TypeError(f"expected a floating out_dtype, got {out_dtype}")
    if u is None or v is None:
        return y.to(out_dtype)
    fits = u.dim() < 3 or 1 <= u.shape[1] <= 64
    if (
        fits
        and not wants_gradients(y, z, u, v)
        and (kernels := triton_for(y, z, u, v, out_dtype=out_dtype)) is not None
    ):
        return kernels.add_low_rank(y, z, u, v, index=index, out_dtype=out_dtype)
    if (native_ops := native_for(y, z, u, v, out_dtype=out_dtype)) is not None:
        return native_ops.add_low_rank(y, z, u, v, _as_int64(index), out_dtype)
    return reference.add_low_rank(y, z, u, v, index, out_dtype)


def expert_linear(
    x: Tensor,
    weight: Tensor,
    expert: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``y_mj = W_e x_m + b_e`` with ``e = expert[m, j]``: few rows through the experts that each
    has chosen.

    On the CPU an expert's matrix is read once for all slots that chose it, on CUDA by each of them,
    in one launch.

    Args:
        x: (M, K) float, what all k slots of a row read, or (M, k, K).
        weight: logically (E, N, K), any strides, x's dtype; fast with either of the last two
            dimensions contiguous.
        expert: (M, k) integers from 0 to E - 1. Not looked at on the host for CUDA tensors, where
            another one gives 0.
        bias: (E, N), x's dtype.
        out_dtype: of the result; x's dtype by default.

    Returns:
        (M, k, N), accumulated in fp32 (fp64 for fp64 x) and rounded once. In our kernels a slot's
        bits depend on nothing but its row and its expert.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit, or there is no such expert.

    Source: Goldwaser et al. (2025), Lemmas 7 and 11, of whose experts these are the products.
    """
    if (native_ops := at_once(x)) is not None:
        try:
            return native_ops.expert_linear(x, weight, expert, bias, out_dtype)
        except RuntimeError:  # see at_once
            pass
    given = (x, weight, bias)
    if (
        not wants_gradients(*given)
        and (kernels := triton_for(*given, out_dtype=out_dtype)) is not None
    ):
        return kernels.expert_linear(x, weight, expert, bias, out_dtype=out_dtype)
    _check_experts(x, weight, expert, bias, out_dtype)
    if (
        1 in weight.stride()[1:]
        and (native_ops := native_for(*given, out_dtype=out_dtype)) is not None
    ):
        return native_ops.expert_linear(x, weight, expert.to(torch.int64), bias, out_dtype)
    return reference.expert_linear(
        x, weight, expert, bias, out_dtype or x.dtype, gather=is_traced() or is_transformed()
    )


def read_direction(
    z: Tensor, dtype: torch.dtype | None = None, *, for_inductor: bool = False
) -> Direction:
    """``v = z / ‖z‖²``, the vector with ``v·z = 1``, and ``1/‖z‖²``, summed in fp64.

    Args:
        z: (..., K) float.
        dtype: fp32 or fp64, of the results; fp32 by default (fp64 for fp64 ``z``).
        for_inductor: in torch's own operations, which a compiler fuses with those around, and with
            the coefficients.

    Returns:
        Direction(v, inverse_norm2, coeff). Where z = 0 there is no such vector: both are 0, and the
        caller must look. The same where v leaves its dtype's range.

    Raises:
        TypeError: z is not floating, or ``dtype`` neither fp32 nor fp64.
        ValueError: z has no dimension.

    Source: Goldwaser et al. (2025), Lemma 6.
    """
    shape = z.shape
    if not shape:
        raise ValueError("expected z (..., K), got a tensor without dimensions")
    if z.dtype not in _FLOATS:
        raise TypeError(f"expected z in fp64, fp32, bf16 or fp16, got {z.dtype}")
    dtype = dtype or reference.accumulation_dtype(z)
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"expected dtype torch.float32 or torch.float64, got {dtype}")
    rows = z if len(shape) == 2 else z.unsqueeze(0).flatten(0, -2)
    if for_inductor:
        v, inverse = reference.read_direction(rows, dtype)
        found = Direction(v, inverse, (rows.to(dtype) * v).sum(-1, keepdim=True))
    elif (native_ops := at_once(z)) is not None:
        found = Direction(*native_ops.read_direction(rows, dtype == torch.float64))
    elif (
        dtype == torch.float32
        and shape[-1]
        and not wants_gradients(z)
        and (kernels := triton_for(z)) is not None
    ):
        found = Direction(*kernels.read_direction(rows))
    elif z.is_cpu and wanted != "torch" and not wants_gradients(z) and native.serves("cpu"):
        found = Direction(*torch.ops.icl_patch.read_direction(rows, dtype == torch.float64))
    else:
        found = Direction(*reference.read_direction(rows, dtype))
    return (
        found
        if len(shape) == 2
        else Direction(found.v.reshape(shape), found.inverse_norm2.reshape(shape[:-1]), found.coeff)
    )


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """``Norm(x) = x / sqrt(mean(x²) + eps)`` over the last dimension; (..., n) -> (..., n) fp32
    (fp64 for fp64).

    The scale is not applied.

    Raises:
        TypeError: x is not floating.
        ValueError: ``eps`` does not fit.
    """
    _check_floats(x=x)
    _check_eps(eps)
    return reference.rms_normalize(x, eps)


def rms_norm(
    x: Tensor, scale: Tensor, eps: float, *, scale_offset: float = 0.0, cast_first: bool = True
) -> Tensor:
    """``y = (o + m) ⊙ x / sqrt(mean(x²) + eps)``, row by row.

    Args:
        x: (M, d) float, any strides, d ≥ 1.
        scale: m, (d,) or a scale for every row (M, d), any float dtype.
        eps: the norm's.
        scale_offset: o; 1 for Gemma, 0 for Llama.
        cast_first: whether the normed row is rounded to x's dtype before it is scaled (Llama), or
            only after (Gemma).

    Returns:
        (M, d) in x's dtype, computed in fp32 (fp64 where something is). A row's bits depend on
        nothing but the row and its scale.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or ``eps`` does not fit.

    Source: Goldwaser et al. (2025), Lemma 10, with the scale per row.
    """
    if (native_ops := at_once(x)) is not None:
        try:
            return native_ops.rms_norm(x, scale, eps, scale_offset, cast_first)
        except RuntimeError:  # see at_once
            pass
    if (kernels := triton_for(x, scale)) is not None and not wants_gradients(x, scale):
        return kernels.rms_norm(x, scale, eps, scale_offset=scale_offset, cast_first=cast_first)
    _check_norm("x", x, eps, scale=scale)
    if scale.shape not in (x.shape, x.shape[1:]):
        raise ValueError(
            f"expected scale {tuple(x.shape)} or ({x.shape[1]},), got {tuple(scale.shape)}"
        )
    return (native_for(x, scale) or reference).rms_norm(x, scale, eps, scale_offset, cast_first)


def norm_pair(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    *,
    scale_offset: float = 0.0,
    cast_first: bool = True,
) -> NormPair:
    """The norm before the MLP for both streams, and what else a recording reads there: ``delta``
    and the direction of z.

    Args:
        hidden: (2M, d) float: the residual stream of M rows with the context, then of M without.
        weight: (d,), any float dtype.
        eps, scale_offset, cast_first: as for :func:`rms_norm`.

    Returns:
        NormPair(z_pair, delta, direction): :func:`rms_norm` of every row, ``hidden_ctx - hidden``
        in fp32 (fp64 for fp64 ``hidden``), and
        :func:`read_direction` of the reduced rows of z_pair.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or ``eps`` does not fit.

    Source: Goldwaser et al. (2025), Lemma 6 and Theorem 1.
    """
    if (native_ops := at_once(hidden)) is not None:
        try:
            z_pair, delta, v, inverse_norm2 = native_ops.norm_pair(
                hidden, weight, eps, scale_offset, cast_first
            )
            return NormPair(z_pair, delta, Direction(v, inverse_norm2))
        except RuntimeError:  # see at_once
            pass
    if (kernels := triton_for(hidden, weight)) is not None and not wants_gradients(hidden, weight):
        found = kernels.norm_pair(
            hidden, weight, eps, scale_offset=scale_offset, cast_first=cast_first
        )
        return NormPair(found.z_pair, found.delta, Direction(*found.direction))
    _check_norm_pair(hidden, weight, eps)
    if (native_ops := native_for(hidden, weight)) is not None:
        z_pair, delta, v, inverse_norm2 = native_ops.norm_pair(
            hidden, weight, eps, scale_offset, cast_first
        )
        return NormPair(z_pair, delta, Direction(v, inverse_norm2))
    z_pair, delta = reference.norm_pair(hidden, weight, eps, scale_offset, cast_first)
    return NormPair(z_pair, delta, read_direction(z_pair[len(delta) :]))


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) ⊙ up``: the activation in fp32, rounded to the model's dtype as its module does,
    then the product, rounded again.

    Args:
        gate, up: (M, N) float, both of one dtype, any strides: the halves of one fused output are
            fine.
        activation: ``"gelu_tanh"`` or ``"silu"``.

    Returns:
        (M, N) in gate's dtype; everything in fp64 for fp64.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or the activation does not fit.
    """
    if (native_ops := at_once(gate)) is not None:
        try:
            return native_ops.gated_product(gate, up, activation)
        except RuntimeError:  # see at_once
            pass
    if (kernels := triton_for(gate, up)) is not None and not wants_gradients(gate, up):
        return kernels.gated_product(gate, up, activation)
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"expected activation {' or '.join(map(repr, _ACTIVATIONS))}, got {activation!r}"
        )
    if gate.dim() != 2 or gate.shape != up.shape:
        raise ValueError(
            f"expected gate and up (M, N), got {tuple(gate.shape)} and {tuple(up.shape)}"
        )
    _check_floats(gate=gate, up=up)
    if up.dtype != gate.dtype:
        raise TypeError(f"expected up in gate's dtype {gate.dtype}, got {up.dtype}")
    return (native_for(gate, up) or reference).gated_product(gate, up, activation)


def invert_rmsnorm(
    target: Tensor,
    scale: Tensor,
    rms: Tensor,
    eps: float = 0.0,
    fallback: Tensor | None = None,
    method: str = "newton",
) -> RMSNormInverse:
    """The ``x`` with ``RMS(x) = C`` that minimises ``‖m ⊙ Norm(x) - g‖²``, and the scale that takes
    up the rest exactly.

    ``y_k = g_k m_k / (m_k² - μ)`` with μ below ``min m²`` such that ``mean(y²) = C²/(C² + eps)``;
    ``x = y sqrt(C² + eps)`` and ``m'_k = (m_k² - μ)/m_k``, so that ``m' ⊙ Norm(x) = g``.

    Args:
        target: g, (B, n) of any float dtype and strides. All arithmetic is fp64.
        scale: m, (n,) or (B, n).
        rms: C, (B,).
        eps: the norm's.
        fallback: (B, n), the direction for the coordinates at ``min m²`` when the secular equation
            has no root; usually the vector that is inverted for.
        method: ``"newton"`` (natively the two-point Gauss model of ``csrc/common/rmsnorm_inverse.h``,
            which takes about half as many evaluations; Newton on ``1/‖y‖`` in plain torch) or
            ``"bisection"`` (64 geometric steps).

    Returns:
        RMSNormInverse(hidden, shift, new_scale, status, evaluations). A row of bad input has its
        status and leaves the others alone; a row's bits depend on nothing but the row. Not
        differentiable.

    Raises:
        TypeError: a dtype is not floating.
        ValueError: a shape, a device, ``eps`` or ``method`` does not fit.

    Source: Goldwaser et al. (2025), Appendix B.2, with the hard case and the norm's eps added.
    """
    _check_matrix("target", target)
    _check_rows("target", target, scale, eps, method)
    if rms.shape != target.shape[:1]:
        raise ValueError(f"expected rms ({target.shape[0]},), got {tuple(rms.shape)}")
    if fallback is not None and fallback.shape != target.shape:
        raise ValueError(f"expected fallback {tuple(target.shape)}, got {tuple(fallback.shape)}")
    _check_floats(
        target=target, scale=scale, rms=rms, **({} if fallback is None else {"fallback": fallback})
    )
    if not native.serves(target.device.type):
        return reference.invert_rmsnorm(target, scale, rms, eps, fallback, method)
    with torch.no_grad():
        parts = torch.ops.icl_patch.invert_rmsnorm(
            target, scale, rms, eps, fallback, method == "bisection"
        )
    return RMSNormInverse(*parts)


def stable_scale(
    delta: Tensor, scale: Tensor, hidden_down: Tensor, eps: float = 0.0, method: str = "newton"
) -> StableScale:
    """All of the stable update of ``m ⊙ Norm(h)`` in one launch: ``h_target - h`` and ``m'`` with
    ``m' ⊙ Norm(h_target) = g``.

    ``g = delta + m ⊙ Norm(h)``; ``h_target`` is :func:`invert_rmsnorm` of g at the RMS of h, with h
    for a fallback and with the zeros of m moved to ``0.25 max(rms m, rms g)``, so that no
    coordinate is out of reach (:func:`icl_patch.ops.reference.floor_scale`); ``m'`` takes the rest,
    ``m - μ ⊘ m``. A row whose delta is 0 is left as it is.

    Args:
        delta: (M, d) of any float dtype and strides. All arithmetic is fp64.
        scale: m, (d,) or (M, d).
        hidden_down: h, (M, d). A row of zeros has no RMS to keep and gets ``h_target`` of RMS 1.
        eps: the norm's.
        method: as for :func:`invert_rmsnorm`.

    Returns:
        StableScale(u, shift, new_scale, status, evaluations), ``u = h_target - h`` rounded once.
        Not differentiable.

    Raises:
        TypeError: a dtype is not floating.
        ValueError: a shape, a device, ``eps`` or ``method`` does not fit.

    Source: Goldwaser et al. (2025), Appendix B, with ``Δm = r ⊘ h_norm`` in closed form.
    """
    _check_matrix("delta", delta)
    _check_rows("delta", delta, scale, eps, method)
    if hidden_down.shape != delta.shape:
        raise ValueError(
            f"expected hidden_down {tuple(delta.shape)}, got {tuple(hidden_down.shape)}"
        )
    _check_floats(delta=delta, scale=scale, hidden_down=hidden_down)
    if not native.serves(delta.device.type):
        return reference.stable_scale(delta, scale, hidden_down, eps, method)
    with torch.no_grad():
        parts = torch.ops.icl_patch.stable_scale(
            delta, scale, hidden_down, eps, method == "bisection"
        )
    return StableScale(*parts)


def _check_floats(**tensors: Tensor) -> None:
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"expected {name} in fp64, fp32, bf16 or fp16, got {tensor.dtype}")
        if tensor.device != first.device:
            raise ValueError(f"expected {name} on {first.device}, got {tensor.device}")


def _check_matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"expected {name} with 2 dimensions, got {tuple(tensor.shape)}")
    _check_floats(**{name: tensor})


def _check_eps(eps: float) -> None:
    if not 0 <= eps < float("inf"):
        raise ValueError(f"expected a finite eps ≥ 0, got {eps}")


def _check_norm(name: str, rows: Tensor, eps: float, **scale: Tensor) -> None:
    """What the norms share: rows (M, d), a scale by its name, and eps."""
    _check_matrix(name, rows)
    if not rows.shape[1]:
        raise ValueError(f"expected {name} (M, d) with d ≥ 1, got {tuple(rows.shape)}")
    _check_floats(**{name: rows}, **scale)
    _check_eps(eps)


def _check_norm_pair(hidden: Tensor, weight: Tensor, eps: float) -> None:
    _check_norm("hidden", hidden, eps, weight=weight)
    if len(hidden) % 2:
        raise ValueError(f"expected hidden (2M, d), got {tuple(hidden.shape)}")
    if weight.shape != hidden.shape[1:]:
        raise ValueError(f"expected weight ({hidden.shape[1]},), got {tuple(weight.shape)}")


def _check_rows(name: str, rows: Tensor, scale: Tensor, eps: float, method: str) -> None:
    """What the inversions share: rows (B, n), the norm's scale and eps."""
    batch, n = rows.shape
    if n == 0:
        raise ValueError(f"expected {name} (B, n) with n ≥ 1, got n = 0")
    if scale.shape not in ((n,), (batch, n)):
        raise ValueError(f"expected scale ({n},) or ({batch}, {n}), got {tuple(scale.shape)}")
    _check_eps(eps)
    if method not in _METHODS:
        raise ValueError(f"expected method {' or '.join(map(repr, _METHODS))}, got {method!r}")


def _check_patched_linear(z: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_matrix("z", z)
    _check_matrix("weight", weight)
    if weight.shape[1] != z.shape[1]:
        raise ValueError(f"expected weight (N, {z.shape[1]}), got {tuple(weight.shape)}")
    _check_operands("z", z, weight, bias)


def _check_operands(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """What products of x by one weight (N, K) and by several (E, N, K) share."""
    if weight.dtype != x.dtype and weight.dtype in _FLOATS and x.dtype in _FLOATS:
        raise TypeError(f"expected weight in {name}'s dtype {x.dtype}, got {weight.dtype}")
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ValueError(f"expected bias {tuple(weight.shape[:-1])}, got {tuple(bias.shape)}")
    _check_floats(**{name: x}, weight=weight)
    if bias is not None:
        _check_floats(**{name: x}, bias=bias)
        if bias.dtype != x.dtype:
            raise TypeError(f"expected bias in {name}'s dtype {x.dtype}, got {bias.dtype}")


def _check_experts(
    x: Tensor, weight: Tensor, expert: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    if expert.dim() != 2 or expert.is_floating_point() or expert.dtype == torch.bool:
        raise ValueError(
            f"expected expert (M, k) of integers, got {tuple(expert.shape)} {expert.dtype}"
        )
    if weight.dim() != 3 or x.shape not in (
        (len(expert), weight.shape[-1]),
        (*expert.shape, weight.shape[-1]),
    ):
        raise ValueError(
            f"expected x ({len(expert)}, K) or ({len(expert)}, {expert.shape[1]}, K) and weight (E,"
            f" N, K), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    _check_operands("x", x, weight, bias)
    if out_dtype is not None and out_dtype not in _FLOATS:
        raise TypeError(f"expected out_dtype fp64, fp32, bf16 or fp16, got {out_dtype}")
    if expert.device != x.device:
        raise ValueError(f"expected expert on {x.device}, got {expert.device}")
    # as in _check_factors
    if expert.is_cuda or expert.is_meta or is_traced() or is_transformed() or not expert.numel():
        return
    if not 0 <= int(expert.min()) <= int(expert.max()) < len(weight):
        raise ValueError(
            f"expected expert from 0 to {len(weight) - 1}, got {int(expert.min())} to"
            f" {int(expert.max())}"
        )


def _check_regime(regime: str | None) -> None:
    if regime not in (None, STREAM, TILE):
        raise ValueError(f"expected regime {STREAM!r} or {TILE!r}, got {regime!r}")


def _as_int64(index: Tensor | None) -> Tensor | None:
    """As the native ops take it; what is no index at all they refuse."""
    if index is None or index.is_floating_point() or index.dtype == torch.bool:
        return index
    return index.to(torch.int64).contiguous()


def _check_factors(
    z: Tensor, u: Tensor | None, v: Tensor | None, n: int, index: Tensor | None
) -> None:
    if u is None or v is None:
        raise ValueError("expected both u and v or neither, got one of them")
    _check_floats(z=z, u=u, v=v)
    rows, k = z.shape
    for name, factor, width in (("u", u, n), ("v", v, k)):
        per_row = factor.dim() in (2, 3) and factor.shape[0] == rows
        shared = factor.dim() == 3 and factor.shape[0] == 1
        pool = factor.dim() == 3 and index is not None
        if factor.shape[-1:] != (width,) or not (pool or (index is None and (per_row or shared))):
            expected = (
                f"(P, R, {width})"
                if index is not None
                else f"({rows}, {width}), ({rows}, R, {width}) or (1, R, {width})"
            )
            raise ValueError(f"expected {name} {expected}, got {tuple(factor.shape)}")
    if u.dim() != v.dim() or u.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"expected u and v with the same rows and rank, got {tuple(u.shape)} and"
            f" {tuple(v.shape)}"
        )
    if index is not None:
        if index.shape != (rows,) or index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(
                f"expected index ({rows},) of integers, got {tuple(index.shape)} {index.dtype}"
            )
        if index.device != z.device:
            raise ValueError(f"expected index on {z.device}, got {index.device}")
        # to look would wait for the device, or there is nothing to look at
        if index.is_cuda or index.is_meta or is_traced():
            return
        if rows and not -1 <= int(index.min()) <= int(index.max()) < u.shape[0]:
            raise ValueError(
                f"expected index from -1 to {u.shape[0] - 1}, got {int(index.min())} to"
                f" {int(index.max())}"
            )
