"""Timing side by side, and the tables that come of it."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import icl_patch
from icl_patch import native

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the rounds and the middle half's ends."""

    median: float
    low: float
    high: float


def compare(calls: Mapping[str, Call], device: torch.device, rounds: int = 15, least_seconds: float = 0.02) -> dict[str, Timing]:
    """Time calls side by side: every round times each of them once, so that what drifts, drifts for all.

    On the CPU a round repeats a call until ``least_seconds`` have passed and takes the mean, with warm caches. On a GPU it is one call
    between two events with L2 overwritten before it.
    """
    for call in calls.values():
        call()
    seconds = _device_seconds(device) if device.type == "cuda" else lambda call: _host_seconds(call, least_seconds)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(seconds(call))
    return {name: _summary(values) for name, values in samples.items()}


def _host_seconds(call: Call, least: float) -> float:
    calls, start = 0, time.perf_counter()
    while not calls or time.perf_counter() - start < least:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls


def _device_seconds(device: torch.device) -> Callable[[Call], float]:
    size = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(2 * size, dtype=torch.int8, device=device)

    def seconds(call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return seconds


def _summary(values: Sequence[float]) -> Timing:
    if len(values) == 1:
        return Timing(*values * 3)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, low, high)


def environment(device: torch.device) -> dict[str, Any]:
    """Where the numbers come from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "cpu_instructions": native.cpu_instructions,
        "icl_patch": icl_patch.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or "CPU")


@dataclass
class Results:
    """Rows of one benchmark, written after every row so that what was measured survives a stop."""

    benchmark: str
    device: torch.device
    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.environment = environment(self.device)

    @property
    def path(self) -> Path:
        """Of the JSON file; the table lies beside it."""
        words = self.environment["device"].replace("(R)", "").replace("(TM)", "").split()
        return self.folder / f"{self.benchmark}-{'-'.join(words).lower()}.json"

    def add(
        self,
        case: str,
        timings: Mapping[str, Timing],
        ours: str,
        nbytes: Mapping[str, int] | None = None,
        notes: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """What was measured side by side in one case: a row per call, with its time over that of ``ours``, and GB/s from ``nbytes``."""
        for name, timing in timings.items():
            row: dict[str, Any] = {"case": case, "call": name, "seconds": asdict(timing)}
            row["ratio"] = timing.median / timings[ours].median
            if nbytes and name in nbytes:
                row["GB/s"] = nbytes[name] / timing.median / 1e9
            self.rows.append(row | dict((notes or {}).get(name, {})))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        self.path.with_suffix(".md").write_text(self.markdown(), encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """As it is written."""
        return {"benchmark": self.benchmark, "environment": self.environment, "rows": self.rows}

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Column names and rows as text."""
        extra = list(dict.fromkeys(name for row in self.rows for name in row if name not in ("case", "call", "seconds", "ratio")))
        rows = []
        for row in self.rows:
            times = [_seconds(row["seconds"][name]) for name in ("median", "low", "high")]
            cells = [row["case"], row["call"], times[0], f"{times[1]} – {times[2]}", f"{row['ratio']:.3g}"]
            rows.append(cells + [f"{row[name]:.3g}" if name in row else "" for name in extra])
        return ["case", "call", "median", "middle half", "ratio", *extra], rows

    def markdown(self) -> str:
        """The table with its environment."""
        names, rows = self.cells()
        where = ", ".join(f"{name} {value}" for name, value in self.environment.items() if value)
        lines = [f"# {self.benchmark}", "", where, "", "| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])

    def table(self) -> Table:
        """For a terminal."""
        names, rows = self.cells()
        table = Table(*names, title=f"{self.benchmark} on {self.environment['device']}, {self.environment['threads']} threads")
        for row in rows:
            table.add_row(*row)
        return table


def _seconds(value: float) -> str:
    unit, size = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if value >= pair[1]), ("µs", 1e-6))
    return f"{float(f'{value / size:.3g}'):g} {unit}"


def default_folder() -> Path:
    """``$ICL_RESULTS``, else ``bench/results`` in a checkout, else ``icl-patch-bench`` here."""
    if given := os.environ.get("ICL_RESULTS"):
        return Path(given)
    checkout = Path(__file__).parent
    return checkout / "results" if (checkout.parent / "pyproject.toml").exists() else Path("icl-patch-bench")
