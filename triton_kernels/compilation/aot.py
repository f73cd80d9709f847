"""Compiling a described launch ahead of time, without the GPU, and the resources that it takes."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from icl_patch.kernels.runtime.launching import Launch

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024}
"""Bytes of shared memory that one program can have, by compute capability; 99 KB on others."""

TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
TYPES |= {getattr(torch, f"int{bits}"): f"i{bits}" for bits in (8, 16, 32, 64)}


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


def signature_of(
    kernel: Any, arguments: tuple
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list]]:
    """Types, constants and divisibility of the arguments, as the launch itself would specialise
    them.
    """
    signature, constants, attributes = {}, {}, {}
    for parameter, value in zip(kernel.params, arguments, strict=True):
        place = (parameter.num,)
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[place] = "constexpr", value
        elif isinstance(value, torch.dtype):
            signature[parameter.name], attributes[place] = (
                f"*{TYPES[value]}",
                [["tt.divisibility", 16]],
            )
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[place] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_ahead(launch: Launch, capability: int) -> Any:
    """Compile for compute capability ``capability`` (80, 90, …): Triton's compiled kernel, with its
    ``metadata`` and ``asm``.
    """
    source = ASTSource(launch.kernel, *signature_of(launch.kernel, launch.arguments))
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


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
