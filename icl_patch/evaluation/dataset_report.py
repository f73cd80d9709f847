"""The measurements of ``verify_dataset``, as a table and lines."""

from collections.abc import Callable

from rich.table import Table

from icl_patch.evaluation import report
from icl_patch.evaluation.verify_dataset import DatasetReport, Interval


def table(result: DatasetReport) -> Table:
    """A row for each task, and one for all."""
    measures = ("same tokens (95 %)", "same bits", "L∞ (95 %)", "L∞ max", "TVD (95 %)", "TVD max")
    rows = [
        [
            task.task,
            task.rows,
            _within(report.percent, task.match, task.match_interval),
            report.percent(task.bit_identical),
            _within(report.format_value, task.linf, task.linf_interval),
            task.linf_max,
            _within(report.format_value, task.tvd, task.tvd_interval),
            task.tvd_max,
        ]
        for task in [*result.tasks, result.total]
    ]
    title = (
        f"{result.model}, {result.update}, {result.dtype}: {result.max_new_tokens} tokens a row;"
        " L∞ and TVD are medians of the rows' largest errors"
    )
    return report.table(title, ["task", "rows", *measures], rows)


def verdict_lines(result: DatasetReport) -> list[str]:
    """The noise, whether the promise is kept, and the rows that were rejected."""
    floor = " and ".join(
        f"{name} {report.format_floor(result.noise_floor[key])}"
        for name, key in (("L∞", "linf_max"), ("TVD", "tvd_max"))
    )
    lines = [
        f"noise of the unmodified model: {floor}",
        report.promise_line(result),
    ]
    if result.rejected:
        lines.append(f"rows that could not be verified: {result.rejected}, the first of them:")
        lines += result.reasons
    return lines


def _within(show: Callable[[float], str], value: float, interval: Interval | None) -> str:
    """A value with its interval, if there is one."""
    return show(value) + (f" ({' – '.join(map(show, interval))})" if interval else "")
