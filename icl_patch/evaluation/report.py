"""Reports as tables on a terminal, and as JSON; tables as Markdown."""

import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from icl_patch.evaluation.verify import VerifyReport
from icl_patch.invariance.arithmetic import NATIVE


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table of values, formatted by :func:`format_value`. Square brackets in them are no markup:
    a token may be ``[/INST]``.
    """
    drawn = Table(title=Text(title), title_justify="left", title_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(format_value(value)) for value in row))
    return drawn


def _table_of(title: str, records: Sequence[dict[str, Any]]) -> Table:
    """A table with a column for each record and a row for each key, which a terminal of 80 columns
    has room for.
    """
    columns, *rows = ([name, *(record[name] for record in records)] for name in records[0])
    return table(title, columns, rows)


def without_context(front: str) -> str:
    """The name of a run without the context: of the unmodified model on the tokens that a patch
    runs on, with the text of those that stay in front of the question.
    """
    return f"without the context, behind {visible_text(front) if front else 'nothing'}"


def format_value(value: Any) -> str:
    """A float with two digits (an exact zero as ``0``), a bool as yes or no, None as ``-``, others
    as ``str``.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.1e}"
    return "-" if value is None else str(value)


LEGEND = {
    "floor L∞": "the noise: how much the unmodified model's own logits differ when only batching or"
    " caching changes",
    "0 here": "batching happened to round alike; other sizes and machines differ",
    "reader error": "the largest difference, to the run with the context, in the outputs of the"
    " layers that read the MLP's input, relative to the largest output",
    "correction": "how much exact adds to the closed form, so that no bit differs; as small as"
    " rounding",
    "misses": "elements of the blocks' outputs that differ all the same",
    "taken twice": "tokens that needed a second pass, because an element missed in the first",
    "promise kept": "exact: every bit is the same. direct and stable in fp32: every token is the"
    " same, and errors are within ten times the noise floor. Else there is no promise",
}
"""The meaning of the rows of :func:`verify_tables`, and of a value in them."""


def legend(tables: Sequence[Table]) -> str:
    """The entries of :data:`LEGEND` for what stands in tables, as a list of Markdown."""
    columns = [column for table in tables for column in table.columns]
    names = {str(cell) for column in columns for cell in column.cells}
    entries = [f"- {name}: {meaning}" for name, meaning in LEGEND.items() if name in names]
    return "\n".join(textwrap.fill(entry, 80, subsequent_indent="  ") for entry in entries)


def format_floor(value: float | None) -> str:
    """A noise floor; an exact zero says only that this batch did not change any rounding."""
    return "0 here" if value == 0 else format_value(value)


def visible_text(token: str) -> str:
    """A token's text with its white space visible."""
    shown = token.replace("\n", "↵").replace(" ", "␣").replace("\t", "→")
    return shown if shown.isprintable() and shown else repr(token)[1:-1] or "∅"


def percent(share: float | None) -> str:
    """``97.5 %``; ``100 %`` only for exactly 1; ``-`` for None."""
    if share is None:
        return "-"
    return "100 %" if share == 1 else f"{min(100 * share, 99.99):.4g} %"


def verdict(report: VerifyReport) -> str:
    """Whether the patched model is the model with its context, in one line."""
    if report.update == "exact":
        return f"identical: {_count(report.bit_identical, len(report.steps))}"
    error, floor = report.to_dict()["linf_max"], report.noise_floor["linf_max"]
    count = _count(report.token_match, len(report.steps))
    noise = format_value(floor) if floor else "0 in this run"
    return f"same token: {count}; error {format_value(error)}, noise {noise}"


def verdict_lines(report: VerifyReport, failure: str | None = None) -> str:
    """The verdict, of an exact update in each arithmetic, and whether the promise is kept; in lines
    of at most 80 characters. ``failure``: what the caller found besides.
    """
    lines = [verdict(report)]
    if report.arithmetics:
        lines = []
        for steps in report.arithmetics:
            passes = "two passes" if steps.arithmetic == NATIVE else "one pass"
            if steps.bit_identical is None:
                lines.append(f"identical in {passes}: not measured: {steps.reason}")
            else:
                count = _count(steps.bit_identical, len(report.steps))
                lines.append(f"identical: {count}, in {passes}, to {steps.reference}")
    lines.append(promise_line(report, failure))
    return "\n".join(textwrap.fill(line, 80, subsequent_indent="  ") for line in lines)


def promise_line(report: Any, failure: str | None = None) -> str:
    """Whether a report's update keeps its promise, if it has one; if not, why not."""
    if failure := failure or report.failure:
        return f"promise kept: no: {failure}"
    return f"promise kept: {'yes' if report.promises else 'there is none for this dtype'}"


def _count(share: float, tokens: int) -> str:
    """``yes, 40 of 40 tokens``."""
    return f"{'yes' if share == 1 else 'no'}, {round(share * tokens)} of {tokens} tokens"


def verify_tables(reports: Sequence[VerifyReport]) -> list[Table]:
    """A table of verify reports, one column each; and one of exact updates in each arithmetic, if
    there are exact updates.
    """
    records = []
    for report in reports:
        numbers, exact = report.to_dict(), report.update == "exact"
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
                "promise kept": report.passed if report.promises else "no promise",
            }
        )
    tables = [_table_of("Replay without context against the model with it", records)]
    exact_records = [
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
    return [*tables, _table_of(title, exact_records)] if exact_records else tables


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a ``|`` in a cell has to be escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_json(value: Any) -> str:
    """An object as JSON; NaN and infinity, which JSON lacks, become null."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
