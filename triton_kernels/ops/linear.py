"""``y = z Wᵀ + bias + Σ_r (z·v_r) u_r`` in one pass over W."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from icl_patch.kernels.ops.coefficients import LANES, plan_coefficients
from icl_patch.kernels.ops.linear_kernels import _linear_kernel
from icl_patch.kernels.runtime import library
from icl_patch.kernels.runtime.config import GEMM, GEMV, GEMV_ROWS, Config, config_for, gpu_name
from icl_patch.kernels.runtime.launching import (
    FLOATS,
    INTERPRETED,
    Launch,
    Memory,
    cached_launch,
    ceil_div,
    check,
    check_floats,
    dtype_of,
    has_pdl,
    needs_op,
    power_of_two,
)

MAX_RANK = 64


def product_path(rows: int) -> str:
    """``"gemv"`` up to 16 rows, else ``"gemm"``."""
    return GEMV if rows <= GEMV_ROWS else GEMM


@cache
def blocks(config: Config, rows: int, record: bool) -> tuple[int, int]:
    """Rows and outputs per program. With multiply-adds they depend on the number of rows, which
    does not change a row's bits.
    """
    if config.dot:
        return config.block_m, config.block_n
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
    padded = max(needed, power_of_two(ceil_div(4 * threads, config.block_k * dtype.itemsize)))
    if dtype.itemsize >= 4 or padded > block_m or fused * padded * config.block_k > 8 * threads:
        return needed, LANES.value
    return padded, config.block_k


def sums_coefficients(config: Config, rows: int, rank: int) -> bool:
    """Whether the linear kernel computes the coefficients z·v itself."""
    return power_of_two(rank) * coefficient_rows(config.block_m, rows) <= config.fused


def plan_linear(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    dtype: torch.dtype,
    config: Config,
    *,
    record: bool = False,
    second: Tensor | None = None,
) -> Launch:
    """Plan y (M, N) in ``dtype`` from z, weight, bias, u, v, index, the coefficients of
    :func:`plan_before`, and the weight and bias of a second map of z, or None for each.

    u (M, R, N) or (1, R, N), v the same with K, or pools with ``index``. With ``record`` z and y
    are (2M, ·), the coefficients (M, 1) are always read, and the patch u (M, N) is a second output.
    ``second`` is the weight (N', K) of another map to record, with the same strides, and with a
    bias if there is one. Its outputs follow.
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
    inputs = (
        z.dtype,
        weight.dtype,
        dtype_of(bias),
        dtype_of(u),
        dtype_of(v),
        dtype_of(index),
        torch.float32 if record or (rank and not fused) else None,
        dtype_of(second),
        None if second is None else dtype_of(bias),
    )
    outputs: list[Memory | None] = []
    widths = [n] if second is None else [n, len(second)]
    for width in widths:
        outputs += [((len(z), width), dtype), ((rows, width), torch.float32) if record else None]
    tiles = ceil_div(rows, block_m) * sum(ceil_div(width, block_n) for width in widths)
    partial: Memory = ((config.splits * len(z) * sum(widths),), torch.float32)
    rest: tuple = (
        rows,
        n,
        None if second is None else len(second),
        *z.stride(),
        *weight.stride(),
        0 if bias is None else bias.stride(0),
        *u_strides,
        *v_strides,
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
        config.splits,
        second is not None,
        pdl := config.pdl and has_pdl(z.device),
        config.num_stages,
        INTERPRETED,
    )
    return Launch(
        _linear_kernel,
        tiles * config.splits,
        inputs,
        (*outputs, *[None] * (4 - len(outputs))),
        rest,
        config.num_warps,
        config.num_stages,
        (partial, ((tiles,), torch.int32)) if config.splits > 1 else (None, None),
        pdl,
    )


def plan_before(z: Tensor, v: Tensor | None, index: Tensor | None, config: Config) -> Launch | None:
    """The launch that computes the coefficients, or None if the linear kernel does so; v (M, R, K),
    (1, R, K) or a pool.
    """
    return (
        None
        if v is None or sums_coefficients(config, len(z), v.shape[1])
        else plan_coefficients(z, v, index)
    )


def launch_linear(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    index: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    path: str | None = None,
    config: Config | None = None,
) -> Tensor:
    """:func:`patched_linear` without gradients, straight to the kernel."""
    return cached_launch(_plan, (z, weight, u, v, bias, index), out_dtype, path, config)


def _plan(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    out_dtype: torch.dtype | None,
    path: str | None,
    config: Config | None,
) -> Callable[..., Tensor]:
    _check(z, weight, u, v, bias, index, out_dtype)
    if u is not None and not len(u):  # an empty pool: no row has a patch
        plain = _plan(z, weight, None, None, bias, None, out_dtype, path, config)
        return lambda z, weight, u, v, bias, index: plain(z, weight, None, None, bias, None)
    if u is not None and v is not None and u.dim() == 2:
        u, v = u.unsqueeze(1), v.unsqueeze(1)
    config = config or config_for(
        gpu_name(z.device), weight.dtype, len(weight), path or product_path(len(z))
    )
    before = plan_before(z, v, index, config)
    launch = plan_linear(z, weight, u, v, bias, index, out_dtype or z.dtype, config)

    def call(
        z: Tensor,
        weight: Tensor,
        u: Tensor | None,
        v: Tensor | None,
        bias: Tensor | None,
        index: Tensor | None,
    ) -> Tensor:
        coeff = None if before is None else before(z, v, index)
        return launch(z, weight, bias, u, v, index, coeff, None, None)

    return call


library.define(
    "triton_patched_linear(Tensor z, Tensor weight, Tensor? u, Tensor? v, Tensor? bias, Tensor?"
    " index, ScalarType? out_dtype, str? path) -> Tensor",
    launch_linear,
)


@library.fake("triton_patched_linear")
def _(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    out_dtype: torch.dtype | None,
    path: str | None,
) -> Tensor:
    return z.new_empty((z.shape[0], weight.shape[0]), dtype=out_dtype or z.dtype)


def patched_linear(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    index: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    path: str | None = None,
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
        path: ``"gemv"`` or ``"gemm"`` for any number of rows; by default ``"gemv"`` up to 16
            rows. Within a path a row's bits depend on nothing but the row, its factors, the
            weight, the bias and the GPU.

    Returns:
        (M, N). Not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.

    Source: Goldwaser et al. (2025), Lemmas 6 and 9.
    """
    if needs_op(z, weight, u, v, bias):
        _check(z, weight, u, v, bias, index, out_dtype)
        return torch.ops.icl_patch.triton_patched_linear(
            z, weight, u, v, bias, index, out_dtype, path
        )
    return launch_linear(z, weight, u, v, bias, index, out_dtype, path)


def _check(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    check_linear(z, weight, bias, out_dtype)
    if u is not None or v is not None:
        check_factors(z, weight.shape[0], u, v, index)
    elif index is not None:
        raise ValueError("expected u and v with index, got none")


def check_linear(
    z: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    """Raise unless the arguments fit a linear map of z."""
    if z.dim() != 2 or weight.dim() != 2 or z.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected z (M, K) and weight (N, K), got {tuple(z.shape)} and {tuple(weight.shape)}"
        )
    check_operands("z", z, weight, bias, out_dtype)


def check_record(
    z_pair: Tensor, weight: Tensor, bias: Tensor | None, coeff: Tensor | None = None
) -> None:
    """Raise unless the arguments fit a recorded linear map of both streams."""
    check_linear(z_pair, weight, bias, None)
    rows = z_pair.shape[0] // 2  # torch.compile has no divmod for sizes that vary
    check(z_pair.shape[0] == 2 * rows, "z_pair (2M, K)", z_pair.shape)
    if coeff is not None:
        good = (
            coeff.shape == (rows, 1)
            and coeff.dtype == torch.float32
            and coeff.is_contiguous()
            and coeff.device == z_pair.device
        )
        if not good:  # a message with rows in it would bind a compiled graph to their number
            expected = f"contiguous coefficients ({rows}, 1) in fp32 on {z_pair.device}"
            raise ValueError(f"expected {expected}, got {tuple(coeff.shape)}")


def check_operands(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    """Raise unless dtypes, devices and bias fit the product of x and a weight (N, K), or weights
    (E, N, K).
    """
    check_floats(x, **{name: x}, weight=weight, bias=bias)
    check(weight.dtype == x.dtype, f"weight in {name}'s dtype {x.dtype}", weight.dtype, TypeError)
    if bias is not None:
        check(bias.shape == weight.shape[:-1], f"bias {tuple(weight.shape[:-1])}", bias.shape)
        check(bias.dtype == x.dtype, f"bias in {name}'s dtype {x.dtype}", bias.dtype, TypeError)
    if out_dtype is not None:
        check(out_dtype in FLOATS, "out_dtype fp32, bf16 or fp16", out_dtype, TypeError)


def check_factors(
    z: Tensor, n: int, u: Tensor | None, v: Tensor | None, index: Tensor | None
) -> None:
    """Raise unless u, v and index fit z (M, K) and outputs (M, n)."""
    if u is None or v is None:
        raise ValueError("expected both u and v or neither, got one of them")
    check_floats(z, u=u, v=v)
    rows = z.shape[0]
    for name, factor, width in (("u", u, n), ("v", v, z.shape[1])):
        pool = index is not None and factor.dim() == 3
        own = index is None and (
            (factor.dim() in (2, 3) and factor.shape[0] == rows)
            or (factor.dim() == 3 and factor.shape[0] == 1)
        )
        if not (pool or own) or factor.shape[-1] != width:
            wanted = (
                f"(P, R, {width})"
                if index is not None
                else f"({rows}, {width}), ({rows}, R, {width}) or (1, R, {width})"
            )
            raise ValueError(f"expected {name} {wanted}, got {tuple(factor.shape)}")
    if u.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"expected u and v with the same rows and rank, got {tuple(u.shape)} and"
            f" {tuple(v.shape)}"
        )
    if u.dim() == 3 and not 1 <= u.shape[1] <= MAX_RANK:
        raise ValueError(f"expected a rank from 1 to {MAX_RANK}, got {u.shape[1]}")
    if index is not None:
        good = (
            index.shape == (rows,) and not index.is_floating_point() and index.dtype != torch.bool
        )
        if not good:
            raise ValueError(f"expected index ({rows},) of integers, got {tuple(index.shape)}")
        check(index.device == z.device, f"index on {z.device}", index.device)
