"""Print what every CUDA kernel of the native library takes, as the compiler reported it; exit 1 if one of them spills registers."""

import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

LOG = Path(__file__).parent.parent / "build" / "native" / "cuda.o.log"
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?",
    re.S,
)


def demangled(name: str) -> str:
    """The kernel's name and template arguments."""
    full = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout
    return re.sub(r"void |\(anonymous namespace\)::|icl_patch::|cuda::|\([^()]*\)$|\((?:int|bool)\)", "", full.strip())


def main() -> int:
    """The table, on stdout."""
    if not LOG.exists():
        print("no CUDA kernels were compiled here: there is no nvcc, or ICL_PATCH_NATIVE says so")
        return 0
    kernels = [match.groupdict("0") for match in KERNEL.finditer(LOG.read_text(encoding="utf-8"))]
    if not kernels:
        print(f"expected the compiler's report in {LOG}, found no kernel there", file=sys.stderr)
        return 1
    table = Table(
        "kernel", "architecture", *(f"{what} (bytes)" for what in ("spill stores", "spill loads", "stack", "shared")), "registers"
    )
    for kernel in kernels:
        numbers = [kernel[key] for key in ("stores", "loads", "stack", "shared", "registers")]
        table.add_row(demangled(kernel["name"]), kernel["architecture"], *numbers)
    Console(width=140).print(table)
    spilling = sum(kernel["stores"] != "0" or kernel["loads"] != "0" for kernel in kernels)
    if spilling:
        print(f"{spilling} of {len(kernels)} kernels spill registers, expected none", file=sys.stderr)
    return int(spilling > 0)


if __name__ == "__main__":
    sys.exit(main())
