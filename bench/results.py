"""Results: one JSON file and one table for each benchmark and device, with the environment."""

import hashlib
import importlib
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import icl_patch
from icl_patch.bench.harness import UNFINISHED, Case, cell, format_seconds
from icl_patch.ops import native

_COLUMNS = (
    "case",
    "call",
    "ours",
    "parameters",
    "seconds",
    "ratio",
    "unit",
    "rate",
    "failed",
    "code",
    "parts",
    "not observed",
    UNFINISHED,
)


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the versions that the numbers come from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    found = {
        "device": name,
        "threads": torch.get_num_threads(),
        "cpu_instructions": native.cpu_instructions,
        "icl_patch": icl_patch.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        found["triton"] = version("triton")
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor() or "CPU",
    )


@cache
def code_fingerprint() -> str:
    """A hash of the code that computes: the package and its native library, without the benchmarks,
    the command line and the evaluation.
    """
    root = Path(icl_patch.__file__).parent
    folders = (
        [root]
        if (root / "kernels").exists()
        else [root, Path(__file__).parent.parent / "triton_kernels"]
    )
    excluded = {"bench", "cli", "evaluation"}
    files = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.relative_to(folder).parts[0] not in excluded
    ]
    kept = [path for path in files if path.suffix in (".py", ".so", ".json")]
    parts = sorted(
        hashlib.sha256(path.name.encode() + path.read_bytes()).hexdigest() for path in kept
    )
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]


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
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["environment"] == self.environment:
                self.cases, self.skipped = _by_case(found["rows"]), found.get("skipped", {})
            else:
                changed = [
                    name
                    for name, value in self.environment.items()
                    if found["environment"].get(name) != value
                ]
                self.dropped = f"{self.path} is begun anew: it is of another {', '.join(changed)}"

    @property
    def path(self) -> Path:
        """The JSON file; the table lies beside it."""
        words = self.environment["device"].replace("(R)", "").replace("(TM)", "").split()
        return self.folder / f"{self.benchmark}-{'-'.join(words).lower()}.json"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of all cases."""
        return [row for rows in self.cases.values() for row in rows]

    @property
    def failed(self) -> list[str]:
        """A line for every call that failed."""
        return [
            f"{row['case']}, {row['call']}: {row['failed']}" for row in self.rows if "failed" in row
        ]

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
        write_whole(self.path, json.dumps(self.to_dict(), indent=1) + "\n")
        write_whole(self.path.with_suffix(".md"), markdown(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """The contents of the JSON file."""
        return {
            "benchmark": self.benchmark,
            "environment": self.environment,
            "skipped": self.skipped,
            "rows": self.rows,
        }

    def table(self) -> Table:
        """The table for a terminal."""
        names, rows = cells(self.rows)
        made = Table(
            *names,
            title=(
                f"{self.benchmark} on {self.environment['device']}, {self.environment['threads']}"
                " threads"
            ),
        )
        for row in rows:
            made.add_row(*row)
        return made


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees all of the old text or all of the new."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        file.write(text)
    os.chmod(file.name, 0o644)  # noqa: PTH101
    Path(file.name).replace(path)


def _by_case(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    return cases


def cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Column names, and a row of text for each case: our call with all its numbers, then every
    other call's time and its ratio to ours.
    """
    cases = _by_case(rows)
    ours = {case: next((row for row in found if row["ours"]), {}) for case, found in cases.items()}
    names = list(dict.fromkeys(row["call"] for row in ours.values() if row.get("call")))
    numbers = list(
        dict.fromkeys(name for row in ours.values() for name in row if name not in _COLUMNS)
    )
    others = list(dict.fromkeys(row["call"] for row in rows if not row["ours"]))
    lines = []
    for case, found in cases.items():
        mine = ours[case]
        spread = (
            [format_seconds(mine["seconds"][name]) for name in ("low", "high")]
            if "seconds" in mine
            else []
        )
        line = [
            case,
            cell(mine) if mine else "",
            " – ".join(spread),
            *(_number(mine[name]) if name in mine else "" for name in numbers),
        ]
        calls = {row["call"]: row for row in found}
        lines.append(line + [cell(calls[name]) if name in calls else "" for name in others])
    return [
        "case",
        names[0] if len(names) == 1 else "ours",
        "middle half",
        *numbers,
        *others,
    ], lines


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def markdown(data: dict[str, Any]) -> str:
    """The page of a results file: the benchmark's docstring, the environment, and the table, or the
    tables of the benchmark's own ``tables(data)``.
    """
    module = importlib.import_module(f"icl_patch.bench.cases.{data['benchmark']}")
    about = (module.__doc__ or "").strip()
    where = ", ".join(f"{name} {value}" for name, value in data["environment"].items() if value)
    notes = [f"Not measured: {call}, {reason}." for call, reason in data.get("skipped", {}).items()]
    notes += [
        f"Failed: {row['case']}, {row['call']}: {row['failed']}"
        for row in data["rows"]
        if "failed" in row
    ]
    lines = [
        f"# {data['benchmark']}",
        "",
        about,
        "",
        where,
        "",
        *(f"- {note}" for note in notes),
        *([""] if notes else []),
    ]
    lines += module.tables(data) if hasattr(module, "tables") else table_lines(*cells(data["rows"]))
    return "\n".join([*lines, ""])


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
    if given := os.environ.get("ICL_RESULTS"):
        return Path(given)
    checkout = Path(__file__).parent
    return (
        checkout / "results"
        if (checkout.parent / "pyproject.toml").exists()
        else Path("icl-patch-bench")
    )
