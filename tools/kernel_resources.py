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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from icl_patch.kernels import compilation

LOG = Path(__file__).parent.parent / "build" / "native" / "cuda.o.log"
KERNEL = re.compile(
    r"Compiling entry function '(?:void )?(?P<name>.+?)(?:\([^()]*\))?' for"
    r" '(?P<architecture>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes"
    r" spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?",
    re.S,
)
CAPABILITIES = (80, 90, 100)
Row = tuple[str, str, list[str], str]  # kernel, architecture, bytes and registers, its problem
SOURCE = Path(__file__).parent.parent / "csrc" / "cuda" / "rmsnorm_inverse.cu"


def later_report() -> str:
    """The compiler's report on the CUDA kernels for sm_100; nothing if it does not know sm_100."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    if "sm_100" not in known.stdout.split():
        return ""
    flags = ["-std=c++17", "-O3", "-fmad=false", "-Xptxas=-v", f"-I{SOURCE.parents[1]}"]
    command = [nvcc, *flags, "-cubin", "-arch=sm_100", "-o", os.devnull, str(SOURCE)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def cuda_kernels() -> Iterator[Row]:
    """The kernels of the library's build, and for sm_100."""
    if not LOG.exists():
        print("no CUDA kernels were compiled here: there is no nvcc, or ICL_PATCH_NATIVE says so")
        return
    log = LOG.read_text(encoding="utf-8") + later_report()
    named = subprocess.run(["c++filt"], input=log, capture_output=True, text=True, check=True)
    report = re.sub(r"\((anonymous namespace|int|bool)\)(::)?|icl_patch::|cuda::", "", named.stdout)
    kernels = [match.groupdict("0") for match in KERNEL.finditer(report)]
    if not kernels:
        sys.exit(f"expected the compiler's report in {LOG}, found no kernel there")
    for kernel in kernels:
        numbers = [kernel[key] for key in ("stores", "loads", "stack", "shared", "registers")]
        problem = "" if numbers[:2] == ["0", "0"] else "spills registers"
        yield kernel["name"], kernel["architecture"], numbers, problem


@functools.cache
def launches(capability: int) -> dict[str, Any]:
    """The Triton kernels' launches by name, in every configuration."""
    return dict(compilation.launches(capability))


def compiled(job: tuple[int, str]) -> Row:
    """A launch, by capability and name."""
    capability, name = job
    found = compilation.resources(launches(capability)[name], capability)
    numbers = (found.spill_stores, found.spill_loads, found.stack, found.shared, found.registers)
    return name, f"sm_{capability}", [*map(str, numbers)], found.problem(capability) or ""


def triton_kernels() -> Iterator[Row]:
    """Compiled by as many processes as there are processors."""
    jobs = [(capability, name) for capability in CAPABILITIES for name in launches(capability)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield from pool.map(compiled, jobs)


def main() -> None:
    """The table, on stdout; on stderr the problems, with the exit status 1."""
    columns = ("kernel", "for", "spill stores", "spill loads", "stack", "shared", "registers")
    table, problems = Table(*columns, title="bytes"), []
    for name, architecture, numbers, problem in (*cuda_kernels(), *triton_kernels()):
        table.add_row(name, architecture, *numbers)
        if problem:
            problems.append(f"{name} for {architecture} {problem}")
    Console(width=140).print(table)
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
