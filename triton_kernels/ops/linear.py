"""``y = z Wᵀ + bias + Σ_r (z·v_r) u_r`` in one pass over W."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from icl_patch.checks import check_patched_linear
from icl_patch.kernels.ops.coefficients import LANES, plan_coefficients, stride_of
from icl_patch.kernels.ops.linear_kernels import _linear_kernel
from icl_patch.kernels.runtime.config import Config, config_for, gpu_name
from icl_patch.kernels.runtime.launching import (
    INTERPRETED,
    Launch,
    Memory,
    cached_launch,
    operator,
    power_of_two,
)


def blocks(config: Config, rows: int, record: bool) -> tuple[int, int]:
    """Rows and outputs per program. They depend on the number of rows, which does not change a
    row's bits: on matrix units a row is a column of the output. More rows share what a program
    reads of the weight; two streams leave them no shared memory.
    """
    if config.dot:
        wide = rows > config.block_m and not record
        return config.block_m * (1 + wide), config.block_n
    block_m = min(config.block_m, power_of_two(rows))
    return block_m, max(config.block_n * 4 // max(4, block_m * (1 + record)), 1)


def coefficient_rows(block_m: int, rows: int) -> int:
    """The rows of a program for which it computes coefficients: no padding rows."""
    return min(block_m, power_of_two(rows))


def coefficient_block(
    config: Config, block_m: int, rows: int, fused: int, dtype: torch.dtype
) -> tuple[int, int]:
    """ROWS and COEFF_BLOCK_K of the kernel: for how many rows it computes coefficients, and how
    many elements of z and v it loads together.

    Triton prefetches a load only if it is 4 bytes a thread or more. Therefore z is loaded a whole
    step at a time, padded by a row if necessary, unless that takes many registers a thread.
    """
    threads, needed = 32 * config.num_warps, coefficient_rows(block_m, rows)
    padded = max(needed, power_of_two(triton.cdiv(4 * threads, config.block_k * dtype.itemsize)))
    if dtype.itemsize >= 4 or padded > block_m or fused * padded * config.block_k > 8 * threads:
        return needed, LANES.value
    return padded, config.block_k


def sums_coefficients(config: Config, rows: int, rank: int) -> bool:
    """Whether the linear kernel computes the coefficients z·v itself: few of them, of at most
    ``block_m`` rows, as more would leave no shared memory for the weight.
    """
    few = power_of_two(rank) * coefficient_rows(config.block_m, rows) <= config.fused
    return few and rows <= config.block_m


def plan_linear(
    z: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    config: Config,
    u: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    index: Tensor | None = None,
    *,
    record: bool = False,
    further: Sequence[Tensor] = (),
) -> Launch:
    """Plan y (M, N) in ``dtype`` from z, weight, bias, u, v, index, the coefficients unless the
    kernel sums them, and weight and bias of two further maps of z, or None for each.

    u (M, R, N) or (1, R, N), v the same with K, or pools with ``index``. With ``record`` z and y
    are (2M, ·), the coefficients (M, 1) are always read, and the patch u (M, N) is a second output.
    ``further`` are the weights (N', K) of up to two other maps of z without a patch, or of one to
    record, with the same strides, and with biases if there is one. Their outputs follow.
    """
    n, k = weight.shape
    rows = len(z) // 2 if record else len(z)
    rank, fused = 0, 0
    u_strides: tuple[int, ...] = (0, 0, 0)
    v_strides = u_strides
    if u is not None and v is not None:
        rank = u.shape[1]
        u_strides, v_strides = u.stride(), v.stride()
        if index is None and u.shape[0] == 1:
            u_strides, v_strides = (0, *u_strides[1:]), (0, *v_strides[1:])
        fused = power_of_two(rank) if sums_coefficients(config, rows, rank) else 0
    block_m, block_n = blocks(config, rows, record)
    coeff = torch.float32 if record or (rank and not fused) else None
    inputs: list[Tensor | torch.dtype | None] = [z, weight, bias, u, v, index, coeff]
    for other in further:
        inputs += [other, bias]
    inputs += [None] * (11 - len(inputs))
    outputs: list[Memory | None] = []
    widths = [n, *map(len, further)]
    for width in widths:
        outputs += [((len(z), width), dtype), ((rows, width), torch.float32) if record else None]
    tiles = triton.cdiv(rows, block_m) * sum(triton.cdiv(width, block_n) for width in widths)
    rest: tuple = (
        rows,
        n,
        *[*widths[1:], None, None][:2],
        *z.stride(),
        *weight.stride(),
        stride_of(bias),
        *u_strides,
        *v_strides,
        stride_of(index),
        config.dot,
        k,
        rank,
        fused,
        record,
        index is not None,
        bias is not None,
        block_m,
        block_n,
        config.block_k,
        *coefficient_block(config, block_m, rows, fused, z.dtype),
        config.sums,
        len(widths),
        config.num_stages,
        INTERPRETED,
    )
    return Launch(
        _linear_kernel,
        tiles,
        tuple(inputs),
        tuple((outputs + [None] * 4)[:5]),
        rest,
        config.num_warps,
        config.num_stages,
    )


def launch_linear(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    index: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """:func:`patched_linear` with a configuration, straight to the kernel and without checks."""
    return cached_launch(_plan, (z, weight, u, v, bias, index), out_dtype, config)


def _plan(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    out_dtype: torch.dtype | None,
    config: Config | None = None,
) -> Callable[..., Tensor]:
    if u is not None and v is not None and u.dim() == 2:
        u, v = u.unsqueeze(1), v.unsqueeze(1)
    config = config or config_for(gpu_name(z.device), weight.dtype, len(weight))
    before = None
    if v is not None and not sums_coefficients(config, len(z), v.shape[1]):
        before = plan_coefficients(z, v, index)
    launch = plan_linear(z, weight, out_dtype or z.dtype, config, u, v, bias, index)

    def call(*tensors: Tensor | None) -> Any:
        z, weight, u, v, bias, index = tensors
        coeff = None if before is None else before(z, v, index)
        return launch(z, weight, bias, u, v, index, coeff, None, None, None, None)

    return call


@operator(check_patched_linear, _plan)
def patched_linear(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    index: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``y = z Wᵀ + bias + Σ_r (z·v_r) u_r``, accumulated in fp32 and rounded once.

    Args:
        z: (M, K) fp32, bf16 or fp16, any strides.
        weight: logically (N, K), z's dtype, any strides; fast with either dimension contiguous.
        u: per row (M, N) or (M, R, N); shared by all rows (1, R, N); a pool (P, R, N) with
            ``index``; R from 1 to 64; fp32, bf16 or fp16. Without u and v the op is the plain
            linear map.
        v: as ``u`` with K for N.
        bias: (N,), z's dtype.
        index: (M,) integer rows of the pool, which the host does not read; a row with a negative
            index has the bits of the plain map.
        out_dtype: of the result; z's dtype by default.

    Returns:
        (M, N). A row's bits depend on nothing but the row, its factors, the weight, the bias and
        the GPU. Not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.

    Source: Goldwaser et al. (2025), Lemmas 6 and 9.
    """
    # on fake tensors; else the plan launches
    return z.new_empty((z.shape[0], weight.shape[0]), dtype=out_dtype or z.dtype)
