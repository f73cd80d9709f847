"""``y + Σ_r (z·v_r) u_r``: the low-rank term alone, added to an existing output."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from icl_patch.checks import check_add_low_rank
from icl_patch.kernels.ops.coefficients import (
    coefficient,
    plan_coefficients,
    segments_of,
    steps_of,
    stride_of,
)
from icl_patch.kernels.runtime.launching import Launch, operator

_BLOCK = 512
_WIDE_BLOCK = 1024  # of a program that sums the coefficients of its row
# Bytes of z and v that programs may read again: they come from the second-level cache in less time
# than a launch takes. Not measured.
_MOST_AGAIN = 1 << 22


@triton.jit
def _low_rank_kernel(
    plain_ptr,
    u_ptr,
    index_ptr,
    coeff_ptr,
    z_ptr,
    v_ptr,
    y_ptr,
    N,
    column_blocks,
    stride_pm,
    stride_pn,
    stride_um,
    stride_ur,
    stride_un,
    stride_zm,
    stride_zk,
    stride_vm,
    stride_vr,
    stride_vk,
    stride_i,
    K: tl.constexpr,
    R: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    FUSED: tl.constexpr,  # z·v is summed here; else it is read from coeff_ptr
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    m = pid // column_blocks
    offs_n = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    y = tl.load(plain_ptr + m * stride_pm + offs_n * stride_pn, mask=mask, other=0.0).to(tl.float32)
    row = m
    if HAS_INDEX:
        row = tl.load(index_ptr + m * stride_i).to(tl.int64)
    patched = offs_n < tl.where(row >= 0, N, 0)
    u_ptrs = u_ptr + row * stride_um + offs_n * stride_un
    for r in tl.range(0, R):
        if FUSED:
            c = coefficient(
                z_ptr + m * stride_zm, v_ptr + row * stride_vm + r * stride_vr, stride_zk,
                stride_vk, tl.where(row >= 0, K, 0), STEPS, UNROLL, SEGMENTS,
            )  # fmt: skip
        else:
            c = tl.load(coeff_ptr + m * R + r)
        u = tl.load(u_ptrs, mask=patched, other=0.0).to(tl.float32)
        y = tl.where(patched, tl.fma(tl.broadcast_to(c, y.shape), u, y), y)
        u_ptrs += stride_ur
    tl.store(y_ptr + m * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)


def plan_low_rank(
    plain: Tensor,
    u: Tensor,
    index: Tensor | None,
    dtype: torch.dtype,
    z: Tensor | None = None,
    v: Tensor | None = None,
) -> Launch:
    """Plan the sum in ``dtype`` from plain (M, N), u (M, R, N), (1, R, N) or a pool with ``index``,
    and the coefficients (M, R); or z (M, K) and v, as u with K for N, of which the programs sum
    them.
    """
    rows, n = plain.shape
    fused, k = z is not None and v is not None, 0
    strides: tuple[int, ...] = (0, 0, 0, 0, 0)
    shared = index is None and u.shape[0] == 1
    if z is not None and v is not None:
        k = z.shape[1]
        strides = (*z.stride(), 0 if shared else v.stride(0), *v.stride()[1:])
    block = _WIDE_BLOCK if fused else _BLOCK
    column_blocks = triton.cdiv(n, block)
    rest = (
        n,
        column_blocks,
        *plain.stride(),
        0 if shared else u.stride(0),
        *u.stride()[1:],
        *strides,
        stride_of(index),
        k,
        u.shape[1],
        index is not None,
        fused,
        block,
        *steps_of(k),
        segments_of(k),
    )
    inputs = (plain, u, index, None if fused else torch.float32, z, v)
    return Launch(_low_rank_kernel, rows * column_blocks, inputs, (((rows, n), dtype),), rest, 4)


def _plan(
    y: Tensor, z: Tensor, u: Tensor, v: Tensor, index: Tensor | None, out_dtype: torch.dtype | None
) -> Callable[..., Tensor]:
    dtype = out_dtype or y.dtype
    u, v = (factor if factor.dim() == 3 else factor.unsqueeze(1) for factor in (u, v))
    (rows, k), rank = z.shape, u.shape[1]
    again = rows * (triton.cdiv(y.shape[1], _WIDE_BLOCK) - 1) * rank * k
    if rank * segments_of(k) <= 8 and again * (z.itemsize + v.itemsize) <= _MOST_AGAIN:
        launch = plan_low_rank(y, u, index, dtype, z, v)
        return lambda y, z, u, v, index: launch(y, u, index, None, z, v)
    before, launch = plan_coefficients(z, v, index), plan_low_rank(y, u, index, dtype)
    return lambda y, z, u, v, index: launch(y, u, index, before(z, v, index), None, None)


@operator(check_add_low_rank, _plan)
def add_low_rank(
    y: Tensor,
    z: Tensor,
    u: Tensor,
    v: Tensor,
    index: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``y + Σ_r (z·v_r) u_r``, accumulated in fp32 and rounded once.

    Equals ``patched_linear(z, W, u, v, bias)`` bit for bit if y is ``patched_linear(z, W,
    bias=bias, out_dtype=torch.float32)``.

    Args:
        y: (M, N) fp32, bf16 or fp16, any strides.
        z, u, v, index: as for :func:`icl_patch.kernels.patched_linear`.
        out_dtype: of the result; y's dtype by default.

    Returns:
        (M, N). Not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.
    """
    # on fake tensors; else the plan launches
    return torch.empty_like(y, dtype=out_dtype or y.dtype, memory_format=torch.contiguous_format)
