"""Results: one JSON file and one table for each benchmark and device, with the environment."""

import hashlib
import importlib
import json
import math
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import icl_patch
from icl_patch.atomic_file import write_atomically
from icl_patch.bench.harness import Case
from icl_patch.evaluation.report import markdown
from icl_patch.ops import native

Row = Mapping[str, Any]


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the versions that the numbers come from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    values = {
        "device": name,
        "threads": torch.get_num_threads(),
        "cpu_instructions": native.cpu_instructions,
        "icl_patch": icl_patch.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    return values | ({"triton": version("triton")} if device.type == "cuda" else {})


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    named = re.search(r"^model name\s*: *(.*?)\s*$", text, re.M)
    return named[1] if named else platform.processor() or "CPU"


@cache
def code_fingerprint() -> str:
    """A hash of the package's code and of its native library."""
    # the kernels, which need triton, lie elsewhere in an editable installation
    found = [find_spec(name) for name in ("icl_patch", "icl_patch.kernels", "icl_patch.bench")]
    files = {
        path
        for spec in found
        if spec and spec.origin
        for path in Path(spec.origin).parent.rglob("*")
        if path.suffix in (".py", ".so") or path.parent.name == "configs"
    }
    contents = sorted(hashlib.sha256(path.read_bytes()).digest() for path in files)
    return hashlib.sha256(b"".join(contents)).hexdigest()[:12]


class Results:
    """The rows of one benchmark on one device; goes on with a file of the same environment."""

    def __init__(self, benchmark: str, device: torch.device, folder: Path) -> None:
        where = environment(device)
        # processors of one name may differ in what they can do
        kind = where["device"] + (f" {where['cpu_instructions']}" if device.type == "cpu" else "")
        name = "-".join(re.sub(r"\((R|TM)\)", "", kind).split()).lower()
        self.device, self.path = device, folder / f"{benchmark}-{name}.json"
        self.data: dict[str, Any] = {"benchmark": benchmark, "environment": where, "rows": []}
        if self.path.exists():
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            if saved["environment"] == where:
                self.data = saved

    def measure(
        self,
        cases: Sequence[Case],
        rounds: int = 15,
        fresh: bool = False,
        seconds: float = math.inf,
    ) -> Iterator[tuple[str, bool]]:
        """Measure the cases that this code has not measured yet, and write the files after each.

        Args:
            cases: the most important first.
            rounds: how often each call is timed on a CPU.
            fresh: measure every case again.
            seconds: begin no case after this time.

        Yields:
            A line of progress, and whether nothing has failed in that case.
        """
        end = time.monotonic() + seconds
        missing = [case for case in cases if fresh or not self.has(case.name)]
        yield f"{len(missing)} of {len(cases)} cases to measure", True
        for number, case in enumerate(missing, 1):
            if time.monotonic() > end:
                yield f"out of time: {len(missing) - number + 1} cases left", True
                return
            yield f"{number}/{len(missing)} {case.name}", True
            rows = case.rows(self.device, rounds)
            others = [row for row in self.data["rows"] if row["case"] != case.name]
            measured = [row | {"code": code_fingerprint()} for row in rows]
            self.data["rows"] = others + measured
            self.write()
            calls = "; ".join(f"{row['call']} {cell(row)}".strip() for row in rows)
            yield f"  {calls}", not any("failed" in row for row in rows)

    def has(self, name: str) -> bool:
        """Whether this code has measured the case without a failure."""
        rows = [row for row in self.data["rows"] if row["case"] == name]
        good = [row["code"] == code_fingerprint() and "failed" not in row for row in rows]
        return bool(rows) and all(good)

    def write(self) -> None:
        """Write the JSON file and the table, each atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.data, indent=1) + "\n"
        write_atomically(self.path, [text.encode()])
        write_atomically(self.path.with_suffix(".md"), [page(self.data).encode()])


def load_all(folder: Path, benchmark: str) -> list[dict[str, Any]]:
    """Every results file of a benchmark in a folder, each with its name as ``file``."""
    return [
        {"file": path.stem, **json.loads(path.read_text(encoding="utf-8"))}
        for path in sorted(folder.glob(f"{benchmark}-*.json"))
    ]


def page(data: Mapping[str, Any]) -> str:
    """The page of a results file: the benchmark's docstring, the environment, the table."""
    module = importlib.import_module(f"icl_patch.bench.cases.{data['benchmark']}")
    where = ", ".join(f"{name} {value}" for name, value in data["environment"].items() if value)
    failures = [
        f"- Failed: {row['case']}, {row['call']}: {row['failed']}"
        for row in data["rows"]
        if "failed" in row
    ]
    head = [f"# {data['benchmark']}", "", (module.__doc__ or "").strip(), "", where, ""]
    return "\n".join([*head, *failures, *([""] if failures else []), *table(data["rows"]), ""])


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of a Markdown table with a row for each case: every call's time and its ratio to
    the base's, then the middle half of our times and our numbers.
    """
    ours = {row["case"]: row for row in rows if row["ours"]}
    calls = list(dict.fromkeys(row["call"] for row in rows if row["call"]))
    numbers = list(
        dict.fromkeys(
            name
            for row in ours.values()
            for name, value in row.items()
            if isinstance(value, float | int) and name not in ("ours", "ratio", "rate")
        )
    )
    lines = [["case", *calls, "middle half", *numbers]]
    for case, row in ours.items():
        cells = {row["call"]: cell(row) for row in rows if row["case"] == case}
        found = ["-" if row.get(name) is None else format_number(row[name]) for name in numbers]
        lines.append([case, *(cells.get(name, "") for name in calls), middle_half(row), *found])
    columns, *texts = [[text.replace("|", "\\|") for text in line] for line in lines]
    return markdown(columns, texts).splitlines()


def cell(row: Row) -> str:
    """A call's time and its ratio to the base's, or the reason it failed."""
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    text = format_seconds(row["seconds"]["median"])
    return text if row.get("ratio", 1) == 1 else f"{text} ({row['ratio']:.3g}×)"


def middle_half(row: Row) -> str:
    """Where the middle half of a call's times lies."""
    seconds = row.get("seconds", {})
    return " – ".join(format_seconds(seconds[end]) for end in ("low", "high") if seconds)


def format_seconds(value: float) -> str:
    """Three digits and a unit."""
    unit, size = ("s", 1) if value >= 1 else ("ms", 1e-3) if value >= 1e-3 else ("µs", 1e-6)
    return f"{float(f'{value / size:.3g}'):g} {unit}"


def format_number(value: float) -> str:
    """Three digits, all of a large number's."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
