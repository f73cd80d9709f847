"""One launch of every kernel and every configuration in the data files, on tensors without storage,
to compile ahead of time.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from icl_patch.activations import ACTIVATIONS
from icl_patch.kernels.ops.coefficients import plan_coefficients
from icl_patch.kernels.ops.direction import plan_direction
from icl_patch.kernels.ops.experts import plan_experts
from icl_patch.kernels.ops.gated_product import plan_gated
from icl_patch.kernels.ops.linear import plan_linear
from icl_patch.kernels.ops.low_rank import plan_low_rank
from icl_patch.kernels.ops.norms import plan_norm_pair, plan_rms_norm
from icl_patch.kernels.runtime.config import GEMV, Config, TunedConfig, data_files
from icl_patch.kernels.runtime.launching import Launch

# By name: rank, rows for the paths "gemv" and "gemm"; where a rank is not given there is no patch.
VARIANTS = {
    "plain": (0, 1, 64),
    "rank 1": (1, 1, 64),
    "rank 1, 16 rows": (1, 16, None),
    "rank 4, 4 rows": (4, 4, None),
    "rank 16, pool": (16, 4, 64),
    "recording": (None, 16, 64),
    "recording a pair": (None, 16, 64),
    "Conv1D": (1, 4, 64),
}

NARROW = 4096
"""Up to so many outputs K is worth splitting over programs."""


def _empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def linear_launch(
    config: Config,
    dtype: torch.dtype,
    size: tuple[int, int],
    rank: int | None,
    rows: int,
    variant: str = "",
) -> Launch:
    """A linear map of ``rows`` with a weight of ``size`` (N, K) and patches of a rank (of None, it
    is recorded), with the further features of one of the VARIANTS.
    """
    n, k = size
    weight = _empty(k, n, dtype=dtype).T if variant == "Conv1D" else _empty(n, k, dtype=dtype)
    if rank is None:
        z, second = _empty(2 * rows, k, dtype=dtype), weight if "pair" in variant else None
        return plan_linear(
            z, weight, None, None, None, None, dtype, config, record=True, second=second
        )
    z = _empty(rows, k, dtype=dtype)
    if not rank:
        return plan_linear(z, weight, None, None, None, None, dtype, config)
    index = _empty(rows, dtype=torch.int64) if "pool" in variant else None
    bias = _empty(n, dtype=dtype) if variant else None
    u, v = _empty(rows, rank, n), _empty(rows, rank, k)
    return plan_linear(z, weight, u, v, bias, index, dtype, config)


def entry_launches(entry: TunedConfig, capability: int) -> Iterator[tuple[str, Launch]]:
    """The VARIANTS of an entry of a data file, for a GPU of the compute capability, by name."""
    dtype, size = getattr(torch, entry.dtype), (min(entry.max_n or 21504, 21504), 5376)
    config = entry.config.for_capability(capability)
    for variant, (rank, gemv_rows, gemm_rows) in VARIANTS.items():
        rows = gemv_rows if entry.path == GEMV else gemm_rows
        if rows is not None:
            yield variant, linear_launch(config, dtype, size, rank, rows, variant)
    if entry.path == GEMV and size[0] <= NARROW:
        split = replace(entry.config, splits=4, pdl=True).for_capability(capability)
        for variant, rank, rows in (("rank 1", 1, 1), ("recording", None, 16)):
            yield f"{variant}, 4 splits", linear_launch(split, dtype, size, rank, rows, variant)


def launches(capability: int = 80) -> Iterator[tuple[str, Launch]]:
    """Every launch, by name: of the linear kernels and of the experts' in every configuration for
    GPUs of the compute capability (those of both fp16 and bf16 in bf16 only), then of the others.
    """
    seen = set()
    for file, entries in data_files(capability).items():
        for entry in entries:
            size = "" if entry.max_n is None else f" N ≤ {entry.max_n}"
            key = (entry.path, entry.dtype.replace("bfloat", "float"), entry.config)
            if key not in seen:
                seen.add(key)
                for variant, launch in entry_launches(entry, capability):
                    yield f"{file}: {entry.path} {entry.dtype}{size}, {variant}", launch
            if entry.path == GEMV and entry.dtype != "float16":
                yield f"{file}: {entry.dtype}{size}, experts", _expert_launch(entry)
    yield from other_launches()


def _expert_launch(entry: TunedConfig) -> Launch:
    """For few rows, as in a decode step: 8 of 128 experts per row."""
    dtype, n, k = getattr(torch, entry.dtype), min(entry.max_n or 21504, 21504), 5376
    x, weight = _empty(3, k, dtype=dtype), _empty(128, n, k, dtype=dtype)
    expert, bias = _empty(3, 8, dtype=torch.int64), _empty(128, n, dtype=dtype)
    return plan_experts(x, weight, expert, bias, torch.float32, entry.config)


def other_launches() -> Iterator[tuple[str, Launch]]:
    """The kernels without a configuration, for rows of 5376 and 21504 elements."""
    dtype = torch.bfloat16
    for width in (5376, 21504):
        z, wide = _empty(4, width, dtype=dtype), _empty(4, width)
        yield f"coefficients K = {width}", plan_coefficients(z, _empty(4, 16, width), None)
        yield f"direction K = {width}", plan_direction(z)
        yield f"add_low_rank N = {width}", plan_low_rank(wide, _empty(4, 1, width), None, dtype)
    d = 5376
    pair, z, wide = _empty(8, d, dtype=dtype), _empty(4, d, dtype=dtype), _empty(4, d)
    for name, offset, cast_first in (("Llama", 0.0, True), ("Gemma", 1.0, False)):
        yield (
            f"norm_pair {name}",
            plan_norm_pair(pair, _empty(d, dtype=dtype), 1e-6, offset, cast_first),
        )
        yield f"rms_norm {name}", plan_rms_norm(z, wide, 1e-6, offset, cast_first)
    for activation in ACTIVATIONS:
        yield f"gated_product {activation}", plan_gated(z, z, activation)
