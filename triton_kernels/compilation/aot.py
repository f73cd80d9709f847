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
