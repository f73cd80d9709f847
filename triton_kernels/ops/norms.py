"""The norm before the MLP for both streams, and an RMSNorm with a scale per row.

Both sum the squares in the same order in any layout, so a row has the same bits in either.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from icl_patch.checks import check_norm_pair, check_rms_norm
from icl_patch.kernels.ops.coefficients import LANE_BITS, LANES, add_segments, pair_sum
from icl_patch.kernels.ops.direction import (
    ReadDirection,
    along,
    direction_outputs,
    inverse_of,
    narrowed,
    norm2,
    row_blocks,
    row_offsets,
    row_warps,
    sum_all,
)
from icl_patch.kernels.runtime import library
from icl_patch.kernels.runtime.launching import Launch, Memory


class NormedPair(NamedTuple):
    """z_pair (2M, d), both streams' normed rows; delta (M, d) fp32, ``hidden_ctx - hidden``; the
    direction of z.
    """

    z_pair: Tensor
    delta: Tensor
    direction: ReadDirection


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
def _scaled(x, reciprocal, scale, CAST_FIRST: tl.constexpr):
    """``scale · x · reciprocal``, rounded to x's dtype: after the scale, or (CAST_FIRST) also
    before it.
    """
    normed = x.to(tl.float32) * reciprocal
    if CAST_FIRST:
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * scale).to(x.dtype)


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
        scale = tl.load(weight_ptr + offs * stride_w, mask=mask, other=0.0).to(tl.float32) + offset
        x_ctx = tl.load(ctx_ptr + offs * stride_hk, mask=mask, other=0.0)
        x = tl.load(reduced_ptr + offs * stride_hk, mask=mask, other=0.0)
        z_ctx, z = (
            _scaled(x_ctx, reciprocal_ctx, scale, CAST_FIRST),
            _scaled(x, reciprocal, scale, CAST_FIRST),
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
        mask = offs < D
        scale = tl.load(weight_ptr + offs * stride_w, mask=mask, other=0.0).to(tl.float32) + offset
        x = tl.load(reduced_ptr + offs * stride_hk, mask=mask, other=0.0)
        wide = _scaled(x, reciprocal, scale, CAST_FIRST).to(tl.float32)
        tl.store(v_ptr + m * D + offs, along(wide, inverse[:, None]), mask=mask)
    lanes = row_offsets(SEGMENTS, LANES)
    partial = tl.zeros((SEGMENTS, LANES), tl.float32)
    for j in tl.range(0, STEPS, UNROLL):
        for i in tl.static_range(UNROLL):
            offs = lanes + (j + i) * LANES
            mask = offs < D
            scale = (
                tl.load(weight_ptr + offs * stride_w, mask=mask, other=0.0).to(tl.float32) + offset
            )
            x = tl.load(reduced_ptr + offs * stride_hk, mask=mask, other=0.0)
            wide = _scaled(x, reciprocal, scale, CAST_FIRST).to(tl.float32)
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
        mask = offs < D
        scale = (
            tl.load(scale_ptr + m * stride_sm + offs * stride_sk, mask=mask, other=0.0).to(
                tl.float32
            )
            + offset
        )
        x = tl.load(x_ptr + m * stride_xm + offs * stride_xk, mask=mask, other=0.0)
        tl.store(y_ptr + m * D + offs, _scaled(x, reciprocal, scale, CAST_FIRST), mask=mask)


def _pair_outputs(hidden: Tensor, pairs: int, d: int) -> tuple[Memory, ...]:
    """z_pair, delta and the direction, for hidden (pairs, d)."""
    rows = pairs // 2
    return (
        ((pairs, d), hidden.dtype),
        ((rows, d), torch.float32),
        *direction_outputs(rows, d),
    )


def plan_norm_pair(
    hidden: Tensor, weight: Tensor, eps: float, offset: float, cast_first: bool
) -> Launch:
    """From hidden and weight z_pair, delta and the direction."""
    rows, d = len(hidden) // 2, hidden.shape[1]
    outputs = _pair_outputs(hidden, 2 * rows, d)
    rest = (rows, *hidden.stride(), weight.stride(0), eps, offset, d, cast_first, *row_blocks(d))
    return Launch(
        _norm_pair_kernel, rows, (hidden.dtype, weight.dtype), outputs, rest, row_warps(d)
    )


def plan_rms_norm(x: Tensor, scale: Tensor, eps: float, offset: float, cast_first: bool) -> Launch:
    """Plan y from x and scale."""
    rows, d = x.shape
    strides = scale.stride() if scale.dim() == 2 else (0, scale.stride(0))
    rest = (*x.stride(), *strides, eps, offset, d, cast_first, *row_blocks(d)[2:])
    return Launch(
        _rms_norm_kernel, rows, (x.dtype, scale.dtype), (((rows, d), x.dtype),), rest, row_warps(d)
    )


_norm_pair = library.operator(
    "triton_norm_pair(Tensor hidden, Tensor weight, float eps, float offset, bool cast_first) ->"
    " (Tensor, Tensor, Tensor, Tensor, Tensor)",
    check_norm_pair,
    plan_norm_pair,
    lambda hidden, *_: library.fake_outputs(hidden, _pair_outputs(hidden, *hidden.shape)),
)
_rms_norm = library.operator(
    "triton_rms_norm(Tensor x, Tensor scale, float eps, float offset, bool cast_first) -> Tensor",
    check_rms_norm,
    plan_rms_norm,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)


def norm_pair(
    hidden: Tensor,
    weight: Tensor,
    eps: float,
    scale_offset: float = 0.0,
    cast_first: bool = True,
) -> NormedPair:
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
        NormedPair(z_pair, delta, direction). Not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or ``eps`` does not fit.
    """
    z_pair, delta, *direction = _norm_pair(
        hidden, weight, float(eps), float(scale_offset), cast_first
    )
    return NormedPair(z_pair, delta, ReadDirection(*direction))


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
    return _rms_norm(x, scale, float(eps), float(scale_offset), cast_first)
