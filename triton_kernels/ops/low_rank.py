"""``y + Σ_r (z·v_r) u_r``: the low-rank term alone, added to an existing output."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from icl_patch.checks import check_add_low_rank
from icl_patch.kernels.ops.coefficients import plan_coefficients
from icl_patch.kernels.runtime.launching import Launch, operator

_BLOCK = 512


@triton.jit
def _low_rank_kernel(
    plain_ptr,
    u_ptr,
    index_ptr,
    coeff_ptr,
    y_ptr,
    N,
    column_blocks,
    stride_pm,
    stride_pn,
    stride_um,
    stride_ur,
    stride_un,
    R: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    m = pid // column_blocks
    offs_n = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    y = tl.load(plain_ptr + m * stride_pm + offs_n * stride_pn, mask=mask, other=0.0).to(tl.float32)
    row = m
    if HAS_INDEX:
        row = tl.load(index_ptr + m).to(tl.int64)
    patched = offs_n < tl.where(row >= 0, N, 0)
    u_ptrs = u_ptr + row * stride_um + offs_n * stride_un
    for r in tl.range(0, R):
        c = tl.load(coeff_ptr + m * R + r)
        u = tl.load(u_ptrs, mask=patched, other=0.0).to(tl.float32)
        y = tl.where(patched, tl.fma(tl.broadcast_to(c, y.shape), u, y), y)
        u_ptrs += stride_ur
    tl.store(y_ptr + m * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)


def plan_low_rank(plain: Tensor, u: Tensor, index: Tensor | None, dtype: torch.dtype) -> Launch:
    """Plan the sum in ``dtype`` from plain (M, N), u (M, R, N), (1, R, N) or a pool with ``index``,
    and the coefficients (M, R).
    """
    rows, n = plain.shape
    column_blocks = triton.cdiv(n, _BLOCK)
    stride_um = 0 if index is None and u.shape[0] == 1 else u.stride(0)
    rest = (
        n,
        column_blocks,
        *plain.stride(),
        stride_um,
        *u.stride()[1:],
        u.shape[1],
        index is not None,
        _BLOCK,
    )
    inputs = (plain, u, index, torch.float32)
    return Launch(_low_rank_kernel, rows * column_blocks, inputs, (((rows, n), dtype),), rest, 4)


def _plan(
    y: Tensor, z: Tensor, u: Tensor, v: Tensor, index: Tensor | None, out_dtype: torch.dtype | None
) -> Callable[..., Tensor]:
    dtype = out_dtype or y.dtype
    u, v = (factor if factor.dim() == 3 else factor.unsqueeze(1) for factor in (u, v))
    before, launch = plan_coefficients(z, v, index), plan_low_rank(y, u, index, dtype)
    return lambda y, z, u, v, index: launch(y, u, index, before(z, v, index))


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
