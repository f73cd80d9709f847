"""``act(gate) ⊙ up``, the product before an MLP's last matrix."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from icl_patch.activation_functions import activation_code
from icl_patch.checks import check_gated_product
from icl_patch.kernels.runtime.launching import Launch, operator

_BLOCK = 1024


@triton.jit
def _gated_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    N,
    column_blocks,
    stride_gm,
    stride_gn,
    stride_um,
    stride_un,
    ACTIVATION: tl.constexpr,  # activation_code: 0 for gelu_tanh, 1 for silu
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    m = pid // column_blocks
    offs_n = (pid % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs_n < N
    gate = tl.load(gate_ptr + m * stride_gm + offs_n * stride_gn, mask=mask, other=0.0)
    up = tl.load(up_ptr + m * stride_um + offs_n * stride_un, mask=mask, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    slope = x
    tl.static_assert(ACTIVATION == 0 or ACTIVATION == 1)
    if ACTIVATION == 0:  # 0.5 (1 + tanh a) = 1 / (1 + exp(-2a))
        slope = 2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)
    act = tl.div_rn(x, 1.0 + tl.exp(-slope))
    rounded = act.to(gate.dtype).to(tl.float32)
    tl.store(y_ptr + m * N + offs_n, (rounded * up).to(gate.dtype), mask=mask)


def plan_gated(gate: Tensor, up: Tensor, activation: str) -> Launch:
    """Plan the product of gate and up."""
    rows, n = gate.shape
    column_blocks = triton.cdiv(n, _BLOCK)
    rest = (n, column_blocks, *gate.stride(), *up.stride(), activation_code(activation), _BLOCK)
    return Launch(
        _gated_kernel,
        rows * column_blocks,
        (gate, up),
        (((rows, n), gate.dtype),),
        rest,
        4,
    )


@operator(check_gated_product, plan_gated)
def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) ⊙ up``: the activation is computed in fp32 and rounded to the model's dtype, as
    its module does; then the product is rounded again.

    Args:
        gate, up: (M, N) fp32, bf16 or fp16, both of one dtype, any strides, so they can be
            the halves of one fused output.
        activation: ``"gelu_tanh"`` or ``"silu"``.

    Returns:
        (M, N) in gate's dtype. Not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or the activation does not fit.
    """
    # on fake tensors; else the plan launches
    return torch.empty_like(gate, memory_format=torch.contiguous_format)
