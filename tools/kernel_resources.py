"""Print the resources of every kernel, as its compiler reported them; exit 1 if one spills
registers or does not fit.

CUDA kernels come from the log of the native library's build, and are compiled here for sm_100,
which the library holds as PTX. Triton kernels are compiled here, ahead of time, in every
configuration of the data files; no GPU is needed.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LOG = Path(__file__).parent.parent / "build" / "native" / "cuda.o.log"
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes"
    r" spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?",
    re.S,
)
CAPABILITIES = (80, 90, 100)
SOURCE = Path(__file__).parent.parent / "csrc" / "cuda" / "rmsnorm_inverse.cu"


def demangled(name: str) -> str:
    """The kernel's name and template arguments."""
    full = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout
    return re.sub(
        r"void |\(anonymous namespace\)::|icl_patch::|cuda::|\([^()]*\)$|\((?:int|bool)\)",
        "",
        full.strip(),
    )


def empty_table(title: str) -> Table:
    """The columns that both kinds share."""
    return Table(
        "kernel",
        "for",
        "spill stores",
        "spill loads",
        "stack",
        "shared",
        "registers",
        title=f"{title} (bytes)",
    )


def later_report() -> str:
    """The compiler's report on the CUDA kernels for sm_100; nothing if it does not know sm_100."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    if "sm_100" not in known.stdout.split():
        return ""
    flags = ["-std=c++17", "-O3", "-fmad=false", "-Xptxas=-v", f"-I{SOURCE.parents[1]}"]
    command = [nvcc, *flags, "-cubin", "-arch=sm_100", "-o", os.devnull, str(SOURCE)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def cuda_kernels(console: Console) -> list[str]:
    """Their table, and a line for each kernel with a problem."""
    if not LOG.exists():
        console.print(
            "no CUDA kernels were compiled here: there is no nvcc, or ICL_PATCH_NATIVE says so"
        )
        return []
    report = LOG.read_text(encoding="utf-8") + later_report()
    kernels = [match.groupdict("0") for match in KERNEL.finditer(report)]
    if not kernels:
        return [f"expected the compiler's report in {LOG}, found no kernel there"]
    table = empty_table("CUDA")
    for kernel in kernels:
        numbers = [kernel[key] for key in ("stores", "loads", "stack", "shared", "registers")]
        table.add_row(demangled(kernel["name"]), kernel["architecture"], *numbers)
    console.print(table)
    spilling = [kernel for kernel in kernels if kernel["stores"] != "0" or kernel["loads"] != "0"]
    return [
        f"{demangled(kernel['name'])} for {kernel['architecture']} spills registers"
        for kernel in spilling
    ]


@functools.cache
def launches(capability: int) -> list[tuple[str, Any]]:
    """The Triton kernels' launches by name, in every configuration."""
    from icl_patch.kernels import compilation

    return list(compilation.launches(capability))


def compiled(job: tuple[int, int]) -> tuple[str, str | None, list[str]]:
    """The name of a launch, its problem and its row in the table, by capability and number."""
    from icl_patch.kernels import compilation

    capability, number = job
    name, launch = launches(capability)[number]
    found = compilation.resources(launch, capability)
    numbers = (found.spill_stores, found.spill_loads, found.stack, found.shared, found.registers)
    row = [name, f"sm_{capability}", *map(str, numbers)]
    return f"{name} for sm_{capability}", found.problem(capability), row


def triton_kernels(console: Console) -> list[str]:
    """The same for the Triton kernels, compiled by as many processes as there are processors."""
    if find_spec("triton") is None:
        console.print("no Triton kernels were compiled here: triton is not installed")
        return []
    table = empty_table("Triton")
    problems = []
    jobs = [
        (capability, number)
        for capability in CAPABILITIES
        for number in range(len(launches(capability)))
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for name, problem, row in pool.map(compiled, jobs):
            table.add_row(*row)
            if problem:
                problems.append(f"{name} {problem}")
    console.print(table)
    return problems


def main() -> int:
    """The tables, on stdout."""
    console = Console(width=140)
    problems = cuda_kernels(console) + triton_kernels(console)
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
