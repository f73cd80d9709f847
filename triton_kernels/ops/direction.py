"""``v = z / ‖z‖²``, the read direction, with the coefficient ``z·v`` that goes with it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from icl_patch.checks import check_read_direction
from icl_patch.kernels.ops.coefficients import (
    CHUNKS,
    LANE_BITS,
    LANES,
    add_segments,
    log2,
    pair_sum,
    row_offsets,
    segments_of,
    steps_of,
)
from icl_patch.kernels.runtime.launching import Launch, Memory, operator, power_of_two

TINY = tl.constexpr(2.0**-126)
HUGE = tl.constexpr(3.4028234663852886e38)


@triton.jit
def sum_all(x):
    """The sum (1,) of x (SEGMENTS, WIDTH), neighbours first in any layout."""
    return pair_sum(tl.reshape(pair_sum(x, log2(x.shape[1])), (1, x.shape[0])), log2(x.shape[0]))


@triton.jit
def norm2(squares):
    """``‖z‖²`` (1,) from its parts in fp64. The order of the sum may depend on the layout: values
    derived from it are stored once and never computed again elsewhere.
    """
    return tl.reshape(tl.sum(tl.sum(squares, axis=1), axis=0, keep_dims=True), (1,))


@triton.jit
def inverse_of(total, largest):
    """``1/‖z‖²`` for ``‖z‖²`` (1,) and ``max |z|`` in fp64; 0 where there is no v in fp32, NaN
    where z has one.
    """
    inverse = 1.0 / total
    steepest = largest * inverse
    return tl.where((total == 0) | (steepest > HUGE) | (steepest < TINY), 0.0, inverse)


@triton.jit
def along(z, inverse):
    """``z / ‖z‖²`` (SEGMENTS, WIDTH) in fp32; 0 in a row with a NaN."""
    return tl.where(inverse == inverse, z.to(tl.float64) * inverse, 0.0).to(tl.float32)


@triton.jit
def narrowed(inverse):
    """``1/‖z‖²`` in fp32, where 0 says that there is no v."""
    narrow = inverse.to(tl.float32)
    return tl.where((inverse > 0) & (narrow < TINY), TINY, narrow)


@triton.jit
def _direction_kernel(
    z_ptr,
    v_ptr,
    inverse_ptr,
    coeff_ptr,
    stride_zm,
    stride_zk,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    z_ptr += m * stride_zm
    first = row_offsets(SEGMENTS, WIDTH)
    squares = tl.zeros((SEGMENTS, WIDTH), tl.float64)
    largest = tl.zeros((SEGMENTS, WIDTH), tl.float32)
    for j in tl.range(0, ROUNDS):
        offs_k = first + j * WIDTH
        z = tl.load(z_ptr + offs_k * stride_zk, mask=offs_k < K, other=0.0).to(tl.float32)
        squares = tl.fma(z.to(tl.float64), z.to(tl.float64), squares)
        largest = tl.maximum(largest, tl.abs(z))
    inverse = inverse_of(norm2(squares), tl.max(largest).to(tl.float64))
    one = tl.arange(0, 1)
    tl.store(inverse_ptr + m + one, narrowed(inverse))
    for j in tl.range(0, ROUNDS):
        offs_k = first + j * WIDTH
        z = tl.load(z_ptr + offs_k * stride_zk, mask=offs_k < K, other=0.0).to(tl.float32)
        tl.store(v_ptr + m * K + offs_k, along(z, inverse[:, None]), mask=offs_k < K)
    lanes = row_offsets(SEGMENTS, LANES)
    partial = tl.zeros((SEGMENTS, LANES), tl.float32)
    for j in tl.range(0, STEPS, UNROLL):  # v is computed again rather than read back
        for i in tl.static_range(UNROLL):
            offs_k = lanes + (j + i) * LANES
            z = tl.load(z_ptr + offs_k * stride_zk, mask=offs_k < K, other=0.0).to(tl.float32)
            partial = tl.fma(z, along(z, inverse[:, None]), partial)
    tl.store(coeff_ptr + m + one, pair_sum(add_segments(partial, SEGMENTS), LANE_BITS))


def row_blocks(k: int) -> tuple[int, int, int, int, int]:
    """STEPS, UNROLL, SEGMENTS, WIDTH and ROUNDS of the kernels that have one program per row of k
    elements.
    """
    segments = segments_of(k)
    segment = min(power_of_two(k), LANES.value * CHUNKS.value)
    # In several rounds, but for a short row: the compiler keeps the layout of what a loop adds up.
    # Without a loop each thread would load and square the whole row.
    width = max(min(segment // 4, 512, 2048 // segments), LANES.value)
    return *steps_of(k), segments, width, triton.cdiv(segment, width)


def row_warps(k: int) -> int:
    """Eight warps for a long row, so that a thread holds 8 elements at a time or fewer."""
    return 8 if k > 2048 else 4


def direction_outputs(rows: int, k: int) -> tuple[Memory, ...]:
    """v, ``1/‖z‖²`` and the coefficients, as a launch describes them."""
    return ((rows, k), torch.float32), ((rows,), torch.float32), ((rows, 1), torch.float32)


def plan_direction(z: Tensor) -> Launch:
    """Plan the direction of z (M, K)."""
    rows, k = z.shape
    rest = (*z.stride(), k, *row_blocks(k))
    return Launch(_direction_kernel, rows, (z,), direction_outputs(rows, k), rest, row_warps(k))


@operator(check_read_direction, plan_direction)
def read_direction(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``v = z / ‖z‖²``, ``1/‖z‖²`` and ``z·v`` in one launch; ``‖z‖²`` is summed in fp64 and v
    rounded once.

    Args:
        z: (M, K) fp32, bf16 or fp16, any strides.

    Returns:
        v (M, K), ``1/‖z‖²`` (M,), and ``z·v`` (M, 1) as a linear op sums it, in fp32. Where z = 0,
        or where v leaves fp32's range, all three are 0, and the caller must look. A NaN in z makes
        ``1/‖z‖²`` NaN and v 0. Not differentiable.

    Raises:
        TypeError: z's dtype does not fit.
        ValueError: its shape does not.

    Source: Goldwaser et al. (2025), Lemma 6.
    """
    # on fake tensors; else the plan launches
    v, inverse_norm2, coeff = (
        z.new_empty(size, dtype=dtype) for size, dtype in direction_outputs(*z.shape)
    )
    return v, inverse_norm2, coeff
