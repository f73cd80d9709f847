"""What ``verify_dataset`` measured, as a table, a picture and files."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from icl_patch.evaluation import report
from icl_patch.evaluation.verify_dataset import DatasetReport, Interval

_PANELS = (
    ("share of the same tokens", "match", None),
    ("L∞ of logits / max |logit|", "linf", "linf_max"),
    ("total variation distance", "tvd", "tvd_max"),
)


def table(result: DatasetReport) -> report.ReportTable:
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


def write(result: DatasetReport, folder: Path) -> None:
    """Write ``report.md``, ``report.json`` and ``tasks.png`` into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    report.write_json(folder / "report.json", result.to_dict())
    draw(result, folder / "tasks.png")
    lines = "".join(f"- {line}\n" for line in verdict_lines(result))
    text = f"{report.to_markdown(table(result))}\n{lines}\n![by task](tasks.png)\n"
    (folder / "report.md").write_text(text, encoding="utf-8")


def draw(result: DatasetReport, path: Path) -> None:
    """Match, L∞ and TVD of every task with their intervals; × is the largest error, the dashed line
    the noise of the unmodified model.

    Args:
        path: a file name ending in .png, .svg or .pdf.
    """
    tasks = [*result.tasks, result.total][::-1]  # the first on top
    places = range(len(tasks))
    figure = Figure(figsize=(11, 1.6 + 0.35 * len(tasks)), layout="constrained")
    for axis, (label, name, largest) in zip(figure.subplots(1, 3), _PANELS, strict=True):
        for place, task in enumerate(tasks):
            if interval := getattr(task, f"{name}_interval"):
                axis.hlines(place, *interval, linewidth=2)
        axis.plot([getattr(task, name) for task in tasks], places, "o")
        if largest is None:
            axis.set_xlim(right=1.005)
        else:
            most, floor = getattr(result.total, largest), result.noise_floor[largest]
            axis.set_xscale("symlog", linthresh=1e-9)
            axis.set_xlim(-2e-10, 10 * max(most, floor, 1e-9))
            axis.plot([getattr(task, largest) for task in tasks], places, "x", color="0.3")
            axis.axvline(floor, linestyle="--", linewidth=1, color="0.5")
        axis.set_yticks(places, [task.task for task in tasks] if largest is None else [])
        axis.set_ylim(-0.6, len(tasks) - 0.4)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    figure.suptitle(f"{result.model}, {result.update}, {result.dtype}")
    figure.savefig(path, dpi=150)


def _within(show: Callable[[float], str], value: float, interval: Interval | None) -> str:
    """A value with its interval, if there is one."""
    return show(value) + (f" ({' – '.join(map(show, interval))})" if interval else "")
