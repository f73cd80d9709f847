"""The kernel behind every linear op: plain, patched or recording, on matrix units or with fused
multiply-adds.

The configuration fixes the order in which K is summed, so a row has the same bits at any place
among the others:

- on matrix units (DOT) the weight stands on the left, ``W zᵀ``, and rows are columns of the
  smallest matrix instruction, however many there are; each output has SUMS running sums, of which
  sum s takes part s of every BLOCK_K elements, and the sums are added in pairs at the end;
- else each row, output and lane of BLOCK_K has one running sum, and the lanes are added in pairs at
  the end.

Both add the same to the sum: ``+ bias``, then ``+ c_r u_r`` rank by rank, each by one fused
multiply-add; then they round once.
"""

import triton
import triton.language as tl

from icl_patch.kernels.ops.coefficients import LANE_BITS, LANES, coefficient_step, log2, pair_sum


@triton.jit
def _factor_rows(index_ptr, stride_i, offs_m, mask_m, HAS_INDEX: tl.constexpr):
    """The patch of each row in u and v, and a mask of the rows that have one."""
    if HAS_INDEX:
        row = tl.load(index_ptr + offs_m * stride_i, mask=mask_m, other=-1).to(tl.int64)
        patched = mask_m & (row >= 0)
    else:
        row = offs_m
        patched = mask_m
    return row, patched


@triton.jit
def _halves(x):
    """The first and the second half of the last axis of x (A, B, ·)."""
    return tl.split(
        tl.permute(tl.reshape(x, (x.shape[0], x.shape[1], 2, x.shape[2] // 2)), (0, 1, 3, 2))
    )


@triton.jit
def _coefficient_chunks(partial, total, z, v, k):
    """Add the chunks of 64 of z (1, ROWS, ·) and v (FUSED, ROWS, ·), which begin with element k,
    one after the other.
    """
    if z.shape[2] == LANES:
        partial, total = coefficient_step(partial, total, z, v, k)
    else:
        z_first, z_last = _halves(z)
        v_first, v_last = _halves(v)
        partial, total = _coefficient_chunks(partial, total, z_first, v_first, k)
        partial, total = _coefficient_chunks(partial, total, z_last, v_last, k + z_first.shape[2])
    return partial, total


@triton.jit
def _coefficient_steps(
    partial,
    total,
    z_ptr,
    v_ptr,
    offs_m,
    row,
    patched,
    k0,
    stride_zm,
    stride_zk,
    stride_vm,
    stride_vr,
    stride_vk,
    K: tl.constexpr,
    R: tl.constexpr,
    FUSED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COEFF_BLOCK_K: tl.constexpr,
):
    """Add BLOCK_K elements of ``z·v_r`` to partial and total (FUSED, ROWS, 64), for FUSED ≥ R
    ranks, COEFF_BLOCK_K elements at a time.
    """
    offs_r = tl.arange(0, FUSED)[:, None, None]
    for j in tl.static_range(BLOCK_K // COEFF_BLOCK_K):
        k = k0 + j * COEFF_BLOCK_K
        offs_k = (k + tl.arange(0, COEFF_BLOCK_K)).to(tl.int64)[None, None, :]
        mask = patched[None, :, None] & (offs_k < K)
        z = tl.load(
            z_ptr + offs_m[None, :, None] * stride_zm + offs_k * stride_zk, mask=mask, other=0.0
        ).to(tl.float32)
        v_ptrs = (
            v_ptr
            + row[None, :, None] * stride_vm
            + offs_r.to(tl.int64) * stride_vr
            + offs_k * stride_vk
        )
        v = tl.load(v_ptrs, mask=mask & (offs_r < R), other=0.0).to(tl.float32)
        partial, total = _coefficient_chunks(partial, total, z, v, k)
    return partial, total


@triton.jit
def _sum_lanes(lanes, FUSED: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The coefficients of the lanes (FUSED, ROWS, 64), spread to (FUSED, BLOCK_M) by exact sums
    with zeros.
    """
    coeff = tl.reshape(
        pair_sum(tl.reshape(lanes, (FUSED * ROWS, LANES)), LANE_BITS), (FUSED, ROWS, 1)
    )
    same_row = tl.arange(0, ROWS)[None, :, None] == tl.arange(0, BLOCK_M)[None, None, :]
    return tl.sum(tl.where(same_row, coeff, 0.0), axis=1)


@triton.jit
def _load_weight(
    w_ptr,
    offs_n,
    mask_n,
    k0,
    stride_wn,
    stride_wk,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUMS: tl.constexpr,
):
    """BLOCK_K columns of the weight, from k0 on, (BLOCK_N, BLOCK_K); in SUMS parts (SUMS, BLOCK_N,
    BLOCK_K / SUMS).
    """
    part: tl.constexpr = BLOCK_K // SUMS
    if SUMS > 1:
        offs_k = tl.arange(0, SUMS)[:, None, None] * part + tl.arange(0, part)[None, None, :]
        offs_n, mask = offs_n[None, :, None], mask_n[None, :, None]
    else:
        offs_k = tl.arange(0, BLOCK_K)[None, :]
        offs_n, mask = offs_n[:, None], mask_n[:, None]
    offs_k = (k0 + offs_k).to(tl.int64)
    if K % BLOCK_K:
        mask = mask & (offs_k < K)
    return tl.load(w_ptr + offs_n * stride_wn + offs_k * stride_wk, mask=mask, other=0.0)


@triton.jit
def _add_products(acc, w, z, DOT: tl.constexpr, WIDEN: tl.constexpr):
    """``acc + w zᵀ`` for w (BLOCK_N, BLOCK_K) and z (BLOCK_M, BLOCK_K); with DOT and w (SUMS,
    BLOCK_N, ·), acc (SUMS, BLOCK_N, BLOCK_M) has a sum for each part of BLOCK_K; without DOT, there
    is one sum per lane of BLOCK_K.
    """
    if DOT:
        if WIDEN:
            w, z = w.to(tl.float32), z.to(tl.float32)
        if len(acc.shape) == 3:  # a chain of matrix instructions for each sum
            sums: tl.constexpr = acc.shape[0]
            z = tl.permute(tl.reshape(z, (z.shape[0], sums, z.shape[1] // sums)), (1, 2, 0))
        else:
            z = tl.trans(z)
        acc = tl.dot(w, z, acc, input_precision="ieee")
    else:
        w, z = w.to(tl.float32)[:, None, :], z.to(tl.float32)[None, :, :]
        acc = tl.fma(tl.broadcast_to(w, acc.shape), tl.broadcast_to(z, acc.shape), acc)
    return acc


@triton.jit
def _add_sums(acc):
    """The sums (BLOCK_N, BLOCK_M) of acc (SUMS, BLOCK_N, BLOCK_M) or of one sum."""
    if len(acc.shape) == 3:
        sums: tl.constexpr = acc.shape[0]
        n: tl.constexpr = acc.shape[1]
        m: tl.constexpr = acc.shape[2]
        acc = tl.reshape(tl.permute(acc, (1, 2, 0)), (n * m, sums))
        acc = tl.reshape(pair_sum(acc, log2(sums)), (n, m))
    return acc


@triton.jit
def _add_lanes(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The sums (BLOCK_N, BLOCK_M) of lanes (BLOCK_N, BLOCK_M, BLOCK_K)."""
    return tl.reshape(
        pair_sum(tl.reshape(acc, (BLOCK_N * BLOCK_M, BLOCK_K)), log2(BLOCK_K)), (BLOCK_N, BLOCK_M)
    )


@triton.jit
def _linear_kernel(
    z_ptr,
    w_ptr,
    bias_ptr,
    u_ptr,
    v_ptr,
    index_ptr,
    coeff_ptr,
    second_w_ptr,
    second_bias_ptr,
    third_w_ptr,
    third_bias_ptr,
    y_ptr,
    u_out_ptr,
    second_y_ptr,
    second_u_out_ptr,
    third_y_ptr,
    M,
    N,
    SECOND_N,
    THIRD_N,
    stride_zm,
    stride_zk,
    stride_wn,
    stride_wk,
    stride_b,
    stride_um,
    stride_ur,
    stride_un,
    stride_vm,
    stride_vr,
    stride_vk,
    stride_i,
    DOT: tl.constexpr,  # matrix units, else fused multiply-adds
    K: tl.constexpr,
    R: tl.constexpr,  # rank of the patches; 0: none
    FUSED: tl.constexpr,  # R as a power of two if z·v is summed here; 0: it is read from coeff_ptr
    RECORD: tl.constexpr,  # z holds M rows with the context, then M without; u is an output
    HAS_INDEX: tl.constexpr,  # row m takes patch index[m], else patch m
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a block for which z·v is summed, a power of two ≤ BLOCK_M
    COEFF_BLOCK_K: tl.constexpr,  # elements of z and v that are loaded together for z·v
    SUMS: tl.constexpr,  # running sums of an output on matrix units, a power of two
    MAPS: tl.constexpr,  # linear maps of z that share this launch: up to 3, recorded ones up to 2
    NUM_STAGES: tl.constexpr,
    WIDEN: tl.constexpr,  # bf16 and fp16 to fp32 before tl.dot: Triton's interpreter needs it
):
    # Neighbouring programs compute the same outputs of other rows: they find the weight in L2.
    pid = tl.program_id(0).to(tl.int64)
    row_blocks = tl.cdiv(M, BLOCK_M)
    width = N
    if MAPS > 1:
        first = row_blocks * tl.cdiv(N, BLOCK_N)
        if pid >= first:
            pid -= first
            w_ptr, y_ptr, width = second_w_ptr, second_y_ptr, SECOND_N
            if RECORD:
                u_out_ptr = second_u_out_ptr
            if HAS_BIAS:
                bias_ptr = second_bias_ptr
            if MAPS > 2:
                second = row_blocks * tl.cdiv(SECOND_N, BLOCK_N)
                if pid >= second:
                    pid -= second
                    w_ptr, y_ptr, width = third_w_ptr, third_y_ptr, THIRD_N
                    if HAS_BIAS:
                        bias_ptr = third_bias_ptr
    offs_m = (pid % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid // row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < width
    offs_c = (pid % row_blocks) * BLOCK_M + tl.arange(0, ROWS)
    row, patched = _factor_rows(index_ptr, stride_i, offs_c, offs_c < M, HAS_INDEX)
    reduced_m = offs_m
    if RECORD:
        reduced_m = offs_m + M

    if DOT and SUMS > 1:
        acc = tl.zeros((SUMS, BLOCK_N, BLOCK_M), tl.float32)
        acc_ctx = tl.zeros((SUMS, BLOCK_N, BLOCK_M), tl.float32)
    elif DOT:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        acc_ctx = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_M, BLOCK_K), tl.float32)
        acc_ctx = tl.zeros((BLOCK_N, BLOCK_M, BLOCK_K if RECORD else 1), tl.float32)
    coeff = tl.zeros((1, 1), tl.float32)
    if FUSED:
        partial = tl.zeros((FUSED, ROWS, LANES), tl.float32)
        total = tl.zeros((FUSED, ROWS, LANES), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        offs_k = (k0 + tl.arange(0, BLOCK_K)).to(tl.int64)
        mask_z = mask_m[:, None]
        if K % BLOCK_K:
            mask_z = mask_z & (offs_k < K)[None, :]
        w = _load_weight(w_ptr, offs_n, mask_n, k0, stride_wn, stride_wk, K, BLOCK_K, SUMS)
        z = tl.load(
            z_ptr + reduced_m[:, None] * stride_zm + offs_k[None, :] * stride_zk,
            mask=mask_z,
            other=0.0,
        )
        acc = _add_products(acc, w, z, DOT, WIDEN)
        if RECORD:
            z_ctx = tl.load(
                z_ptr + offs_m[:, None] * stride_zm + offs_k[None, :] * stride_zk,
                mask=mask_z,
                other=0.0,
            )
            acc_ctx = _add_products(acc_ctx, w, z_ctx, DOT, WIDEN)
        if FUSED:
            partial, total = _coefficient_steps(
                partial,
                total,
                z_ptr,
                v_ptr,
                offs_c,
                row,
                patched,
                k0,
                stride_zm,
                stride_zk,
                stride_vm,
                stride_vr,
                stride_vk,
                K,
                R,
                FUSED,
                BLOCK_K,
                COEFF_BLOCK_K,
            )
    if DOT:
        sums, sums_ctx = _add_sums(acc), _add_sums(acc_ctx)
    else:
        sums = _add_lanes(acc, BLOCK_M, BLOCK_N, BLOCK_K)
        sums_ctx = sums
        if RECORD:
            sums_ctx = _add_lanes(acc_ctx, BLOCK_M, BLOCK_N, BLOCK_K)
    if FUSED:
        coeff = _sum_lanes(total + partial, FUSED, ROWS, BLOCK_M)
    mask = mask_n[:, None] & mask_m[None, :]
    offsets = offs_m[None, :] * width + offs_n[:, None]
    y = sums
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_n * stride_b, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        y = sums + bias
    if RECORD:
        u = sums_ctx - sums
        tl.store(u_out_ptr + offsets, u, mask=mask)
        c = tl.load(coeff_ptr + offs_m, mask=mask_m, other=0.0)
        y = tl.fma(tl.broadcast_to(c[None, :], y.shape), u, y)
        y_ctx = sums_ctx
        if HAS_BIAS:
            y_ctx = sums_ctx + bias
        tl.store(y_ptr + offsets, y_ctx.to(y_ptr.dtype.element_ty), mask=mask)
        offsets = (offs_m + M)[None, :] * width + offs_n[:, None]
    elif R:  # rank by rank; rows without a patch keep their bits
        patch, has_patch = _factor_rows(index_ptr, stride_i, offs_m, mask_m, HAS_INDEX)
        mask_u = mask_n[:, None] & has_patch[None, :]
        u_offsets = patch[None, :] * stride_um + offs_n[:, None] * stride_un
        for r in tl.range(0, R):
            if FUSED:
                chosen = tl.arange(0, FUSED)[:, None] == r
                c = tl.sum(tl.where(chosen, coeff, 0.0), axis=0)  # one number and zeros
            else:
                c = tl.load(coeff_ptr + offs_m * R + r, mask=has_patch, other=0.0)
            u = tl.load(u_ptr + u_offsets, mask=mask_u, other=0.0).to(tl.float32)
            y = tl.where(mask_u, tl.fma(tl.broadcast_to(c[None, :], y.shape), u, y), y)
            u_ptr += stride_ur
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
