"""Compiling launches ahead of time, without the GPU and on tensors without storage: the resources
that they take, and a launch of every kernel in every configuration of the data files.
"""

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from icl_patch.activation_functions import ACTIVATIONS
from icl_patch.kernels.ops.attention import plan_blocks
from icl_patch.kernels.ops.coefficients import plan_coefficients
from icl_patch.kernels.ops.direction import plan_direction
from icl_patch.kernels.ops.experts import plan_experts
from icl_patch.kernels.ops.gated_product import plan_gated
from icl_patch.kernels.ops.linear import plan_linear, sums_coefficients
from icl_patch.kernels.ops.low_rank import plan_low_rank
from icl_patch.kernels.ops.norms import plan_norm_pair, plan_rms_norm
from icl_patch.kernels.ops.rotary import plan_rotary
from icl_patch.kernels.runtime.config import Config, TunedConfig, data_files
from icl_patch.kernels.runtime.launching import Launch

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024}
"""Bytes of shared memory that one program can have, by compute capability; 99 KB on others."""


@dataclass(frozen=True)
class Resources:
    """The report of ``ptxas`` and Triton on one kernel: registers per thread; bytes of spills,
    stack and shared memory.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int

    def problem(self, capability: int) -> str | None:
        """Why the kernel should not be used, or None: spills, or too much shared memory."""
        if self.spill_stores or self.spill_loads:
            return "spills registers"
        limit = SHARED_MEMORY.get(capability, 99 * 1024)
        return (
            f"takes {self.shared} bytes of shared memory, there are {limit}"
            if self.shared > limit
            else None
        )


class _Target:
    """A driver that tells Triton's compiler which GPU to compile for, without touching one."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        # kernels are kept by device: those for another target are others
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_ahead(launch: Launch, capability: int) -> Any:
    """Compile for compute capability ``capability`` (80, 90, …), as the launch itself would, into
    Triton's cache on disk, where it will find it. No other thread may launch meanwhile.

    Returns:
        Triton's compiled kernel, with its ``metadata`` and ``asm``.
    """
    driver = triton.runtime.driver
    driver.set_active(_Target(capability))
    try:
        return launch.kernel.warmup(*launch.arguments, grid=(launch.programs,), **launch.options)
    finally:
        if torch.cuda.is_available():  # else there is no driver to go back to
            driver.reset_active()


def resources(launch: Launch, capability: int) -> Resources:
    """Compile, assemble with Triton's own ``ptxas`` and read its report."""
    compiled = compile_ahead(launch, capability)
    architecture = re.search(r"\.target (sm_\w+)", compiled.asm["ptx"])
    assert architecture is not None
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        command = [
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name={architecture[1]}",
            str(ptx),
            "-o",
            str(Path(folder, "kernel.cubin")),
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*Used (\d+)"
        r" registers",
        report,
        re.S,
    )
    assert found is not None, report
    stack, stores, loads, registers = map(int, found.groups())
    return Resources(registers, stores, loads, stack, compiled.metadata.shared)


# By name: rank and rows; where a rank is not given there is no patch.
VARIANTS = {
    "plain": (0, 1),
    "three maps": (0, 16),
    "rank 1": (1, 1),
    "rank 1, 16 rows": (1, 16),
    "rank 1, 32 rows": (1, 32),
    "rank 2, 16 rows": (2, 16),  # most shared memory, where a program sums 32 coefficients
    "rank 4, 4 rows": (4, 4),
    "rank 16, pool": (16, 4),
    "recording": (None, 16),
    "recording a pair": (None, 16),
    "Conv1D": (1, 4),
}


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
        further = [weight] if "pair" in variant else []
        z = _empty(2 * rows, k, dtype=dtype)
        return plan_linear(z, weight, dtype, config, record=True, further=further)
    z = _empty(rows, k, dtype=dtype)
    if not rank:
        return plan_linear(z, weight, dtype, config, further=[weight] * 2 * ("maps" in variant))
    index = _empty(rows, dtype=torch.int64) if "pool" in variant else None
    bias = _empty(n, dtype=dtype) if variant else None
    u, v = _empty(rows, rank, n), _empty(rows, rank, k)
    return plan_linear(z, weight, dtype, config, u, v, bias, index)


def linear_launches(
    config: Config, dtype: torch.dtype, size: tuple[int, int], rank: int, rows: int
) -> Iterator[Launch]:
    """The launches of a patched map of a rank: coefficients, unless the map itself sums them."""
    if not sums_coefficients(config, rows, rank):
        k = size[1]
        yield plan_coefficients(_empty(rows, k, dtype=dtype), _empty(rows, rank, k), None)
    yield linear_launch(config, dtype, size, rank, rows)


def _of_entry(entry: TunedConfig, capability: int) -> Iterator[tuple[str, Launch]]:
    """The launches of an entry of a data file for a GPU of the compute capability, by variant."""
    dtype, size = getattr(torch, entry.dtype), (min(entry.max_n or 21504, 21504), 5376)
    config = entry.config
    for variant, (rank, rows) in VARIANTS.items():
        yield variant, linear_launch(config, dtype, size, rank, rows, variant)
    x, weight = _empty(3, size[1], dtype=dtype), _empty(128, *size, dtype=dtype)
    # few rows, as in a decode step: 8 of 128 experts each
    expert, bias = _empty(3, 8, dtype=torch.int64), _empty(128, size[0], dtype=dtype)
    yield "experts", plan_experts(x, weight, expert, bias, torch.float32, config)


def launches(capability: int = 80) -> Iterator[tuple[str, Launch]]:
    """Every launch, by name: of the linear kernels and of the experts' in every configuration for
    GPUs of the compute capability, then of the others, for rows of 576 to 21504 elements.
    """
    seen = set()
    for file, entries in data_files(capability).items():
        for entry in entries:
            # fp16 compiles as bf16 does
            key = entry.dtype.replace("bfloat", "float"), entry.max_n, entry.config
            if key in seen:
                continue
            seen.add(key)
            size = "" if entry.max_n is None else f" N ≤ {entry.max_n}"
            for variant, launch in _of_entry(entry, capability):
                yield f"{file}: linear {entry.dtype}{size}, {variant}", launch
    dtype, d = torch.bfloat16, 5376
    for width in (d, 21504):
        z, wide = _empty(4, width, dtype=dtype), _empty(4, width)
        yield f"coefficients K = {width}", plan_coefficients(z, _empty(4, 16, width), None)
        yield f"direction K = {width}", plan_direction(z)
        factor = _empty(4, 1, width)
        yield f"add_low_rank N = {width}", plan_low_rank(wide, factor, None, dtype)
        name = f"add_low_rank N = {width}, with coefficients"
        yield name, plan_low_rank(wide, factor, None, dtype, z, factor)
    for width in (576, 4096, d):
        pair, z, wide = (
            _empty(8, width, dtype=dtype),
            _empty(4, width, dtype=dtype),
            _empty(4, width),
        )
        for name, offset, cast_first in (("Llama", 0.0, True), ("Gemma", 1.0, False)):
            options = (1e-6, offset, cast_first)
            norm = plan_norm_pair(pair, _empty(width, dtype=dtype), *options)
            yield f"norm_pair {name}, d = {width}", norm
            yield f"rms_norm {name}, d = {width}", plan_rms_norm(z, wide, *options)
    for head, kind in itertools.product((64, 128, 256), (dtype, torch.float32)):
        # 16 and more heads of queries for one of keys take most registers
        query, keys = _empty(2, 48, head, dtype=kind), _empty(2, 2, 1024, head, dtype=kind)
        mask, slot = _empty(2, 1024, dtype=torch.bool), _empty(1, dtype=torch.int64)
        attend, add = plan_blocks(query, keys, keys, mask, 0.1, slot)
        yield f"decode_attention D = {head}, {str(kind).removeprefix('torch.')}", attend
        own = _empty(2, 2, head, dtype=kind), _empty(2, 2 * head, dtype=kind)
        attend, write = plan_blocks(query, keys, keys, mask, 0.1, slot, own)
        yield f"write_and_attend D = {head}, {str(kind).removeprefix('torch.')}", attend
        angles = _empty(1, 1, head, dtype=kind)
        rotary = plan_rotary(query.unsqueeze(2), keys[:, :, :1], angles, angles)
        yield f"rotary_embedding D = {head}, {str(kind).removeprefix('torch.')}", rotary
    yield "attention_pair, sum of blocks", add
    yield "write_and_attend, sum of blocks", write
    z = _empty(4, d, dtype=dtype)
    for activation in ACTIVATIONS:
        yield f"gated_product {activation}", plan_gated(z, z, activation)
