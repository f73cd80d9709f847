"""Print an estimate, from the SASS of sm_90, of the memory bandwidth that ``patched_linear`` draws
on an H100 for one row of rank 1 at the headline shapes. Nothing here is measured.

It counts 16-byte copies to shared memory, chains of matrix instructions that do not wait for each
other, bytes of the weight that are in flight, and programs on 132 SMs. The bandwidth is the
smallest of three: a copy's (3.0 TB/s); the limit by the bytes in flight at the memory's latency
(2.3 MB reach the full bandwidth); and the limit by the longest chain of each step. The time is that
of a launch, 2.5 µs, and of reading at 0.93 of this bandwidth.

Weights of few outputs are listed with K split over programs too, gate and up recorded apart and in
one launch, and q, k and v apart and in one launch.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

SHAPES = (  # (N, K), ranges of K, and how: rank 1, recording one map or a pair, or plain q, k and v
    (1152, 6912, 1, ""),
    (1152, 6912, 2, ""),
    (1152, 6912, 4, ""),
    (6912, 1152, 1, ""),
    (6912, 1152, 1, "recording"),
    (6912, 1152, 1, "recording a pair"),
    (2560, 10240, 1, ""),
    (2560, 10240, 2, ""),
    (4096, 14336, 1, ""),
    (14336, 4096, 1, ""),
    (256, 1152, 1, ""),
    (256, 1152, 4, ""),
    (2048, 1152, 1, ""),
    (2048, 1152, 1, "with k and v of 256"),
    (1024, 3072, 1, ""),
    (1024, 3072, 4, ""),
    (262144, 1152, 1, ""),
)
SMS, SHARED, REGISTERS = 132, 227 * 1024, 65536
COPY, CLOCK, NEEDED = 3.0e12, 1.755e9, 2.3e6  # bytes a second, cycles a second, bytes in flight
LAUNCH, REACHED = 2.5e-6, 0.93
MMA_CYCLES, STEP_CYCLES = 33, 120  # of an instruction that waits for the one before; of a barrier

_MMA = re.compile(r"\b(HG?MMA)\.\S+ R(\d+), .*?R(\d+)(?:, gsb0)? ;")
_WRITE = re.compile(r"/\*\w{4}\*/\s+(?:@!?U?P\d+ )?([A-Z]\S*) R(\d+)")


def chains(sass: str) -> list[int]:
    """The lengths of the chains of matrix instructions, each of which adds to the sum of the one
    before.
    """
    lengths: list[int] = []
    holder: dict[int, int] = {}  # of a running sum: its first register, and its chain
    for line in sass.splitlines():
        if found := _MMA.search(line):
            into, added = int(found[2]), int(found[3])
            if added not in holder:
                holder[added] = len(lengths)
                lengths.append(0)
            chain = holder.pop(added)
            lengths[chain] += 1
            holder[into] = chain
        elif found := _WRITE.search(line):
            for register in range(int(found[2]) - 3, int(found[2]) + 4):
                if register == int(found[2]) or "LDSM" in found[1]:
                    holder.pop(register, None)
    return lengths


@dataclass(frozen=True)
class Estimate:
    """One kernel: copies of 16 bytes and of any size, lengths of the chains of a warp, programs,
    how many of them fit on an SM, bytes of the weight in a step, steps in flight, and N · K · 2.
    """

    wide: int
    copies: int
    lengths: list[int]
    programs: int
    resident: int
    step: int
    ahead: int
    nbytes: int

    @property
    def in_flight(self) -> int:
        """Bytes of the weight that are asked for at a time, on all SMs."""
        return min(self.programs, self.resident * SMS) * self.step * self.ahead

    @property
    def share(self) -> float:
        """Of a copy's bandwidth."""
        running = min(self.programs, self.resident * SMS)
        cycles = max(self.lengths, default=0) * MMA_CYCLES + STEP_CYCLES
        computed = running * self.step * CLOCK / cycles
        bandwidth = min(COPY, COPY * self.in_flight / NEEDED, computed)
        seconds = LAUNCH + self.nbytes / (REACHED * bandwidth)
        return self.nbytes / COPY / seconds


def disassembled(cubin: bytes, tool: str) -> str:
    """The SASS of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        return subprocess.run([tool, str(file)], capture_output=True, text=True, check=True).stdout


def estimate(n: int, k: int, tool: str, splits: int = 1, how: str = "") -> Estimate:
    """Of ``patched_linear`` in bf16 with the untuned configuration and K split into ranges, or of
    recording one map or a pair; or of the plain maps q, k and v in one launch.
    """
    from icl_patch.kernels.compilation import aot
    from icl_patch.kernels.ops.linear import plan_linear
    from icl_patch.kernels.runtime.config import GEMV, config_for

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    config = replace(config_for("", torch.bfloat16, n, GEMV), splits=splits)
    columns = max(k, 32 * config.block_k)  # a loop of few steps is unrolled: its chains look longer
    u, v = empty(1, 1, n, dtype=torch.float32), empty(1, 1, columns, dtype=torch.float32)
    weight, record = empty(n, columns), "recording" in how
    others = [empty(n, columns)] * ("pair" in how) + [empty(256, columns)] * 2 * ("k and v" in how)
    if record:
        operands = empty(2, columns), weight, None, None, None, None
    elif others:
        operands = empty(1, columns), weight, None, None, None, None
    else:
        operands = empty(1, columns), weight, u, v, None, None
    launch = plan_linear(*operands, torch.bfloat16, config, record=record, others=others)
    found = aot.resources(launch, 90)
    sass = disassembled(aot.compile_ahead(launch, 90).asm["cubin"], tool)
    copies = re.findall(r"LDGSTS\S*", sass)
    threads = 32 * config.num_warps
    steps = -(-k // (splits * config.block_k))  # of a program
    return Estimate(
        wide=sum(copy.endswith(".128") for copy in copies),
        copies=len(copies),
        lengths=chains(sass),
        programs=launch.programs,
        resident=min(SHARED // (found.shared + 1024), REGISTERS // (found.registers * threads)),
        step=config.block_n * config.block_k * 2,
        ahead=min(config.num_stages - 1, steps),
        nbytes=2 * k * sum(map(len, (weight, *others))),
    )


def disassembler() -> str | None:
    """``nvdisasm`` of Triton or of the CUDA toolkit."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    own = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(own) if own.exists() else shutil.which("nvdisasm")


def main() -> int:
    """The table, on stdout."""
    console, tool = Console(width=140), disassembler()
    if tool is None:
        console.print("no estimate of bandwidths: expected triton and nvdisasm, found none")
        return 0
    table = Table(
        "N × K",
        "ranges of K",
        "16-byte copies",
        "MMA chains a warp",
        "longest",
        "programs on 132 SMs",
        "in flight KB per SM",
        "of what is needed",
        "predicted share",
        title="patched_linear, bf16, one row, H100: an estimate from SASS, not measured",
    )
    for n, k, splits, how in SHAPES:
        found = estimate(n, k, tool, splits, how)
        table.add_row(
            f"{n} × {k}{', ' * bool(how)}{how}",
            str(splits),
            f"{found.wide} of {found.copies}",
            str(len(found.lengths)),
            str(max(found.lengths, default=0)),
            str(found.programs),
            f"{found.in_flight / SMS / 1e3:.1f}",
            f"{found.in_flight / NEEDED:.0%}",
            f"{found.share:.0%}",
        )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
