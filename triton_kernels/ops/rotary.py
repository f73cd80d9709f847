"""Rotary positions of query and key in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from icl_patch.checks import check_rotary_embedding
from icl_patch.kernels.runtime.launching import Launch, operator, power_of_two


@triton.jit
def _rotated(x, cos, other, sin, SIGN: tl.constexpr):
    """``x cos ± other sin`` in fp32; the products are rounded to x's dtype."""
    first = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype).to(tl.float32)
    second = (other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype).to(tl.float32)
    return first + SIGN * second


@triton.jit
def _rotary_kernel(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    query_out_ptr,
    key_out_ptr,
    T,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_kd,
    stride_cb,
    stride_ct,
    stride_cd,
    stride_sb,
    stride_st,
    stride_sd,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,  # heads of keys
    HALF: tl.constexpr,  # of a row
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    head, t = pid % (HEADS + GROUPS), pid // (HEADS + GROUPS) % T
    b = pid // ((HEADS + GROUPS) * T)
    offs = tl.arange(0, BLOCK).to(tl.int64)
    mask = offs < HALF
    x_ptr = query_ptr + b * stride_qb + head * stride_qh + t * stride_qt
    stride, y_ptr = stride_qd, query_out_ptr + ((b * HEADS + head) * T + t) * 2 * HALF
    if head >= HEADS:
        head -= HEADS
        x_ptr = key_ptr + b * stride_kb + head * stride_kh + t * stride_kt
        stride, y_ptr = stride_kd, key_out_ptr + ((b * GROUPS + head) * T + t) * 2 * HALF
    cos_ptr += b * stride_cb + t * stride_ct
    sin_ptr += b * stride_sb + t * stride_st
    first = tl.load(x_ptr + offs * stride, mask=mask, other=0.0)
    second = tl.load(x_ptr + (offs + HALF) * stride, mask=mask, other=0.0)
    cos = tl.load(cos_ptr + offs * stride_cd, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + offs * stride_sd, mask=mask, other=0.0)
    y = _rotated(first, cos, second, sin, -1.0)
    tl.store(y_ptr + offs, y.to(first.dtype), mask=mask)
    cos = tl.load(cos_ptr + (offs + HALF) * stride_cd, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + (offs + HALF) * stride_sd, mask=mask, other=0.0)
    y = _rotated(second, cos, first, sin, 1.0)
    tl.store(y_ptr + HALF + offs, y.to(first.dtype), mask=mask)


def plan_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Launch:
    """Plan rotated query and key from query, key, cos and sin."""
    (rows, heads, tokens, width), groups = query.shape, key.shape[1]
    # cos and sin (1, T, D) are those of all rows
    angles = [
        stride for x in (cos, sin) for stride in (x.stride(0) * (len(x) > 1), *x.stride()[1:])
    ]
    rest = (
        tokens,
        *query.stride(),
        *key.stride(),
        *angles,
        heads,
        groups,
        width // 2,
        power_of_two(width // 2),
    )
    outputs = (query.shape, query.dtype), (key.shape, key.dtype)
    programs = rows * tokens * (heads + groups)
    return Launch(_rotary_kernel, programs, (query, key, cos, sin), outputs, rest, 1)


@operator(check_rotary_embedding, plan_rotary)
def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions as in Llama, ``x cos + (-x₂, x₁) sin`` of query and key with the halves x₁
    and x₂ of a row, with the bits of torch's operators.

    Args:
        query: (B, H, T, D) fp32, bf16 or fp16, D even.
        key: (B, G, T, D); both of any strides.
        cos, sin: (B, T, D), or (1, T, D) for all rows.

    Returns:
        Both rotated, contiguous. Not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.
    """
    # on fake tensors; else the plan launches
    return query.new_empty(query.shape), key.new_empty(key.shape)
