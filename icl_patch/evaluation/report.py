"""What people read: tables on a terminal, Markdown and JSON files, and the papers' Figure 3 as a
picture.
"""

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

# What a block ends in, by its writer.
_ENDS = {
    "scale": "`m ⊙ Norm(W h)`",
    "weight": "`W h`",
    "bias": "`W h + b`",
    "experts": "`Σ s_j W_j h_j`",
}


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table for a terminal; numbers are formatted here, so that every table reads alike."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*map(format_value, row))
    return made


def format_value(value: Any) -> str:
    """An error with two digits, an exact zero as ``0``, a truth as yes or no, anything else as it
    is.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.1e}"
    return str(value)


def percent(share: float) -> str:
    """``97.5 %``; only what is exactly 1 reads ``100 %``."""
    if share == 1:
        return "100 %"
    return f"{min(100 * share, 99.99):.4g} %"


def verify_table(
    reports: Sequence[VerifyReport], title: str = "Replay without context against the model with it"
) -> Table:
    """One row a report."""
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
                report.noise_floor["linf_max"],
                report.noise_floor["tvd_max"],
                report.reader_error_max,
                report.correction_max if report.update == "exact" else "-",
                _verdict(report),
            ]
        )
    return table(title, columns, rows)


def suite_table(reports: Sequence[FamilyReport]) -> Table:
    """What every covered form showed on a small random model."""
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
        errors = [entry.noise_floor, entry.direct, entry.stable]
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
    """What is refused, and why."""
    rows = [
        [entry.name, entry.note, entry.refused or "NOT refused"]
        for entry in reports
        if not entry.expected
    ]
    return table("Refused", ["family", "why", "what attaching says"], rows)


def support_markdown() -> str:
    """The families by what their blocks end in, and those that are refused, as a Markdown table."""
    rows = ["| the block ends in | families | refused because |", "|---|---|---|"]
    for writer, ends in _ENDS.items():
        names = ", ".join(name for name, entry in tiny_models.ZOO.items() if entry.writer == writer)
        rows.append(f"| {ends} | {names} | |")
    rows += [f"| | {name} | {entry.note} |" for name, entry in tiny_models.REFUSED.items()]
    return "\n".join(rows)


def _verdict(report: VerifyReport) -> str:
    if report.update != "exact" and report.dtype != "float32":
        return "none given"
    return "yes" if report.passed else "NO"


def to_markdown(tables: Sequence[Table]) -> str:
    """Tables as Markdown, under their titles."""
    parts = []
    for made in tables:
        title, box = made.title, made.box
        made.title, made.box = None, MARKDOWN
        console = Console(width=400, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(made)
        made.title, made.box = title, box
        lines = [line.strip() for line in capture.get().splitlines() if line.strip()]
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def to_json(value: Any, indent: int | None = None) -> str:
    """An object as JSON, which has no word for NaN and infinity: null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Write an object as readable JSON, see :func:`to_json`."""
    path.write_text(to_json(value, indent=2) + "\n", encoding="utf-8")


def plot(report: VerifyReport, tokens: Sequence[str], path: Path) -> None:
    """The papers' Figure 3: L∞ and TVD at every generated token of the first prompt, a red × where
    the tokens differ.

    Args:
        tokens: the text of each token, for the x axis.
        path: a file name ending in .png, .svg or .pdf.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = report.steps[: len(tokens)]
    positions = range(len(steps))
    figure, axes = plt.subplots(
        2, 1, sharex=True, figsize=(max(6.4, 0.22 * len(steps) + 2), 6.0), layout="constrained"
    )
    panels = (
        (
            "L∞ of logits / max |logit|",
            [step.linf for step in steps],
            report.noise_floor["linf_max"],
        ),
        ("total variation distance", [step.tvd for step in steps], report.noise_floor["tvd_max"]),
    )
    for axis, (label, values, floor) in zip(axes, panels, strict=True):
        axis.set_yscale("symlog", linthresh=1e-9)
        axis.plot(
            positions,
            values,
            marker="o",
            markersize=4,
            linewidth=1.2,
            label=f"{report.update}, {report.dtype}",
        )
        axis.axhline(floor, linestyle="--", linewidth=1, color="0.5", label="noise floor (max)")
        differing = [position for position in positions if not steps[position].match]
        if differing:
            axis.plot(
                differing,
                [values[position] for position in differing],
                "x",
                color="red",
                markersize=9,
                label="tokens differ",
            )
        axis.set_ylim(bottom=-2e-10, top=10 * max(*values, floor, 1e-9))
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend(loc="upper left", bbox_to_anchor=(0, 1.2), ncols=3, frameon=False)
    axes[1].set_xticks(
        list(positions),
        [visible(token) for token in tokens],
        rotation=90,
        family="monospace",
        fontsize=8,
    )
    axes[1].set_xlabel(f"generated tokens, {report.model}")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def visible(token: str) -> str:
    """A token's text with its white space visible, and no character that would be read as
    markup.
    """
    shown = token.replace("\n", "↵").replace(" ", "␣").replace("\t", "→").replace("$", r"\$")
    return shown if shown.isprintable() and shown else repr(token)[1:-1].replace("$", r"\$") or "∅"
