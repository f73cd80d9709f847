"""Reports as tables on a terminal, as Markdown and as JSON."""

import copy
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text

from icl_patch.evaluation import tiny_models
from icl_patch.evaluation.verify import VerifyReport

# The block's last operation, by its writer.
_ENDS = {
    "scale": "`m ⊙ Norm(W h)`",
    "weight": "`W h`",
    "bias": "`W h + b`",
    "experts": "`Σ s_j W_j h_j`",
}


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table for a terminal, its values formatted by :func:`format_value`. Square brackets in them
    are no markup: a token may be ``[/INST]``.
    """
    rows = [[format_value(value) for value in row] for row in rows]
    note = FLOOR_NOTE if any("0 here" in row for row in rows) else None
    result = Table(title=Text(title), title_justify="left", title_style="bold")
    result.caption, result.caption_justify = note, "left"
    for column in columns:
        result.add_column(column, overflow="fold")
    for row in rows:
        result.add_row(*map(Text, row))
    return result


def format_value(value: Any) -> str:
    """A float with two digits (an exact zero as ``0``), a bool as yes or no, None as ``-``, others
    as ``str``.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.1e}"
    return "-" if value is None else str(value)


FLOOR_NOTE = "0 here: batching happened to round alike; other sizes and machines differ"
"""Stands below tables with a noise floor of 0."""


def format_floor(value: float | None) -> str:
    """A noise floor; an exact zero says only that this batch did not change any rounding."""
    return "0 here" if value == 0 else format_value(value)


def percent(share: float | None) -> str:
    """``97.5 %``; ``100 %`` only for exactly 1; ``-`` for None."""
    if share is None:
        return "-"
    return "100 %" if share == 1 else f"{min(100 * share, 99.99):.4g} %"


def verify_tables(reports: Sequence[VerifyReport]) -> list[Table]:
    """A table of verify reports, one row each; and one of exact updates in each arithmetic, if
    there are exact updates.
    """
    records = []
    for report in reports:
        numbers, exact = report.to_dict(), report.update == "exact"
        promised = exact or report.dtype == "float32"
        records.append(
            {
                "update": report.update,
                "dtype": report.dtype,
                "tokens": len(report.steps),
                "token match": percent(report.token_match),
                "bit-identical": percent(report.bit_identical),
                "L∞ max": numbers["linf_max"],
                "TVD max": numbers["tvd_max"],
                "floor L∞": format_floor(report.noise_floor["linf_max"]),
                "floor TVD": format_floor(report.noise_floor["tvd_max"]),
                "reader error": report.reader_error_max,
                "correction": report.correction_max if exact else None,
                "promise kept": report.passed if promised else "no promise",
            }
        )
    tables = [_table_of("Replay without context against the model with it", records)]
    return tables + [_exact_table(reports)] * any(report.arithmetics for report in reports)


def _exact_table(reports: Sequence[VerifyReport]) -> Table:
    """The steps of exact updates in each arithmetic, beside the run that they are identical to."""
    records = [
        {
            "dtype": report.dtype,
            "arithmetic": steps.arithmetic,
            "identical to": steps.reference
            if steps.reason is None
            else f"not measured: {steps.reason}",
            "bit-identical": percent(steps.bit_identical),
            "token match": percent(steps.token_match),
            "L∞ max": steps.linf_max,
            "L∞ to fp32": steps.linf_max_fp32,
            "reader error": steps.reader_error_max,
            "correction": steps.correction_max,
            "misses": steps.misses,
            "taken twice": steps.tokens_taken_twice,
        }
        for report in reports
        for steps in report.arithmetics
    ]
    title = "Exact steps by arithmetic; token match and L∞ max are against the unmodified model"
    return _table_of(title, records)


def _table_of(title: str, records: Sequence[dict[str, Any]]) -> Table:
    """A table with a row for each record and a column for each key."""
    columns = list(records[0]) if records else []
    return table(title, columns, [list(record.values()) for record in records])


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


def to_markdown(tables: Sequence[Table]) -> str:
    """Tables as Markdown, under their titles."""
    console = Console(width=400, no_color=True, highlight=False)
    parts = []
    for table in map(copy.copy, tables):
        title, note = table.title, table.caption
        table.title, table.caption, table.box = None, None, MARKDOWN
        with console.capture() as capture:
            console.print(table)
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
