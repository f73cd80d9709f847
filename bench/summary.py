"""The tables of docs/performance.md, from the committed results files."""

from pathlib import Path
from typing import Any

from icl_patch.bench.results import load_all, table_by_case

MATRICES = ("Gemma-3-1B up", "Llama-3-8B up", "Llama-3-8B down")
ROWS = (1, 2, 16)


def summary_markdown(folder: Path) -> str:
    """The most telling rows of every device that has a results file, with its environment."""
    lines: list[str] = []
    for benchmark, title in (
        ("linear", "Time"),
        ("throughput", "Patches computed and applied a second, of one layer and one token each"),
    ):
        for results in load_all(folder, benchmark):
            rows = [row for row in results["rows"] if _telling(row.get("parameters", {}))]
            lines += [f"{title}. {_where(results['environment'])}", ""]
            lines += [*table_by_case(rows, numbers=("of ceiling",)), ""]
    return "\n".join(lines).strip() or "Nothing is measured yet: `make bench`."


def _telling(parameters: dict[str, Any]) -> bool:
    if "work" in parameters:
        return bool(parameters["work"] == "both")
    return (
        parameters.get("rank") == 1
        and parameters["matrix"] in MATRICES
        and parameters["rows"] in ROWS
    )


def _where(environment: dict[str, Any]) -> str:
    place = environment["device"]
    if environment["cuda"] is None:
        instructions = environment["cpu_instructions"] or "no native library"
        place += f" ({instructions}), {environment['threads']} threads"
    return f"{place}, torch {environment['torch']}:"
