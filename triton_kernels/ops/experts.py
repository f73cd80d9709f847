"""``y_mj = W_e x_m + b_e`` for the experts e that each row has chosen. The host does not read the
choice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from icl_patch.checks import check_expert_linear
from icl_patch.kernels.ops.linear_kernels import _add_lanes, _add_products
from icl_patch.kernels.runtime.config import Config, config_for, gpu_name
from icl_patch.kernels.runtime.launching import Launch, operator


@triton.jit
def _expert_kernel(
    x_ptr,
    w_ptr,
    expert_ptr,
    bias_ptr,
    y_ptr,
    SLOTS,
    N,
    E,
    CHOSEN,
    stride_xm,
    stride_xj,
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    stride_bn,
    stride_em,
    stride_ej,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    # Neighbouring programs share outputs: of the slots that chose one expert all but the first read
    # its matrix from L2.
    pid = tl.program_id(0).to(tl.int64)
    slot = pid % SLOTS
    m, j = slot // CHOSEN, slot % CHOSEN
    offs_n = (pid // SLOTS) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(expert_ptr + m * stride_em + j * stride_ej).to(tl.int64)
    there = tl.zeros_like(offs_n) + expert
    mask_n = (offs_n < N) & (there >= 0) & (there < E)
    w_ptr += expert * stride_we
    x_ptr += m * stride_xm + j * stride_xj
    acc = tl.zeros((BLOCK_N, 1, BLOCK_K), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        offs_k = (k0 + tl.arange(0, BLOCK_K)).to(tl.int64)[None, :]
        w = tl.load(
            w_ptr + offs_n[:, None] * stride_wn + offs_k * stride_wk,
            mask=mask_n[:, None] & (offs_k < K),
            other=0.0,
        )
        x = tl.load(x_ptr + offs_k * stride_xk, mask=offs_k < K, other=0.0)
        acc = _add_products(acc, w, x, False, False)
    y = tl.reshape(_add_lanes(acc, 1, BLOCK_N, BLOCK_K), (BLOCK_N,))
    if HAS_BIAS:
        y += tl.load(bias_ptr + expert * stride_be + offs_n * stride_bn, mask=mask_n, other=0.0).to(
            tl.float32
        )
    tl.store(y_ptr + slot * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=offs_n < N)


def blocks(config: Config, itemsize: int) -> tuple[int, int]:
    """Outputs per program and elements of K per step, with the configuration's product of both.

    Triton prefetches a load only if it is 4 bytes a thread or more, so a step takes at least so
    much of x.
    """
    block_k = max(config.block_k, 128 * config.num_warps // itemsize)
    return max(config.block_n * config.block_k // block_k, 1), block_k


def plan_experts(
    x: Tensor,
    weight: Tensor,
    expert: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    config: Config | None = None,
) -> Launch:
    """Plan y (M, k, N) from x, weight, expert and bias; config: the table's by default."""
    config = config or config_for(gpu_name(x.device), weight.dtype, weight.shape[1])
    (rows, chosen), (experts, n, k) = expert.shape, weight.shape
    x_strides = (x.stride(0), 0, x.stride(1)) if x.dim() == 2 else x.stride()
    b_strides = (0, 0) if bias is None else bias.stride()
    block_n, block_k = blocks(config, x.itemsize)
    rest = (
        rows * chosen,
        n,
        experts,
        chosen,
        *x_strides,
        *weight.stride(),
        *b_strides,
        *expert.stride(),
        k,
        bias is not None,
        block_n,
        block_k,
        config.num_stages,
    )
    return Launch(
        _expert_kernel,
        rows * chosen * triton.cdiv(n, block_n),
        (x, weight, expert, bias),
        (((rows, chosen, n), out_dtype or x.dtype),),
        rest,
        config.num_warps,
        config.num_stages,
    )


@operator(check_expert_linear, plan_experts)
def expert_linear(
    x: Tensor,
    weight: Tensor,
    expert: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``y_mj = W_e x_m + b_e`` with ``e = expert[m, j]``, accumulated in fp32 and rounded once.

    Each slot reads its expert's matrix in separate programs of one launch: meant for the few rows
    of a decode step.

    Args:
        x: (M, K), shared by a row's slots, or (M, k, K); fp32, bf16 or fp16, any strides.
        weight: (E, N, K), x's dtype, any strides; fast with either of the last two dimensions
            contiguous.
        expert: (M, k) integers, which the host does not read. The output is 0 where there is no
            such expert.
        bias: (E, N), x's dtype.
        out_dtype: of the result; x's dtype by default.

    Returns:
        (M, k, N). A slot's bits depend on nothing but its row, its expert and the GPU. Not
        differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.
    """
    # on fake tensors; else the plan launches
    return x.new_empty((*expert.shape, weight.shape[1]), dtype=out_dtype or x.dtype)
