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
from icl_patch.kernels.runtime.config import GEMV, TunedConfig, data_files
from icl_patch.kernels.runtime.launching import Launch

# Name, rank, rows for the paths "gemv" and "gemm"; where a rank is not given there is no patch.
VARIANTS = (
    ("plain", 0, 1, 64),
    ("rank 1", 1, 1, 64),
    ("rank 1, 16 rows", 1, 16, None),
    ("rank 4, 4 rows", 4, 4, None),
    ("rank 16, pool", 16, 4, 64),
    ("three maps", 1, 4, 64),
    ("recording", None, 16, 64),
    ("recording a pair", None, 16, 64),
    ("Conv1D", 1, 4, 64),
)

NARROW = 4096
"""Up to so many outputs K is worth splitting over programs."""


def _empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def linear_launch(entry: TunedConfig, variant: str, rank: int | None, rows: int) -> Launch:
    """One of the VARIANTS at a shape of the entry's class."""
    dtype, config = getattr(torch, entry.dtype), entry.config
    n, k = min(entry.max_n or 21504, 21504), 5376
    weight = _empty(k, n, dtype=dtype).T if variant == "Conv1D" else _empty(n, k, dtype=dtype)
    if rank is None:
        return plan_linear(
            _empty(2 * rows, k, dtype=dtype),
            weight,
            None,
            None,
            None,
            None,
            dtype,
            config,
            record=True,
            others=(weight,) if "pair" in variant else (),
        )
    z = _empty(rows, k, dtype=dtype)
    if not rank:
        return plan_linear(z, weight, None, None, None, None, dtype, config)
    index = _empty(rows, dtype=torch.int64) if "pool" in variant else None
    return plan_linear(
        z,
        weight,
        _empty(rows, rank, n),
        _empty(rows, rank, k),
        _empty(n, dtype=dtype),
        index,
        dtype,
        config,
        others=(weight, weight) if "maps" in variant else (),
    )


def linear_launches(capability: int | None = None) -> Iterator[tuple[str, Launch]]:
    """The VARIANTS in every configuration (for GPUs of the compute capability); those of both fp16
    and bf16 in bf16 only.
    """
    seen = set()
    for file, entries in data_files(capability).items():
        for entry in entries:
            key = (entry.path, entry.dtype.replace("bfloat", "float"), entry.config)
            if key in seen:
                continue
            seen.add(key)
            size = "" if entry.max_n is None else f" N ≤ {entry.max_n}"
            name = f"{file}: {entry.path} {entry.dtype}{size}"
            served = replace(entry, config=entry.config.for_capability(capability or 80))
            for variant, rank, gemv_rows, gemm_rows in VARIANTS:
                rows = gemv_rows if entry.path == GEMV else gemm_rows
                if rows is not None:
                    yield f"{name}, {variant}", linear_launch(served, variant, rank, rows)
            if entry.path == GEMV and (entry.max_n or NARROW + 1) <= NARROW:
                config = replace(entry.config, splits=4, pdl=True)
                split = replace(entry, config=config.for_capability(capability or 80))
                yield f"{name}, rank 1, 4 splits", linear_launch(split, "rank 1", 1, 1)
                yield f"{name}, recording, 4 splits", linear_launch(split, "recording", None, 16)


def expert_launches(capability: int | None = None) -> Iterator[tuple[str, Launch]]:
    """The experts' products in every configuration for few rows, as in a decode step: 8 of 128
    experts per row.
    """
    for file, entries in data_files(capability).items():
        for entry in entries:
            if entry.path == GEMV and entry.dtype != "float16":
                dtype, n, k = (
                    getattr(torch, entry.dtype),
                    min(entry.max_n or 21504, 21504),
                    5376,
                )
                x, weight, expert = (
                    _empty(3, k, dtype=dtype),
                    _empty(128, n, k, dtype=dtype),
                    _empty(3, 8, dtype=torch.int64),
                )
                size = "" if entry.max_n is None else f" N ≤ {entry.max_n}"
                name = f"{file}: {entry.dtype}{size}, experts"
                yield (
                    name,
                    plan_experts(
                        x, weight, expert, _empty(128, n, dtype=dtype), torch.float32, entry.config
                    ),
                )


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
