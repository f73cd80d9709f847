"""``c = z·v``, summed in the same order by every kernel, so that a coefficient has the same bits
everywhere.

The order does not depend on block sizes, warps or layouts. Element k goes to lane ``k % 64``. A
lane adds its products one after the other, in segments of 32; the segments are added one after the
other; the lanes are added in pairs, neighbours first. All of it is fp32 with fused multiply-adds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from icl_patch.kernels.runtime.launching import Launch, power_of_two

LANES = tl.constexpr(64)
LANE_BITS = tl.constexpr(6)
CHUNKS = tl.constexpr(32)


@triton.constexpr_function
def log2(n):
    """log2 of a power of two."""
    return n.bit_length() - 1


@triton.jit
def pair_sum(x, BITS: tl.constexpr):
    """Sum over the last axis of x (A, 2**BITS), neighbours first in any layout."""
    for _ in tl.static_range(BITS):
        left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = left + right
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def coefficient_step(partial, total, z, v, k):
    """Add one chunk of 64 elements, beginning with element k, to the lanes (..., 64): ``partial``
    is the running segment, ``total`` the sum of finished segments.
    """
    partial = tl.fma(z, v, partial)
    ends = (k // LANES) % CHUNKS == CHUNKS - 1
    total = tl.where(ends, total + partial, total)
    partial = tl.where(ends, 0.0, partial)
    return partial, total


@triton.jit
def add_segments(x, SEGMENTS: tl.constexpr):
    """The sum (1, 64) of the segments of x (SEGMENTS, 64), one after the other. A row is picked out
    of x by a sum with zeros, which is exact.
    """
    segment = tl.arange(0, SEGMENTS)[:, None]
    total = tl.zeros((1, LANES), x.dtype)
    for s in tl.static_range(SEGMENTS):
        total += tl.sum(tl.where(segment == s, x, 0.0), axis=0, keep_dims=True)
    return total


@triton.jit
def row_offsets(SEGMENTS: tl.constexpr, WIDTH: tl.constexpr):
    """The offsets (SEGMENTS, WIDTH) of the first WIDTH elements of every segment of a row."""
    return (
        tl.arange(0, SEGMENTS).to(tl.int64)[:, None] * (LANES * CHUNKS)
        + tl.arange(0, WIDTH)[None, :]
    )


@triton.jit
def coefficient(
    z_ptr,
    v_ptr,
    stride_zk,
    stride_vk,
    stop,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """``z·v`` (1,) of the first ``stop`` elements of two rows."""
    first = row_offsets(SEGMENTS, LANES)
    partial = tl.zeros((SEGMENTS, LANES), tl.float32)
    for j in tl.range(0, STEPS, UNROLL):
        for i in tl.static_range(UNROLL):
            offs_k = first + (j + i) * LANES
            mask = offs_k < stop
            z = tl.load(z_ptr + offs_k * stride_zk, mask=mask, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + offs_k * stride_vk, mask=mask, other=0.0).to(tl.float32)
            partial = tl.fma(z, v, partial)
    return pair_sum(add_segments(partial, SEGMENTS), LANE_BITS)


@triton.jit
def _coefficient_kernel(
    z_ptr,
    v_ptr,
    index_ptr,
    coeff_ptr,
    stride_zm,
    stride_zk,
    stride_vm,
    stride_vr,
    stride_vk,
    stride_i,
    K: tl.constexpr,
    R: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    m, r = pid // R, pid % R
    row = m
    if HAS_INDEX:
        row = tl.load(index_ptr + m * stride_i).to(tl.int64)
    total = coefficient(
        z_ptr + m * stride_zm, v_ptr + row * stride_vm + r * stride_vr, stride_zk, stride_vk,
        tl.where(row >= 0, K, 0), STEPS, UNROLL, SEGMENTS,
    )  # fmt: skip
    tl.store(coeff_ptr + pid + tl.arange(0, 1), total)


def plan_coefficients(z: Tensor, v: Tensor, index: Tensor | None) -> Launch:
    """Plan ``z_m · v_r`` (M, R) fp32 from z (M, K) and v (M, R, K), (1, R, K) or a pool with
    ``index``; 0 where the index is -1.
    """
    rows, (rank, k) = len(z), v.shape[1:]
    segments = segments_of(k)
    stride_vm = 0 if index is None and v.shape[0] == 1 else v.stride(0)
    rest = (
        *z.stride(),
        stride_vm,
        *v.stride()[1:],
        stride_of(index),
        k,
        rank,
        index is not None,
        *steps_of(k),
        segments,
    )
    outputs = (((rows, rank), torch.float32),)
    return Launch(
        _coefficient_kernel,
        rows * rank,
        (z, v, index),
        outputs,
        rest,
        warps_for(segments),
    )


def stride_of(vector: Tensor | None) -> int:
    """The stride of a vector, 0 for an absent one."""
    return 0 if vector is None else vector.stride(0)


def segments_of(k: int) -> int:
    """The segments of 2048 elements that hold K, rounded up to a power of two; beyond K all is
    0.
    """
    return power_of_two(triton.cdiv(k, LANES.value * CHUNKS.value))


def steps_of(k: int) -> tuple[int, int]:
    """The chunks to read of a segment, fewer than 32 if K is short, and how many at a time."""
    steps = min(power_of_two(triton.cdiv(k, LANES.value)), CHUNKS.value)
    return steps, min(steps, 8)


def warps_for(segments: int) -> int:
    """One or two rows of lanes per warp."""
    return min(max(segments // 2, 1), 8)
