"""The typed face of every op: what a kernel can do better than a line of torch is reached through here and nowhere else.

Each function checks its arguments, names what was expected and what came, and hands over to an implementation: the native library
where it serves the device (:func:`icl_patch.native.serves`), else the plain torch of :mod:`icl_patch.reference`.
"""

import torch
from torch import Tensor

from icl_patch import native, reference
from icl_patch.reference import InversionStatus, RMSNormInverse, StableScale

__all__ = [
    "InversionStatus",
    "RMSNormInverse",
    "StableScale",
    "add_low_rank",
    "invert_rmsnorm",
    "patched_linear",
    "read_direction",
    "rms_normalize",
    "stable_scale",
]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_METHODS = ("newton", "bisection")


def patched_linear(
    z: Tensor,
    weight: Tensor,
    u: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    index: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``y = z Wᵀ + bias + Σ_r (z·v_r) u_r``: a linear map with a low-rank change of its weight, which is never built.

    Args:
        z: (M, K) float.
        weight: logically (N, K), any strides, z's dtype.
        u: per row (M, N) or (M, R, N); shared by all rows (1, R, N); a pool (P, R, N) with ``index``. Any float dtype.
        v: as ``u`` with K for N.
        bias: (N,), z's dtype.
        index: (M,) integer rows of the pool; -1 gives the row the bits of the plain map.
        out_dtype: of the result; z's dtype by default.

    Returns:
        (M, N). ``z Wᵀ + bias`` is rounded to z's dtype, as ``nn.Linear`` does; the low-rank term is accumulated in fp32 (fp64 where z, u
        or v is) and the sum is rounded once.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit, or an index lies outside the pool.

    Source: Goldwaser et al. (2025), Lemmas 6 and 9.
    """
    _check_patched_linear(z, weight, bias)
    _check_factors(z, u, v, weight.shape[0], index)
    return reference.patched_linear(z, weight, u, v, bias, index, out_dtype)


def add_low_rank(y: Tensor, z: Tensor, u: Tensor, v: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """``y + Σ_r (z·v_r) u_r``: the low-rank term on an output that some other module computed (quantised, convolutional, …).

    ``patched_linear(z, W, u, v, b)`` equals ``add_low_rank(F.linear(z, W, b), z, u, v)`` bit for bit.

    Args:
        y: (M, N) float, the plain output.
        z: (M, K) float, the input it came from.
        u, v: per row or shared, as in :func:`patched_linear`.
        out_dtype: of the result; y's dtype by default.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.
    """
    _check_matrix("y", y)
    _check_matrix("z", z)
    if y.shape[0] != z.shape[0]:
        raise ValueError(f"expected y and z with the same number of rows, got {tuple(y.shape)} and {tuple(z.shape)}")
    _check_floats(y=y, z=z)
    _check_factors(z, u, v, y.shape[1], None)
    return (y + reference.low_rank_term(z, u, v)).to(out_dtype or y.dtype)


def read_direction(z: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """``v = z / ‖z‖²``, the vector with ``v·z = 1``, and ``‖z‖²``.

    Args:
        z: (..., K) float.
        dtype: fp32 or fp64, of the arithmetic and the results; fp32 by default (fp64 for fp64 ``z``).

    Returns:
        v (..., K) and ``‖z‖²`` (...). Where z = 0 there is no such vector: v and the norm are 0, and the caller must look. The same
        where v leaves its dtype's range.

    Source: Goldwaser et al. (2025), Lemma 6.
    """
    wide = z.double()
    norm2 = wide.square().sum(-1, keepdim=True)
    v = torch.where(norm2 > 0, wide / norm2, 0.0).to(dtype or reference.accumulation_dtype(z))
    lost = (v.isinf() | ((v.abs() < torch.finfo(v.dtype).tiny) & (z.abs() == z.abs().amax(-1, keepdim=True)))).any(-1, keepdim=True)
    v, norm2 = v.masked_fill(lost, 0), norm2.masked_fill(lost, 0)
    return v, norm2.squeeze(-1).to(v.dtype)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """``Norm(x) = x / sqrt(mean(x²) + eps)`` over the last dimension; (..., n) -> (..., n) fp32 (fp64 for fp64).

    The scale is not applied.
    """
    return reference.rms_normalize(x, eps)


def invert_rmsnorm(
    target: Tensor, scale: Tensor, rms: Tensor, eps: float = 0.0, fallback: Tensor | None = None, method: str = "newton"
) -> RMSNormInverse:
    """The ``x`` with ``RMS(x) = C`` that minimises ``‖m ⊙ Norm(x) - g‖²``, and the scale that takes up the rest exactly.

    ``y_k = g_k m_k / (m_k² - μ)`` with μ below ``min m²`` such that ``mean(y²) = C²/(C² + eps)``; ``x = y sqrt(C² + eps)`` and
    ``m'_k = (m_k² - μ)/m_k``, so that ``m' ⊙ Norm(x) = g``.

    Args:
        target: g, (B, n) of any float dtype and strides. All arithmetic is fp64.
        scale: m, (n,) or (B, n).
        rms: C, (B,).
        eps: the norm's.
        fallback: (B, n), the direction for the coordinates at ``min m²`` when the secular equation has no root; usually the vector
            that is inverted for.
        method: ``"newton"`` (natively the two-point Gauss model of ``csrc/rmsnorm_inverse.h``, which takes about half as many
            evaluations; Newton on ``1/‖y‖`` in plain torch) or ``"bisection"`` (64 geometric steps).

    Returns:
        RMSNormInverse(hidden, shift, new_scale, status, evaluations). A row of bad input has its status and leaves the others alone; a
        row's bits depend on nothing but the row. Not differentiable.

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
    _check_floats(target=target, scale=scale, rms=rms, **({} if fallback is None else {"fallback": fallback}))
    if not native.serves(target.device.type):
        return reference.invert_rmsnorm(target, scale, rms, eps, fallback, method)
    with torch.no_grad():
        parts = torch.ops.icl_patch.invert_rmsnorm(target, scale, rms, eps, fallback, method == "bisection")
    return RMSNormInverse(*parts)


def stable_scale(delta: Tensor, scale: Tensor, hidden_down: Tensor, eps: float = 0.0, method: str = "newton") -> StableScale:
    """All of the stable update of ``m ⊙ Norm(h)`` in one launch: ``h_target - h`` and ``m'`` with ``m' ⊙ Norm(h_target) = g``.

    ``g = delta + m ⊙ Norm(h)``; ``h_target`` is :func:`invert_rmsnorm` of g at the RMS of h, with h for a fallback and with the zeros
    of m moved to ``0.25 max(rms m, rms g)``, so that no coordinate is out of reach (:func:`icl_patch.reference.floor_scale`); ``m'``
    takes the rest, ``m - μ ⊘ m``. A row whose delta is 0 is left as it is.

    Args:
        delta: (M, d) of any float dtype and strides. All arithmetic is fp64.
        scale: m, (d,) or (M, d).
        hidden_down: h, (M, d). A row of zeros has no RMS to keep and gets ``h_target`` of RMS 1.
        eps: the norm's.
        method: as for :func:`invert_rmsnorm`.

    Returns:
        StableScale(u, shift, new_scale, status, evaluations), ``u = h_target - h`` rounded once. Not differentiable.

    Raises:
        TypeError: a dtype is not floating.
        ValueError: a shape, a device, ``eps`` or ``method`` does not fit.

    Source: Goldwaser et al. (2025), Appendix B, with ``Δm = r ⊘ h_norm`` in closed form.
    """
    _check_matrix("delta", delta)
    _check_rows("delta", delta, scale, eps, method)
    if hidden_down.shape != delta.shape:
        raise ValueError(f"expected hidden_down {tuple(delta.shape)}, got {tuple(hidden_down.shape)}")
    _check_floats(delta=delta, scale=scale, hidden_down=hidden_down)
    if not native.serves(delta.device.type):
        return reference.stable_scale(delta, scale, hidden_down, eps, method)
    with torch.no_grad():
        parts = torch.ops.icl_patch.stable_scale(delta, scale, hidden_down, eps, method == "bisection")
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


def _check_rows(name: str, rows: Tensor, scale: Tensor, eps: float, method: str) -> None:
    """What the inversions share: rows (B, n), the norm's scale and eps."""
    batch, n = rows.shape
    if n == 0:
        raise ValueError(f"expected {name} (B, n) with n ≥ 1, got n = 0")
    if scale.shape not in ((n,), (batch, n)):
        raise ValueError(f"expected scale ({n},) or ({batch}, {n}), got {tuple(scale.shape)}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"expected a finite eps ≥ 0, got {eps}")
    if method not in _METHODS:
        raise ValueError(f"expected method {' or '.join(map(repr, _METHODS))}, got {method!r}")


def _check_patched_linear(z: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_matrix("z", z)
    _check_matrix("weight", weight)
    if weight.shape[1] != z.shape[1]:
        raise ValueError(f"expected weight (N, {z.shape[1]}), got {tuple(weight.shape)}")
    if weight.dtype != z.dtype:
        raise TypeError(f"expected weight in z's dtype {z.dtype}, got {weight.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias ({weight.shape[0]},), got {tuple(bias.shape)}")
    _check_floats(z=z, weight=weight)
    if bias is not None:
        _check_floats(z=z, bias=bias)
        if bias.dtype != z.dtype:
            raise TypeError(f"expected bias in z's dtype {z.dtype}, got {bias.dtype}")


def _check_factors(z: Tensor, u: Tensor, v: Tensor, n: int, index: Tensor | None) -> None:
    _check_floats(z=z, u=u, v=v)
    rows, k = z.shape
    for name, factor, width in (("u", u, n), ("v", v, k)):
        per_row = factor.dim() in (2, 3) and factor.shape[0] == rows
        shared = factor.dim() == 3 and factor.shape[0] == 1
        pool = factor.dim() == 3 and index is not None
        if factor.shape[-1:] != (width,) or not (pool or (index is None and (per_row or shared))):
            expected = f"(P, R, {width})" if index is not None else f"({rows}, {width}), ({rows}, R, {width}) or (1, R, {width})"
            raise ValueError(f"expected {name} {expected}, got {tuple(factor.shape)}")
    if u.dim() != v.dim() or u.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"expected u and v with the same rows and rank, got {tuple(u.shape)} and {tuple(v.shape)}")
    if index is not None:
        if index.shape != (rows,) or index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(f"expected index ({rows},) of integers, got {tuple(index.shape)} {index.dtype}")
        if index.device != z.device:
            raise ValueError(f"expected index on {z.device}, got {index.device}")
        if rows and not -1 <= int(index.min()) <= int(index.max()) < u.shape[0]:
            raise ValueError(f"expected index from -1 to {u.shape[0] - 1}, got {int(index.min())} to {int(index.max())}")
