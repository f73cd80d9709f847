"""Results: one JSON file and one table for each benchmark and device, with the environment."""

import hashlib
import importlib
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import icl_patch
from icl_patch.bench.harness import UNFINISHED, Case, cell, format_seconds
from icl_patch.ops import native
from icl_patch.patch.atomic_file import write_atomically


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
    if device.type == "cuda":
        values["triton"] = version("triton")
    return values


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    named = re.search(r"^model name\s*: *(.*?)\s*$", text, re.M)
    return named[1] if named else platform.processor() or "CPU"


def file_name(device: str) -> str:
    """A device's name in lower case with hyphens."""
    return "-".join(re.sub(r"\((R|TM)\)", "", device).split()).lower()


@cache
def code_fingerprint() -> str:
    """A hash of the code that computes: the package and its native library, without the benchmarks,
    the command line and the evaluation.
    """
    found = [find_spec(name) for name in ("icl_patch", "icl_patch.kernels")]
    # not imported: the kernels need triton
    root, kernels = (Path(spec.origin).parent for spec in found if spec and spec.origin)
    excluded = [root / name for name in ("bench", "cli", "evaluation")]
    digests = {
        path: hashlib.sha256(path.name.encode() + path.read_bytes()).hexdigest()
        for folder in (root, kernels)  # the kernels lie elsewhere in an editable installation
        for path in folder.rglob("*")
        if path.suffix in (".py", ".so", ".json")
        and not any(path.is_relative_to(other) for other in excluded)
    }
    return hashlib.sha256("".join(sorted(digests.values())).encode()).hexdigest()[:12]


@dataclass
class Results:
    """The rows of one benchmark on one device, written after every case; resumes a file of the same
    environment.
    """

    benchmark: str
    device: torch.device
    folder: Path
    cases: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    dropped: str | None = None

    def __post_init__(self) -> None:
        self.environment = environment(self.device)
        if self.path.exists():
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            if saved["environment"] == self.environment:
                self.cases, self.skipped = _by_case(saved["rows"]), saved.get("skipped", {})
            else:
                other = saved["environment"]
                changed = [
                    name for name in self.environment if other.get(name) != self.environment[name]
                ]
                self.dropped = f"{self.path} is begun anew: it is of another {', '.join(changed)}"

    @property
    def path(self) -> Path:
        """The JSON file; the table lies beside it."""
        return self.folder / f"{self.benchmark}-{file_name(self.environment['device'])}.json"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of all cases."""
        return [row for rows in self.cases.values() for row in rows]

    def has(self, name: str) -> bool:
        """Whether this code has measured the whole case without a failure."""
        rows = self.cases.get(name, [])
        return bool(rows) and all(
            row.get("code") == code_fingerprint() and not {"failed", UNFINISHED} & set(row)
            for row in rows
        )

    def skip(self, call: str, reason: str) -> None:
        """Record why no row has this call."""
        self.skipped[call] = reason

    def add(self, case: Case, rows: list[dict[str, Any]]) -> None:
        """Replace the rows of a case and write the files."""
        self.cases[case.name] = [row | {"code": code_fingerprint()} for row in rows]
        self.write()

    def sort(self, names: Sequence[str]) -> None:
        """Order the cases by these names; others come last."""
        place = {name: number for number, name in enumerate(names)}
        self.cases = dict(
            sorted(self.cases.items(), key=lambda entry: place.get(entry[0], len(place)))
        )

    def write(self) -> None:
        """Write the JSON file and the table, each atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        write_atomically(self.path, [text.encode()])
        write_atomically(self.path.with_suffix(".md"), [page(self.to_dict()).encode()])

    def to_dict(self) -> dict[str, Any]:
        """The contents of the JSON file."""
        return {
            "benchmark": self.benchmark,
            "environment": self.environment,
            "skipped": self.skipped,
            "rows": self.rows,
        }


def _by_case(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    return cases


def table_by_case(
    rows: Sequence[dict[str, Any]], numbers: Sequence[str] | None = None
) -> list[str]:
    """A Markdown table with a row for each case: our call with its numbers (by default all), then
    every other call's time and its ratio to ours.
    """
    cases = _by_case(rows)
    ours = {case: next((row for row in calls if row["ours"]), {}) for case, calls in cases.items()}
    names = list(dict.fromkeys(row["call"] for row in ours.values() if row.get("call")))
    present = dict.fromkeys(name for row in ours.values() for name in row if _is_number(row, name))
    numbers = [name for name in present if numbers is None or name in numbers]
    others = list(dict.fromkeys(row["call"] for row in rows if not row["ours"]))
    lines = []
    for case, case_rows in cases.items():
        our_row, calls = ours[case], {row["call"]: cell(row) for row in case_rows}
        seconds = our_row.get("seconds", {})
        spread = " – ".join(format_seconds(seconds[end]) for end in ("low", "high") if seconds)
        line = [case, cell(our_row) if our_row else "", spread]
        line += [format_number(our_row[name]) if name in our_row else "" for name in numbers]
        lines.append(line + [calls.get(name, "") for name in others])
    head = ["case", names[0] if len(names) == 1 else "ours", "middle half"]
    return table_lines([*head, *numbers, *others], lines)


def _is_number(row: dict[str, Any], name: str) -> bool:
    """Whether an entry of a row is a number with a column of its own."""
    return isinstance(row[name], float | int) and name not in ("ours", "ratio", "rate", UNFINISHED)


def format_number(value: float | None) -> str:
    """Three digits, all of a large number's; ``-`` for None."""
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def tables(data: dict[str, Any]) -> list[str]:
    """The lines of a results file's tables: the benchmark's own ``tables(data)``, or one table."""
    module = importlib.import_module(f"icl_patch.bench.cases.{data['benchmark']}")
    return list(module.tables(data)) if hasattr(module, "tables") else table_by_case(data["rows"])


def page(data: dict[str, Any]) -> str:
    """The page of a results file: the benchmark's docstring, the environment, the tables."""
    module = importlib.import_module(f"icl_patch.bench.cases.{data['benchmark']}")
    where = ", ".join(f"{name} {value}" for name, value in data["environment"].items() if value)
    notes = [f"- Not measured: {call}, {why}." for call, why in data.get("skipped", {}).items()]
    notes += [
        f"- Failed: {row['case']}, {row['call']}: {row['failed']}"
        for row in data["rows"]
        if "failed" in row
    ]
    head = [f"# {data['benchmark']}", "", (module.__doc__ or "").strip(), "", where, ""]
    return "\n".join([*head, *notes, *([""] if notes else []), *tables(data), ""])


def table_lines(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    escaped = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names), *escaped]


def load_all(folder: Path, benchmark: str) -> list[dict[str, Any]]:
    """Every results file of a benchmark in a folder, each with its name as ``file``."""
    return [
        {"file": path.stem, **json.loads(path.read_text(encoding="utf-8"))}
        for path in sorted(folder.glob(f"{benchmark}-*.json"))
    ]


def default_folder() -> Path:
    """``$ICL_RESULTS``, else ``bench/results`` in a checkout, else ``icl-patch-bench`` here."""
    if folder := os.environ.get("ICL_RESULTS"):
        return Path(folder)
    checkout = Path(__file__).parent
    return (
        checkout / "results"
        if (checkout.parent / "pyproject.toml").exists()
        else Path("icl-patch-bench")
    )
