"""Prove on a real model that exact patches are exact: 5,000 tokens of real text and more in each
dtype, and 0 bits that differ.

    make real                                 # on SmolLM2-135M-Instruct
    make real MODEL=FOLDER                    # on another model
    build/python tools/real_steps.py FOLDER --short    # the short plan alone

The tokens come in 1, 3 and 8 rows, padded and not, after contexts of 20 to 4,000 tokens. Each token
is patched in three ways and replayed without its context (``tools/real_steps_run.py``). Part of the
patches are saved, and replayed from the file by another process. A short plan is then repeated with
other matrix products: with environment variables that make torch's libraries choose other kernels.

Every dtype, plan and environment runs in a process of its own; ``--jobs`` of them at a time. What a
process has measured is kept in ``build/real``, and a second call goes on with the rest. The exit
status is 0 if every bit is the same.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from icl_patch.bench.results import code_fingerprint, environment
from icl_patch.evaluation.report import table
from icl_patch.patch.atomic_file import write_atomically

HERE = Path(__file__).resolve().parent
PARTS = HERE.parent / "build" / "real"
DTYPES = ("float16", "float32", "bfloat16")  # the slowest first
LEAST = 5000  # tokens in each dtype
ROUNDINGS = 16  # limit of reader errors and corrections, in spacings of the dtype, as in verify
AS_IT_IS = "as it is"
ENVIRONMENTS = (
    "ATEN_CPU_CAPABILITY=avx2",
    "ATEN_CPU_CAPABILITY=default",
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "OMP_NUM_THREADS=2",
)
Counts = dict[str, Any]  # of one way, number of rows, dtype and environment


@dataclass(frozen=True)
class Part:
    """What one process measures: a plan of ``real_steps_run`` in a dtype and an environment."""

    dtype: str
    plan: str
    environment: str

    @property
    def name(self) -> str:
        """The name of its files."""
        return re.sub(r"\W+", "-", f"{self.dtype} {self.plan} {self.environment}")


def parts_of(short: bool) -> list[Part]:
    """Everything to measure, the longest first."""
    plans = ("short",) if short else ("8 rows", "3 rows", "1 row")
    full = [Part(dtype, plan, AS_IT_IS) for dtype in DTYPES for plan in plans]
    return full + [Part(dtype, "short", name) for name in ENVIRONMENTS for dtype in DTYPES]


def measured(part: Part, model: Path, folder: Path) -> list[Counts]:
    """The counts of a part, from its file or from a process that writes the file.

    Raises:
        RuntimeError: the process failed.
    """
    out, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    if not out.exists():
        further = [] if part.environment == AS_IT_IS else [part.environment.split("=")]
        with log.open("w") as file:
            done = subprocess.run(
                [sys.executable, HERE / "real_steps_run.py", model, part.dtype, part.plan, out],
                env={**os.environ, **dict(further)},
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-12:])
            raise RuntimeError(f"{part} ended with {done.returncode}, see {log}:\n{tail}")
    found = json.loads(out.read_text(encoding="utf-8"))
    return [{"dtype": part.dtype, "environment": part.environment, **each} for each in found]


def is_kept(counts: Counts) -> bool:
    """Whether everything promised holds: all bits, here and from files, with nothing but rounding
    to correct.
    """
    rounding = ROUNDINGS * torch.finfo(getattr(torch, counts["dtype"])).eps
    return (
        counts["reason"] is None
        and counts["tokens"] == counts["identical"] > 0
        and counts["saved"] == counts["saved_identical"]
        and counts["misses"] == 0
        and counts["reader_error"] <= rounding
        and counts["correction"] <= rounding
    )


def failures(results: Iterable[Counts], least: int) -> list[str]:
    """What is not as promised, a line each."""
    tokens: dict[str, int] = defaultdict(int)
    lines = []
    for counts in results:
        tokens[counts["dtype"]] += counts["tokens"] if counts["environment"] == AS_IT_IS else 0
        if not is_kept(counts):
            lines.append("not exact: " + json.dumps(counts))
    few = [f"{n} tokens in {dtype}, fewer than {least}" for dtype, n in tokens.items() if n < least]
    return lines + few


def rows_of_table(results: Iterable[Counts], by: str) -> list[list[str]]:
    """The sums of the counts with one dtype, way and value of ``by``."""
    sums: dict[tuple[str, ...], list[Counts]] = defaultdict(list)
    for counts in results:
        sums[counts["dtype"], counts["way"], str(counts[by])].append(counts)
    names = ("tokens", "identical", "same_token", "misses", "taken_twice", "saved")
    return [
        [
            *key,
            _range([n for each in group for n in (each["shortest"], each["longest"]) if n]),
            *(f"{sum(each[name] for each in group):,}" for name in names),
            f"{sum(each['saved_identical'] for each in group):,}",
            "; ".join(sorted({each["reason"] for each in group if each["reason"]})),
        ]
        for key, group in sorted(sums.items())
    ]


def _range(lengths: list[int]) -> str:
    return f"{min(lengths)} to {max(lengths)}" if lengths else "-"


def show(results: list[Counts]) -> None:
    """Print the tables by rows and by environment."""
    columns = (
        "contexts", "tokens", "bit-identical", "same token", "misses", "taken twice", "from files",
        "bit-identical", "refused",
    )  # fmt: skip
    here = [counts for counts in results if counts["environment"] == AS_IT_IS]
    others = [counts for counts in results if counts["environment"] != AS_IT_IS]
    console = Console(width=None if sys.stdout.isatty() else 150)
    for title, chosen, by in (
        ("Replays beside the unmodified model, by rows", here, "rows"),
        ("In other environments", others, "environment"),
    ):
        rows = rows_of_table(chosen, by)
        console.print(table(title, ("dtype", "way", by, *columns), rows))


def weights_hash(model: Path) -> str:
    """SHA-256 of a model's files."""
    content = hashlib.sha256()
    for path in sorted(path for path in model.iterdir() if path.is_file()):
        with path.open("rb") as file:
            content.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return content.hexdigest()


def machine() -> dict[str, Any]:
    """The machine and the versions that the counts come from."""
    return environment(torch.device("cpu")) | {"transformers": version("transformers")}


def parts_folder(model: Path) -> Path:
    """Where the parts are kept: of these weights, this code and this machine."""
    sources = (path.read_bytes() for path in sorted(HERE.glob("real_*.py")))
    key = [weights_hash(model), code_fingerprint(), json.dumps(machine()), *map(str, sources)]
    folder = PARTS / hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the tables and write the counts; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder with a model and its tokenizer")
    parser.add_argument("--short", action="store_true", help="the short plan only")
    parser.add_argument("--out", type=Path, help="the file for the counts, as JSON")
    threads = torch.get_num_threads()
    jobs = max(1, len(os.sched_getaffinity(0)) // threads)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes at a time")
    options = parser.parse_args(arguments)
    if not (options.model / "config.json").is_file():
        parser.error(f"expected a folder with a model, got {options.model} without a config.json")
    folder, parts = parts_folder(options.model), parts_of(options.short)
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(measured, part, options.model, folder) for part in parts]
        try:
            for number, done in enumerate(as_completed(running), 1):
                name, state = (
                    parts[running.index(done)].name,
                    "failed" if done.exception() else "done",
                )
                print(f"{number} of {len(parts)} {state}: {name}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    broken = [str(done.exception()) for done in running if done.exception()]
    counts = [each for done in running if not done.exception() for each in done.result()]
    show(counts)
    if options.out is not None and not broken:
        content = {"model": options.model.resolve().name, "machine": machine(), "counts": counts}
        write_atomically(options.out, [(json.dumps(content, indent=1) + "\n").encode()])
    wrong = broken + failures(counts, 0 if options.short else LEAST)
    print("\n".join(wrong) or "0 bits differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
