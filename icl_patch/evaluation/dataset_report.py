"""What ``verify_dataset`` measured, as a table and files."""

from pathlib import Path

from icl_patch.evaluation import report
from icl_patch.evaluation.verify_dataset import DatasetReport, Interval


def table(result: DatasetReport) -> report.ReportTable:
    """A row for each task, and one for all."""
    records = [
        {
            "task": task.task,
            "rows": task.rows,
            "token match": report.percent(task.match),
            "match, 95 %": _shares(task.match_interval),
            "bit-identical": report.percent(task.bit_identical),
            "L∞": task.linf,
            "L∞, 95 %": _errors(task.linf_interval),
            "L∞ max": task.linf_max,
            "TVD": task.tvd,
            "TVD, 95 %": _errors(task.tvd_interval),
            "TVD max": task.tvd_max,
        }
        for task in [*result.tasks, result.total]
    ]
    title = (
        f"{result.model}, {result.update}, {result.dtype}: {result.max_new_tokens} tokens a row;"
        " L∞ and TVD are medians of the rows' largest errors"
    )
    return report.table_of(title, records)


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


def write(result: DatasetReport, folder: Path) -> None:
    """Write ``report.md`` and ``report.json`` into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    report.write_json(folder / "report.json", result.to_dict())
    lines = "".join(f"- {line}\n" for line in verdict_lines(result))
    text = f"{report.to_markdown(table(result))}\n{lines}"
    (folder / "report.md").write_text(text, encoding="utf-8")


def _shares(interval: Interval) -> str:
    return " – ".join(map(report.percent, interval))


def _errors(interval: Interval | None) -> str | None:
    return None if interval is None else " – ".join(map(report.format_value, interval))
