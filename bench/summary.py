"""The tables of docs/kernels.md, from the committed results files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from icl_patch.bench.results import load_all, table_by_case

TELLING = {
    "matrix": ("Gemma-3-1B up", "Llama-3-8B up", "Llama-3-8B down"),
    "rows": (1, 2, 16),
    "rank": (1,),
}
"""The parameters of the cases to show."""


def summary_markdown(folder: Path) -> str:
    """The most telling products of every device that has a results file, with its environment."""
    lines: list[str] = []
    for data in load_all(folder, "linear"):
        rows = [row for row in data["rows"] if _telling(row["parameters"])]
        where = data["environment"]
        instructions = where["cpu_instructions"] or "no native library"
        on_cpu = f" ({instructions}), {where['threads']} threads"
        place = where["device"] + (on_cpu if where["cuda"] is None else "")
        lines += [f"Time. {place}, torch {where['torch']}:", ""]
        lines += [*table_by_case(rows, numbers=("of ceiling",)), ""]
    return "\n".join(lines).strip() or "Nothing is measured yet: `make bench`."


def _telling(parameters: Mapping[str, Any]) -> bool:
    return all(parameters[name] in TELLING.get(name, parameters.values()) for name in parameters)
