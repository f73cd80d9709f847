"""The CUDA driver of :func:`icl_patch.ops.record_norm` where there is no GPU, on random rows, and
the rows that a replay of its patch gives.
"""

import ctypes
from typing import Any

import torch
from support.compiled import DTYPES, address, apart, compiled
from support.numeric import normal, seeded
from torch import Tensor

from icl_patch import ops
from icl_patch.ops import Direction, NormRecord

PLENTY = 1 << 18  # bytes of shared memory
EPS = 1e-6
FORMS = {"llama": (0.0, True), "gemma": (1.0, False)}  # scale_offset, cast_first


def random_rows(rows: int, d: int, k: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """y_pair and delta in fp32, h and the weight in ``dtype``. If there are several rows, delta is
    0 in the first and h in the second, and y has a NaN in the last.
    """
    rng = seeded(d)
    y_pair, delta = normal(rng, 2 * rows, d).float(), normal(rng, rows, d).float()
    h, weight = normal(rng, rows, k, dtype=dtype), normal(rng, d, dtype=dtype)
    weight[d // 3] = 0
    if rows > 2:
        delta[0], h[1], y_pair[-1, d // 2] = 0, 0, torch.nan
    return y_pair, h, delta, weight


def replayed(given: tuple[Tensor, ...], found: NormRecord, form: str) -> Tensor:
    """y_pair of the unpatched module and of a replay, by the ops that they call."""
    y_pair, h, _, weight = given
    offset, cast_first = FORMS[form]
    context, plain = y_pair.chunk(2)
    y = ops.add_low_rank(plain, h, found.u, found.direction.v, out_dtype=weight.dtype)
    context = ops.rms_norm(
        context.to(weight.dtype), weight, EPS, scale_offset=offset, cast_first=cast_first
    )
    return torch.cat([context, ops.rms_norm(y, found.new_scale, EPS, cast_first=cast_first)])


def on_fibers(
    given: tuple[Tensor, ...], form: str, *, shared_memory: int = PLENTY, column: int = 1
) -> NormRecord:
    """The kernel's results; outputs start as NaN, and so do the places between numbers."""
    library: Any = compiled("cuda_on_cpu", "-O1", "-ffp-contract=off")
    library.record_norm.restype = ctypes.c_char_p
    y_pair, h, _, weight = given
    (rows, k), d = h.shape, len(weight)
    offset, cast_first = FORMS[form]
    y = torch.full_like(y_pair, torch.nan, dtype=weight.dtype)
    sizes = ((rows, d), (rows, k), (rows,), (rows, d))
    u, v, inverse_norm2, new_scale = (torch.full(size, torch.nan) for size in sizes)
    status = torch.full((rows,), 99, dtype=torch.int8)
    inputs = [apart(x, column) for x in given]
    error = library.record_norm(
        *map(ctypes.c_int64, (rows, d, k)),
        ctypes.c_int(DTYPES.index(weight.dtype)),
        ctypes.c_int64(column),
        *map(address, inputs),
        ctypes.c_double(EPS),
        ctypes.c_float(offset),
        ctypes.c_bool(cast_first),
        ctypes.c_int(shared_memory),
        *map(address, (y, u, v, inverse_norm2, new_scale, status)),
    )
    assert error is None
    return NormRecord(y, u, Direction(v, inverse_norm2), new_scale, status)
