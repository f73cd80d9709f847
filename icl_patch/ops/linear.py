"""Linear maps with a low-rank change of their weight. The change is applied, recorded from two
streams, or added to the output of another module.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch.checks import (
    check_add_low_rank,
    check_patched_linear,
    check_record_linear,
    is_transformed,
)
from icl_patch.ops import native, reference
from icl_patch.ops.direction import Direction, read_direction
from icl_patch.ops.dispatch import Op, backend, triton_for, wants_gradients

GEMV, GEMM = "gemv", "gemm"
_GEMV_ROWS = 16
_GEMV_ROWS_ON_CUDA = 32  # in 16 bits, on matrix units
_GEMV_ROWS_BESIDE_AMX = 4
_TRITON_RANKS = 64


def _cpu_gemv_rows(matrix_units: str, kernels: str) -> int:
    """Up to how many rows our CPU kernel is faster than torch's product in a 16-bit dtype."""
    if backend == "triton":
        return _GEMV_ROWS
    if getattr(torch.cpu, matrix_units, lambda: False)():
        return _GEMV_ROWS_BESIDE_AMX
    if (
        native.cpu_instructions.startswith(("avx", "amx"))
        and not getattr(torch.ops.mkldnn, kernels, lambda: True)()
    ):
        return sys.maxsize  # torch has no fast product of this dtype
    return _GEMV_ROWS


_CPU_GEMV_ROWS = {
    torch.bfloat16: _GEMV_ROWS
    if native.cpu_instructions == "amx"
    else _cpu_gemv_rows("_is_amx_tile_supported", "_is_mkldnn_bf16_supported"),
    torch.float16: _cpu_gemv_rows("_is_amx_fp16_supported", "_is_mkldnn_fp16_supported"),
}


_only_gemv: ContextVar[bool] = ContextVar("icl_patch_only_gemv", default=False)
# The same for compiled code, which has no guards for context variables: how many contexts are open
# in all threads, and whether one is.
_contexts, _is_any_open, _lock = 0, False, Lock()


@contextmanager
def gemv_products() -> Iterator[None]:
    """Within this context all products use the path ``"gemv"``, so that a row's bits do not depend
    on the number of rows where our kernels multiply (:func:`patched_linear`).

    Code of ``torch.compile`` that is called within it follows; there the context of another thread
    counts too.
    """
    token = _only_gemv.set(True)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _only_gemv.reset(token)


def _count(change: int) -> None:
    global _contexts, _is_any_open
    with _lock:
        _contexts += change
        _is_any_open = _contexts > 0


def _takes_gemv_only() -> bool:
    return _is_any_open if torch.compiler.is_compiling() else _only_gemv.get()


def product_path(z: Tensor, rows: int) -> str:
    """The path by which ``rows`` rows of z's dtype are multiplied on z's device: ``"gemv"`` for few
    rows, ``"gemm"`` for many.

    The path ``"gemm"`` is torch's own product. It starts at 17 rows, and on CUDA in 16 bits at 33
    rows. On the CPU it starts at 5 rows if torch uses matrix units for a dtype and our kernel does
    not (fp16). It is never used if torch has no fast product of a dtype (fp16 without AVX512-FP16).
    In the path ``"gemv"`` a row's bits do not depend on the number of rows where our kernels
    multiply (:func:`patched_linear`).
    """
    if _takes_gemv_only():
        return GEMV
    if z.is_cuda and z.itemsize == 2:
        most = _GEMV_ROWS_ON_CUDA
    else:
        most = _CPU_GEMV_ROWS.get(z.dtype, _GEMV_ROWS) if z.is_cpu else _GEMV_ROWS
    return GEMM if rows > most else GEMV


def patched_linear(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    index: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    path: str | None = None,
) -> Tensor:
    """``y = z Wᵀ + bias + Σ_r (z·v_r) u_r``: a linear map with a low-rank change of its weight,
    which is never built.

    Args:
        z: (M, K) float.
        weight: logically (N, K), any strides, z's dtype. It is fast if either dimension is
            contiguous.
        u: (M, N) or (M, R, N) with a change per row; (1, R, N) shared by all rows; or a pool
            (P, R, N) with ``index``. Any float dtype. Without u and v the op is the plain linear
            map.
        v: as ``u``, with K instead of N.
        bias: (N,), z's dtype.
        index: (M,) integer rows of the pool; a row with -1 has the bits of the plain map. CUDA
            tensors are not checked on the host.
        out_dtype: the result's dtype; z's dtype by default.
        path: ``"gemv"`` or ``"gemm"`` for any number of rows; by default :func:`product_path` of
            M rows. In ``"gemv"`` a row's bits depend only on the row, its factors, the weight and
            the bias, if our kernels compute it. They do not if z, u, v or ``out_dtype`` is fp64,
            and on the CPU not if neither dimension of the weight is contiguous.

    Returns:
        (M, N), accumulated in fp32 and rounded once. ``z Wᵀ + bias`` is accumulated in fp64 if z is
        fp64, the low-rank term if z, u or v is; an fp64 ``out_dtype`` alone widens what fp32 gives.
        In two cases torch computes ``z Wᵀ + bias`` and rounds it to z's dtype first, as
        ``nn.Linear`` does: on the CPU in the path ``"gemm"``, and if autograd or a transform of
        torch.func may ask for a derivative.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit, or an index lies outside the pool.

    Source: Goldwaser et al. (2025), Lemmas 6 and 9.
    """
    if path is None and z.dim() == 2:
        path = product_path(z, z.shape[0])
    out: Tensor = _patched_linear(z, weight, u, v, bias, index, out_dtype, path=path)
    return out


def record_linear(
    z_pair: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    direction: Direction | None = None,
) -> tuple[Tensor, Tensor, Direction]:
    """Both streams through one linear map: their outputs and the patch between them.

    ``y_ctx = W z_ctx + b``, ``u = W z_ctx - W z`` and ``y = W z + b + (z·v) u`` with ``v =
    z/‖z‖²``; W is read once in the path ``"gemv"`` of M rows.

    Args:
        z_pair: (2M, K) float: M rows of the context stream, then M of the reduced stream.
        weight, bias: as for :func:`patched_linear`.
        direction: :func:`read_direction` of the reduced rows; all maps that read the same z share
            it.

    Returns:
        y_pair (2M, N) in z's dtype, u (M, N) fp32 (fp64 for fp64 z), and the direction.
        ``patched_linear(z, weight, u, direction.v, bias)`` returns y again, bit for bit, if our
        kernels multiply. They do so in the path ``"gemv"``, but not in fp64, and not if neither
        dimension of the weight is contiguous.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.

    Source: Goldwaser et al. (2025), Lemma 6.
    """
    if z_pair.dim() != 2:
        check_record_linear(z_pair, weight, bias=bias)  # raises
    rows = z_pair.shape[0] // 2
    if direction is None:
        direction = read_direction(z_pair[rows:])
    path = product_path(z_pair, rows)
    y_pair, u = _record_linear(z_pair, weight, direction.v, bias, direction=direction, path=path)
    return y_pair, u, direction


def record_linears(
    z_pair: Tensor,
    maps: Sequence[tuple[Tensor, Tensor | None]],
    *,
    direction: Direction,
) -> list[tuple[Tensor, Tensor]]:
    """y_pair and u of :func:`record_linear` for each weight and bias of ``maps``, bit for bit. On
    CUDA this is one launch if the maps are alike.
    """
    kernels = triton_for((z_pair, *chain.from_iterable(maps)))
    if (
        kernels is None
        or direction.coeff is None
        or product_path(z_pair, z_pair.shape[0] // 2) == GEMM
    ):
        return [record_linear(z_pair, *linear, direction=direction)[:2] for linear in maps]
    weights, biases = [weight for weight, _ in maps], [bias for _, bias in maps]
    flat = kernels.record_linears(z_pair, weights, biases, direction.coeff)
    return list(zip(flat[::2], flat[1::2], strict=True))


def add_low_rank(
    y: Tensor,
    z: Tensor,
    u: Tensor,
    v: Tensor,
    *,
    index: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``y + Σ_r (z·v_r) u_r``: add the low-rank term to the output of another module (quantised,
    convolutional, …).

    The result is ``patched_linear(z, W, u, v, b)`` bit for bit if y is ``patched_linear(z, W, None,
    None, b, out_dtype=torch.float32)``.

    Args:
        y: (M, N) float, the plain output.
        z: (M, K) float, the input it came from.
        u, v, index: as for :func:`patched_linear`.
        out_dtype: the result's dtype; y's dtype by default.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit, or an index lies outside the pool.
    """
    out: Tensor = _add_low_rank(y, z, u, v, index, out_dtype)
    return out


def _reference_patched_linear(
    z: Tensor,
    weight: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    out_dtype: torch.dtype | None,
    path: str | None,
) -> Tensor:
    out_dtype = out_dtype or z.dtype
    dtypes = (out_dtype, *(x.dtype for x in (u, v) if x is not None))
    # ranks beyond those of Triton's kernel
    high = z.is_cuda and u is not None and not wants_gradients((z, weight, u, v, bias))
    if path == GEMV and z.dtype != torch.float64 and (high or torch.float64 in dtypes):
        plain = patched_linear(z, weight, bias=bias, out_dtype=torch.float32, path=path)
    else:
        plain = _wide_product(z, weight, bias)
    if u is None or v is None:
        return plain.to(out_dtype)
    return add_low_rank(plain, z, u, v, index=index, out_dtype=out_dtype)


def _wide_product(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``z Wᵀ + bias`` by torch: from 16 bits on CUDA in fp32, before its rounding."""
    if not z.is_cuda or z.itemsize > 2 or wants_gradients((z, weight, bias)) or is_transformed():
        return F.linear(z, weight, bias)
    plain = torch.mm(z, weight.T, out_dtype=torch.float32)
    return plain if bias is None else plain + bias


def _reference_record_linear(
    z_pair: Tensor,
    weight: Tensor,
    v: Tensor,
    bias: Tensor | None,
    direction: Direction,
    path: str,
) -> tuple[Tensor, Tensor]:
    wide = reference.accumulation_dtype(z_pair)
    plain_ctx, plain = patched_linear(z_pair, weight, bias=bias, out_dtype=wide, path=path).chunk(2)
    u = plain_ctx - plain
    y = add_low_rank(plain, z_pair[len(u) :], u, v, out_dtype=z_pair.dtype)
    return torch.cat([plain_ctx.to(z_pair.dtype), y]), u


def _is_native_gemv(z: Tensor, weight: Tensor, *_: Any, path: str, **__: Any) -> bool:
    return path == GEMV and 1 in weight.stride()


_patched_linear = Op(
    "patched_linear",
    check_patched_linear,
    _reference_patched_linear,
    native_if=_is_native_gemv,
    triton_if=lambda z, weight, u, *_, path: (
        path == GEMV and (u is None or u.dim() < 3 or u.shape[1] <= _TRITON_RANKS)
    ),
    triton=lambda kernels, *args, path: kernels.patched_linear(*args),
)
_record_linear = Op(
    "record_linear",
    check_record_linear,
    _reference_record_linear,
    native_if=_is_native_gemv,
    triton_if=lambda *_, direction, path: path == GEMV and direction.coeff is not None,
    triton=lambda kernels, z_pair, weight, v, bias, direction, path: kernels.record_linears(
        z_pair, [weight], [bias], direction.coeff
    ),
)
_add_low_rank = Op(
    "add_low_rank",
    check_add_low_rank,
    lambda y, z, u, v, index, out_dtype: reference.add_low_rank(
        y, z, u, v, index, out_dtype or y.dtype
    ),
    # it would raise an error for the fp64 factors of every block of an exact step
    native_if=lambda y, z, u, *_: u.dtype != torch.float64,
    triton_if=lambda y, z, u, *_: u.dim() < 3 or 1 <= u.shape[1] <= _TRITON_RANKS,
)


def _empty_outputs(z: Tensor, weights: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [z.new_empty((len(z), len(weight))) for weight in weights]


def _empty_recorded(z_pair: Tensor, weights: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [
        z_pair.new_empty((len(z_pair) // parts, len(weight)), dtype=dtype)
        for weight in weights
        for parts, dtype in ((1, z_pair.dtype), (2, torch.float32))
    ]


# Programs of decode steps call these for several maps of one input.
native.op("linear_maps", _empty_outputs)
native.op("record_linears", _empty_recorded)
