"""The norm before the MLP for both streams, and an RMSNorm with a scale per row.

Both sum the squares in the same order in any layout, so a row has the same bits in either.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from icl_patch.checks import check_norm_pair, check_rms_norm
from icl_patch.kernels.ops.coefficients import LANE_BITS, LANES, add_segments, pair_sum, row_offsets
from icl_patch.kernels.ops.direction import (
    along,
    direction_outputs,
    inverse_of,
    narrowed,
    norm2,
    row_blocks,
    row_warps,
    sum_all,
)
from icl_patch.kernels.runtime.launching import Launch, Memory, operator


@triton.jit
def _reciprocal_rms(
    x_ptr,
    stride_k,
    eps,
    D: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """``1/sqrt(mean(x²) + eps)`` of one row, (1, 1)."""
    first = row_offsets(SEGMENTS, WIDTH)
    squares = tl.zeros((SEGMENTS, WIDTH), tl.float32)
    for j in tl.range(0, ROUNDS):
        offs = first + j * WIDTH
        x = tl.load(x_ptr + offs * stride_k, mask=offs < D, other=0.0).to(tl.float32)
        squares = tl.fma(x, x, squares)
    mean = tl.div_rn(sum_all(squares), tl.full((1,), D, tl.float32))
    return tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))[:, None]


@triton.jit
def _normed(
    x_ptr,
    stride_k,
    scale_ptr,
    stride_s,
    offs,
    reciprocal,
    offset,
    D: tl.constexpr,
    CAST_FIRST: tl.constexpr,
):
    """The elements x at ``offs`` of a row, and ``(offset + scale) · x · reciprocal``, rounded to
    x's dtype: after the scale, or (CAST_FIRST) also before it.
    """
    x = tl.load(x_ptr + offs * stride_k, mask=offs < D, other=0.0)
    scale = tl.load(scale_ptr + offs * stride_s, mask=offs < D, other=0.0).to(tl.float32) + offset
    normed = x.to(tl.float32) * reciprocal
    if CAST_FIRST:
        normed = normed.to(x.dtype).to(tl.float32)
    return x, (normed * scale).to(x.dtype)


@triton.jit
def _norm_pair_kernel(
    hidden_ptr,
    weight_ptr,
    z_ptr,
    delta_ptr,
    v_ptr,
    inverse_ptr,
    coeff_ptr,
    M,
    stride_hm,
    stride_hk,
    stride_w,
    eps,
    offset,
    D: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    ctx_ptr, reduced_ptr = hidden_ptr + m * stride_hm, hidden_ptr + (M + m) * stride_hm
    reciprocal_ctx = _reciprocal_rms(ctx_ptr, stride_hk, eps, D, SEGMENTS, WIDTH, ROUNDS)
    reciprocal = _reciprocal_rms(reduced_ptr, stride_hk, eps, D, SEGMENTS, WIDTH, ROUNDS)
    first = row_offsets(SEGMENTS, WIDTH)
    squares = tl.zeros((SEGMENTS, WIDTH), tl.float64)
    largest = tl.zeros((SEGMENTS, WIDTH), tl.float32)
    for j in tl.range(0, ROUNDS):
        offs = first + j * WIDTH
        mask = offs < D
        x_ctx, z_ctx = _normed(
            ctx_ptr, stride_hk, weight_ptr, stride_w, offs, reciprocal_ctx, offset, D, CAST_FIRST
        )
        x, z = _normed(
            reduced_ptr, stride_hk, weight_ptr, stride_w, offs, reciprocal, offset, D, CAST_FIRST
        )
        wide = z.to(tl.float32)
        tl.store(z_ptr + m * D + offs, z_ctx, mask=mask)
        tl.store(z_ptr + (M + m) * D + offs, z, mask=mask)
        tl.store(delta_ptr + m * D + offs, x_ctx.to(tl.float32) - x.to(tl.float32), mask=mask)
        squares = tl.fma(wide.to(tl.float64), wide.to(tl.float64), squares)
        largest = tl.maximum(largest, tl.abs(wide))
    inverse = inverse_of(norm2(squares), tl.max(largest).to(tl.float64))
    # From here on z is computed again rather than read back.
    for j in tl.range(0, ROUNDS):
        offs = first + j * WIDTH
        _, z = _normed(
            reduced_ptr, stride_hk, weight_ptr, stride_w, offs, reciprocal, offset, D, CAST_FIRST
        )
        v = along(z.to(tl.float32), inverse[:, None])
        tl.store(v_ptr + m * D + offs, v, mask=offs < D)
    lanes = row_offsets(SEGMENTS, LANES)
    partial = tl.zeros((SEGMENTS, LANES), tl.float32)
    for j in tl.range(0, STEPS, UNROLL):
        for i in tl.static_range(UNROLL):
            offs = lanes + (j + i) * LANES
            _, z = _normed(
                reduced_ptr, stride_hk, weight_ptr, stride_w, offs, reciprocal, offset, D,
                CAST_FIRST,
            )  # fmt: skip
            wide = z.to(tl.float32)
            partial = tl.fma(wide, along(wide, inverse[:, None]), partial)
    one = tl.arange(0, 1)
    tl.store(inverse_ptr + m + one, narrowed(inverse))
    tl.store(coeff_ptr + m + one, pair_sum(add_segments(partial, SEGMENTS), LANE_BITS))


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    scale_ptr,
    y_ptr,
    stride_xm,
    stride_xk,
    stride_sm,
    stride_sk,
    eps,
    offset,
    D: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    first = row_offsets(SEGMENTS, WIDTH)
    reciprocal = _reciprocal_rms(x_ptr + m * stride_xm, stride_xk, eps, D, SEGMENTS, WIDTH, ROUNDS)
    for j in tl.range(0, ROUNDS):
        offs = first + j * WIDTH
        _, y = _normed(
            x_ptr + m * stride_xm, stride_xk, scale_ptr + m * stride_sm, stride_sk, offs,
            reciprocal, offset, D, CAST_FIRST,
        )  # fmt: skip
        tl.store(y_ptr + m * D + offs, y, mask=offs < D)


def _pair_outputs(hidden: Tensor) -> tuple[Memory, ...]:
    """z_pair, delta and the direction of hidden (2M, d), as a launch describes them."""
    pairs, d = hidden.shape
    rows = pairs // 2
    return (
        ((pairs, d), hidden.dtype),
        ((rows, d), torch.float32),
        *direction_outputs(rows, d),
    )


def plan_norm_pair(
    hidden: Tensor, weight: Tensor, eps: float, scale_offset: float, cast_first: bool
) -> Launch:
    """From hidden and weight z_pair, delta and the direction."""
    rows, d = len(hidden) // 2, hidden.shape[1]
    norm = (float(eps), float(scale_offset), d, cast_first)
    rest = (rows, *hidden.stride(), weight.stride(0), *norm, *row_blocks(d))
    outputs = _pair_outputs(hidden)
    return Launch(_norm_pair_kernel, rows, (hidden, weight), outputs, rest, row_warps(d))


def plan_rms_norm(
    x: Tensor, scale: Tensor, eps: float, scale_offset: float, cast_first: bool
) -> Launch:
    """Plan y from x and scale."""
    rows, d = x.shape
    strides = scale.stride() if scale.dim() == 2 else (0, scale.stride(0))
    norm = (float(eps), float(scale_offset), d, cast_first)
    rest = (*x.stride(), *strides, *norm, *row_blocks(d)[2:])
    outputs = (((rows, d), x.dtype),)
    return Launch(_rms_norm_kernel, rows, (x, scale), outputs, rest, row_warps(d))


@operator(check_norm_pair, plan_norm_pair)
def norm_pair(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    scale_offset: float = 0.0,
    cast_first: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``z = (o + w) ⊙ x / sqrt(mean(x²) + eps)`` for both streams, ``x_ctx - x`` and the direction
    of z, in one launch.

    Args:
        hidden: (2M, d) fp32, bf16 or fp16: M rows of the context stream, then M of the reduced
            stream.
        weight: (d,), any of these dtypes.
        eps: the norm's.
        scale_offset: o; 1 for Gemma, 0 for Llama.
        cast_first: whether the normalised row is rounded to the model's dtype before it is scaled
            (Llama), or only after (Gemma).

    Returns:
        z_pair (2M, d), both streams' normed rows; delta (M, d) fp32, ``hidden_ctx - hidden``; and
        the three of :func:`icl_patch.kernels.read_direction` of the reduced rows. Not
        differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or ``eps`` does not fit.
    """
    # on fake tensors; else the plan launches
    z_pair, delta, v, inverse_norm2, coeff = (
        hidden.new_empty(size, dtype=dtype) for size, dtype in _pair_outputs(hidden)
    )
    return z_pair, delta, v, inverse_norm2, coeff


@operator(check_rms_norm, plan_rms_norm)
def rms_norm(
    x: Tensor, scale: Tensor, eps: float, scale_offset: float = 0.0, cast_first: bool = True
) -> Tensor:
    """``y = (o + m') ⊙ x / sqrt(mean(x²) + eps)``, with a scale per row.

    Args:
        x: (M, d) fp32, bf16 or fp16, any strides.
        scale: m', (M, d) per row, or (d,), any of these dtypes.
        eps, scale_offset, cast_first: as for :func:`norm_pair`.

    Returns:
        (M, d) in x's dtype. With the norm's weight as scale it has the bits of
        :func:`norm_pair`. Not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or ``eps`` does not fit.

    Source: Goldwaser et al. (2025), Lemma 10.
    """
    # on fake tensors; else the plan launches
    return torch.empty_like(x, memory_format=torch.contiguous_format)
