"""``c = z·v``: how every kernel sums it, so that a coefficient has the same bits wherever it is
computed.

The order is fixed and knows nothing of block sizes, warps or layouts. Element k goes to lane ``k %
64``. A lane adds its products one after the other, in segments of 32; the segments are added one
after the other; the lanes are added in pairs, neighbours first. fp32 throughout, with fused
multiply-adds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from icl_patch.kernels.launching import Launch, ceil_div, dtype_of, power_of_two, serve

LANES = tl.constexpr(64)
LANE_BITS = tl.constexpr(6)
CHUNKS = tl.constexpr(32)


@triton.constexpr_function
def log2(n):
    """Of a power of two."""
    return n.bit_length() - 1


@triton.jit
def pair_sum(x, BITS: tl.constexpr):
    """Sum over the last axis, 2**BITS long, of x (A, ·): neighbours first, whatever the layout."""
    for _ in tl.static_range(BITS):
        left, right = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = left + right
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def coefficient_step(partial, total, z, v, k):
    """One chunk of 64 elements, the first of them element k: lanes' running segment and finished
    segments, (..., 64).
    """
    partial = tl.fma(z, v, partial)
    ends = (k // LANES) % CHUNKS == CHUNKS - 1
    total = tl.where(ends, total + partial, total)
    partial = tl.where(ends, 0.0, partial)
    return partial, total


@triton.jit
def add_segments(x, SEGMENTS: tl.constexpr):
    """The segments of x (SEGMENTS, 64), one after the other: (1, 64). Picking a row out of x by a
    sum with zeros is exact.
    """
    segment = tl.arange(0, SEGMENTS)[:, None]
    total = tl.zeros((1, LANES), x.dtype)
    for s in tl.static_range(SEGMENTS):
        total += tl.sum(tl.where(segment == s, x, 0.0), axis=0, keep_dims=True)
    return total


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
        row = tl.load(index_ptr + m).to(tl.int64)
    stop = tl.where(row >= 0, K, 0)
    first = (
        tl.arange(0, SEGMENTS).to(tl.int64)[:, None] * (LANES * CHUNKS)
        + tl.arange(0, LANES)[None, :]
    )
    partial = tl.zeros((SEGMENTS, LANES), tl.float32)
    for j in tl.range(0, STEPS, UNROLL):
        for i in tl.static_range(UNROLL):
            offs_k = first + (j + i) * LANES
            mask = offs_k < stop
            z = tl.load(z_ptr + m * stride_zm + offs_k * stride_zk, mask=mask, other=0.0).to(
                tl.float32
            )
            v = tl.load(
                v_ptr + row * stride_vm + r * stride_vr + offs_k * stride_vk, mask=mask, other=0.0
            ).to(tl.float32)
            partial = tl.fma(z, v, partial)
    total = pair_sum(add_segments(partial, SEGMENTS), LANE_BITS)
    tl.store(coeff_ptr + pid + tl.arange(0, 1), total)


def plan_coefficients(z: Tensor, v: Tensor, index: Tensor | None) -> Launch:
    """From z (M, K), v (M, R, K), (1, R, K) or a pool with ``index``: ``z_m · v_r``, (M, R) fp32; 0
    where the index is -1.
    """
    rows, (rank, k) = len(z), v.shape[1:]
    segments = segments_of(k)
    stride_vm = 0 if index is None and v.shape[0] == 1 else v.stride(0)
    rest = (
        *z.stride(),
        stride_vm,
        *v.stride()[1:],
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
        (z.dtype, v.dtype, dtype_of(index)),
        outputs,
        rest,
        warps_for(segments),
    )


def segments_of(k: int) -> int:
    """How many segments of 2048 elements hold K, as a power of two: what is added beyond K is 0."""
    return power_of_two(ceil_div(k, LANES.value * CHUNKS.value))


def steps_of(k: int) -> tuple[int, int]:
    """How many chunks of a segment there are to go through, fewer than 32 where K is short, and how
    many at a time.
    """
    steps = min(power_of_two(ceil_div(k, LANES.value)), CHUNKS.value)
    return steps, min(steps, 8)


def warps_for(segments: int) -> int:
    """A row of lanes for each warp, or two."""
    return min(max(segments // 2, 1), 8)


def coefficients(z: Tensor, v: Tensor, index: Tensor | None = None) -> Tensor:
    """``c = z·v``, (M, R) fp32, for the arguments of :func:`icl_patch.kernels.patched_linear` with
    u and v of 3 dimensions.
    """
    return serve(plan_coefficients, (z, v, index))
