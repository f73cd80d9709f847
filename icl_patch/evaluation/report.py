"""Reports as tables on a terminal, as Markdown and as JSON."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from icl_patch.evaluation import tiny_models
from icl_patch.evaluation.architecture_suite import FamilyReport
from icl_patch.evaluation.verify import VerifyReport

# The block's last operation, by its writer.
_ENDS = {
    "scale": "`m ⊙ Norm(W h)`",
    "weight": "`W h`",
    "bias": "`W h + b`",
    "experts": "`Σ s_j W_j h_j`",
}


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table for a terminal, its values formatted by :func:`format_value`."""
    rows = [[format_value(value) for value in row] for row in rows]
    note = FLOOR_NOTE if any("0 here" in row for row in rows) else None
    result = Table(title=title, title_justify="left", title_style="bold")
    result.caption, result.caption_justify = note, "left"
    for column in columns:
        result.add_column(column, overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def format_value(value: Any) -> str:
    """A float with two digits (an exact zero as ``0``), a bool as yes or no, others as ``str``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.1e}"
    return str(value)


FLOOR_NOTE = "0 here: batching happened to round alike; other sizes and machines differ"
"""Stands below tables with a noise floor of 0."""


def format_floor(value: float | None) -> str:
    """A noise floor; an exact zero says only that this batch did not change any rounding."""
    return "0 here" if value == 0 else format_value(value)


def percent(share: float) -> str:
    """``97.5 %``; only what is exactly 1 reads ``100 %``."""
    if share == 1:
        return "100 %"
    return f"{min(100 * share, 99.99):.4g} %"


def verify_table(
    reports: Sequence[VerifyReport], title: str = "Replay without context against the model with it"
) -> Table:
    """A table of verify reports, one row each."""
    columns = [
        "update",
        "dtype",
        "tokens",
        "token match",
        "bit-identical",
        "L∞ max",
        "TVD max",
        "floor L∞",
        "floor TVD",
        "reader error",
        "correction",
        "promise kept",
    ]
    rows = []
    for report in reports:
        numbers = report.to_dict()
        rows.append(
            [
                report.update,
                report.dtype,
                numbers["tokens"],
                percent(report.token_match),
                percent(report.bit_identical),
                numbers["linf_max"],
                numbers["tvd_max"],
                format_floor(report.noise_floor["linf_max"]),
                format_floor(report.noise_floor["tvd_max"]),
                report.reader_error_max,
                report.correction_max if report.update == "exact" else "-",
                _verdict(report),
            ]
        )
    return table(title, columns, rows)


def suite_table(reports: Sequence[FamilyReport]) -> Table:
    """The measurements of every supported block form."""
    columns = [
        "family",
        "ends in",
        "lemmas",
        "floor",
        "direct fp32",
        "stable fp32",
        "exact fp32",
        "exact bf16",
    ]
    columns += ["reader error, ε", "correction, ε", "experts", "passed"]
    rows = []
    for entry in reports:
        if not entry.expected:
            continue
        shares = [
            "-" if share is None else percent(share)
            for share in (entry.exact_fp32, entry.exact_bf16)
        ]
        errors = [format_floor(entry.noise_floor), entry.direct, entry.stable]
        sizes = [
            "-" if size is None else f"{size:.1f}"
            for size in (entry.reader_error, entry.correction)
        ]
        experts = "-" if entry.experts_identical is None else percent(entry.experts_identical)
        rows.append(
            [
                entry.name,
                entry.writer,
                entry.lemmas,
                *errors,
                *shares,
                *sizes,
                experts,
                entry.refused or entry.passed,
            ]
        )
    return table(
        "Every covered form, on a small random model: replay without context against the model"
        " with it",
        columns,
        rows,
    )


def refused_table(reports: Sequence[FamilyReport]) -> Table:
    """The refused block forms, why, and the error that attaching raises."""
    rows = [
        [entry.name, entry.note, entry.refused or "NOT refused"]
        for entry in reports
        if not entry.expected
    ]
    return table("Refused", ["family", "why", "what attaching says"], rows)


def support_markdown() -> str:
    """The families by their blocks' last operation, then the refused ones, as a Markdown table."""
    rows = ["| the block ends in | families | refused because |", "|---|---|---|"]
    for writer, ends in _ENDS.items():
        names = ", ".join(
            name for name, model in tiny_models.SUPPORTED.items() if model.writer == writer
        )
        rows.append(f"| {ends} | {names} | |")
    rows += [f"| | {name} | {model.note} |" for name, model in tiny_models.REFUSED.items()]
    return "\n".join(rows)


def _verdict(report: VerifyReport) -> str:
    if report.update != "exact" and report.dtype != "float32":
        return "none given"
    return "yes" if report.passed else "NO"


def to_markdown(tables: Sequence[Table]) -> str:
    """Tables as Markdown, under their titles."""
    parts = []
    for table in tables:
        title, box, note = table.title, table.box, table.caption
        table.title, table.box, table.caption = None, MARKDOWN, None
        console = Console(width=400, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(table)
        table.title, table.box, table.caption = title, box, note
        lines = [line.strip() for line in capture.get().splitlines() if line.strip()]
        parts.append(f"## {title}\n\n" + "\n".join(lines) + (f"\n\n{note}\n" if note else "\n"))
    return "\n".join(parts)


def to_json(value: Any, indent: int | None = None) -> str:
    """An object as JSON; NaN and infinity, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Write an object as readable JSON, see :func:`to_json`."""
    path.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")
