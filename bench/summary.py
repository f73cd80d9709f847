"""The tables of docs/performance.md, from the committed results files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from icl_patch.bench.harness import format_seconds
from icl_patch.bench.results import load_all

MATRICES = ("Gemma-3-1B up", "Llama-3-8B up", "Llama-3-8B down")
ROWS = (1, 2, 16)
BASELINES = ("F.linear", "unfused", "PEFT", "W + ΔW", "W + ΔW in a buffer")


def summary_markdown(folder: Path) -> str:
    """The most telling rows of every device that has a results file, with its environment."""
    parts = []
    for results in load_all(folder, "linear"):
        parts += [_where(results), *_linear(results["rows"]), ""]
    for results in load_all(folder, "throughput"):
        both = [row for row in results["rows"] if row.get("parameters", {}).get("work") == "both"]
        parts += [
            (
                "Patches computed and applied a second, of one layer and one token each."
                f" {_where(results)}"
            ),
            *_throughput(both),
            "",
        ]
    return "\n".join(parts).strip() or "Nothing is measured yet: `make bench`."


def _where(results: dict[str, Any]) -> str:
    environment = results["environment"]
    place = environment["device"]
    if environment["cuda"] is None:
        place += (
            f" ({environment['cpu_instructions'] or 'no native library'}), {environment['threads']}"
            " threads"
        )
    return f"{place}, torch {environment['torch']}:\n"


def _linear(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    calls = {(row["case"], row["call"]): row for row in rows}
    yield (
        "| weight | dtype | rows | `patched_linear` | of the bandwidth | "
        + " | ".join(f"`{name}`" for name in BASELINES)
        + " |"
    )
    yield "|" + "---|" * (5 + len(BASELINES))
    for row in rows:
        parameters = row.get("parameters", {})
        if (
            not row["ours"]
            or parameters["rank"] != 1
            or parameters["matrix"] not in MATRICES
            or parameters["rows"] not in ROWS
        ):
            continue
        others = [_baseline(calls.get((row["case"], name))) for name in BASELINES]
        head = [
            f"{parameters['matrix']} ({parameters['n']}, {parameters['k']})",
            parameters["dtype"],
            str(parameters["rows"]),
        ]
        mine = (
            [format_seconds(row["seconds"]["median"]), f"{100 * row['of ceiling']:.0f} %"]
            if "seconds" in row
            else ["FAILED", ""]
        )
        yield "| " + " | ".join([*head, *mine, *others]) + " |"


def _baseline(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return "FAILED" if "failed" in row else f"{row['ratio']:.2f}×" if "ratio" in row else "-"


def _throughput(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    names = list(dict.fromkeys(row["call"] for row in rows if row["call"]))
    yield "| model | " + " | ".join(names) + " |"
    yield "|" + "---|" * (1 + len(names))
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = {row["call"]: row for row in rows if row["case"] == case}
        cells = [
            f"{mine[name]['rate']:.3g}" if "rate" in mine.get(name, {}) else "-" for name in names
        ]
        yield f"| {case} | " + " | ".join(cells) + " |"
