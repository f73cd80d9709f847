"""The tables and pictures of ``docs/static.md``, from the cells of ``docs/static.jsonl``.

python examples/static/page.py     # prints the tables, draws the pictures
"""

import json
import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from icl_patch.bench.results import table_lines

DOCS = Path(__file__).parents[2] / "docs"
Entry = dict[str, Any]
ORDER = (
    "patch for each token",
    "no context",
    "steering vector",
    "one shot (Mazzawi)",
    "prompt tuning",
    "prompt tuning, equal seconds",
    "prompt tuning, equal parameters",
    "writer alone (PatchKV)",
    "ridge, nothing preserved",
    "ridge",
    "ridge with o_proj",
    "ridge, one weight",
    "ridge, self-study",
    "ridge, self-study, one weight",
    "ridge, self-study of 512, weight 3",
    "auto",
    "distill, nothing preserved",
    "distill, 15 steps",
    "distill, 20 steps",
    "distill",
    "distill, self-study",
    "distill, self-study of 512",
    "ridge, then distill",
    "another context's patch",
    "shuffled answers",
)
# the weight of preserved texts from the first block to the last
_WEIGHTS = {
    "ridge, self-study, one weight": "1 in all blocks (`preserve_first=1`)",
    "ridge, self-study": "10 to 0.1 (the default)",
    "ridge, self-study, κ = 3": "30 to 0.3 (`kappa=3`)",
}
_RANKED = ("auto", "ridge", "distill", "another", "shuffled")
TASKS = {
    "upper": ("format", "upper"),
    "halves": ("format", "halves"),
    "flip": ("format", "flip"),
    "few-shot upper": ("fewshot", "upper"),
    "german": ("language", "german"),
}
KINDS = {
    "recall": "recall",
    "modes": "format",
    "few-shot": "fewshot",
    "languages": "language",
}
_DRAWN = {
    "steering vector": "0.6",
    "prompt tuning": "tab:brown",
    "ridge": "tab:orange",
    "ridge, self-study": "tab:red",
    "distill": "tab:blue",
    "distill, self-study": "tab:green",
    "auto": "tab:purple",
}
_CONTROLS = ("patch for each token", "no context", "another context's patch", "shuffled answers")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "*", "h", "d", "p", "8")
_MARKERS += tuple((points, 1, 0) for points in (4, 3, 6))


def read(file: Path = DOCS / "static.jsonl") -> dict[str, Entry]:
    """The cells of a file by their keys; none if there is no file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {entry["key"]: entry for entry in map(json.loads, lines)}


# -- tables


def spread_of(values: list[float], digits: int = 2) -> str:
    """The mean; of several seeds with the smallest and the largest value."""
    if not values:
        return ""
    mean = f"{sum(values) / len(values):,.{digits}f}"
    if len(values) == 1 or min(values) == max(values):
        return mean
    return f"{mean} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def over_tasks(entries: list[Entry], value: Callable[[Entry], float]) -> float:
    """The mean over the tasks of the mean over each task's seeds."""
    by_task: dict[tuple[str, str], list[float]] = {}
    for entry in entries:
        by_task.setdefault((entry["kind"], entry["name"]), []).append(value(entry))
    return sum(sum(values) / len(values) for values in by_task.values()) / len(by_task)


def _mean(entries: list[Entry], value: Callable[[Entry], float], digits: int = 2) -> str:
    return f"{over_tasks(entries, value):,.{digits}f}" if entries else ""


def table(entries: list[Entry]) -> str:
    """Methods by N and rank: whole answers of each task, then means over the tasks."""
    heads = ["method", "N", "rank", *TASKS, "KL", *KINDS, "CPU s", "bytes"]
    rows = []
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        rank = str(entry["rank"] or "full") if entry["method"].startswith(_RANKED) else ""
        size = entry["rank"] or math.inf
        place = (-entry["n"], ORDER.index(entry["method"]), size, rank)
        groups.setdefault(place, []).append(entry)
    for (n, method, _, rank), group in sorted(groups.items()):
        row = [ORDER[method], str(-n), rank]
        for task in TASKS.values():
            found = [e["quality"]["whole"] for e in group if (e["kind"], e["name"]) == task]
            row.append(spread_of(found))
        row.append(_mean(group, lambda e: e["quality"]["kl"], 3))
        for kind in KINDS.values():
            asked = [e for e in group if kind in e.get("others", {})]
            row.append(_mean(asked, lambda e, kind=kind: e["others"][kind]["whole"]))
        timed = [e for e in group if "cpu_seconds" in e]
        row.append(_mean(timed, lambda e: e["cpu_seconds"], 1))
        row.append(_mean(timed, lambda e: e["bytes"], 0))
        rows.append(row)
    return "\n".join(table_lines(heads, rows))


def regression_table(entries: list[Entry]) -> str:
    """The relative error of the linear regression by method and N."""
    counts = sorted({entry["n"] for entry in entries})
    rows = []
    for method, rank in dict.fromkeys((entry["method"], entry["rank"]) for entry in entries):
        cells = [
            spread_of(
                [
                    e["quality"]["error"]
                    for e in entries
                    if (e["method"], e["rank"], e["n"]) == (method, rank, n)
                ],
                4,
            )
            for n in counts
        ]
        shown = (rank or "full") if method == "ridge" else ""
        rows.append([method, str(shown), *cells])
    return "\n".join(table_lines(["method", "rank", *(f"N = {n}" for n in counts)], rows))


def recall_table(entries: list[Entry]) -> str:
    """Whole answers on a context of three facts of which the sample asks two."""
    heads = ["method", "seen", "paraphrased", "unseen"]
    rows = [
        [entry["method"]]
        + [f"{entry[name]['whole']:.2f}" for name in ("seen", "paraphrased", "quality")]
        for entry in entries
    ]
    return "\n".join(table_lines(heads, rows))


def weights_table(entries: list[Entry]) -> str:
    """Right answers, and unrelated prompts that keep theirs, by the weight of preserved texts."""
    tasks = ("german", "few-shot upper")
    heads = ["weight", *(head for task in tasks for head in (task, *KINDS))]
    rows = []
    for method, weight in _WEIGHTS.items():
        row = [weight]
        for task in tasks:
            found = [
                e
                for e in entries
                if (e["method"], e["kind"], e["name"], e["n"]) == (method, *TASKS[task], 64)
            ]
            row.append(_mean(found, lambda e: e["quality"]["whole"]))
            for kind in KINDS.values():
                row.append(_mean(found, lambda e, kind=kind: e["others"][kind]["whole"]))
        rows.append(row)
    return "\n".join(table_lines(heads, rows))


def default_table(entries: list[Entry]) -> str:
    """The default beside both of its methods, over the tasks of both models, three seeds."""
    compared = [e for e in entries if e["rank"] == 4 and e["seed"] < 3]
    rows = []
    for n in (4, 16, 64):
        for method in ("ridge", "distill", "auto"):
            row = [method, str(n)]
            for model in ("embedded", "llama"):
                cells = [
                    e for e in compared if (e["method"], e["n"], e["model"]) == (method, n, model)
                ]
                row += [_mean(cells, lambda e: e["quality"]["whole"]), _mean(cells, _kept)]
                row.append(_mean(cells, lambda e: e["cpu_seconds"], 1))
            rows.append(row)
    heads = ["method", "N", *("right", "kept", "CPU s"), *("Llama: right", "kept", "CPU s")]
    return "\n".join(table_lines(heads, rows))


def _kept(entry: Entry) -> float:
    """The share of unrelated prompts that keep their answer, the mean over their kinds."""
    return sum(x["whole"] for x in entry["others"].values()) / len(entry["others"])


def _is_main(entry: Entry) -> bool:
    """Whether a cell has the rank of the tables by N."""
    return entry["method"] not in ("ridge", "distill", "auto") or entry["rank"] == 4


def tables(entries: list[Entry]) -> str:
    """All tables of the page."""
    regression = [e for e in entries if e["kind"] == "regression"]
    tasks = [e for e in entries if e["kind"] not in ("regression", "recall")]
    own = [e for e in tasks if e["model"] == "embedded"]
    by_rank = [e for e in own if e["method"] in ("ridge", "distill") and e["n"] == 64]
    weights = [e for e in own if e["method"] in _WEIGHTS]
    varied = [e for e in weights if e["method"] != "ridge, self-study"]
    found = [table([e for e in own if _is_main(e) and e not in varied])]
    if any(not _is_main(e) for e in by_rank):
        found.append(table(by_rank))
    if llama := [e for e in tasks if e["model"] == "llama"]:
        found.append(table(llama))
    if any(e["method"] == "auto" for e in tasks):
        found.append(default_table(tasks))
    if varied:
        found.append(weights_table(weights))
    if recall := [e for e in entries if e["kind"] == "recall" and e["seed"] == 0]:
        found.append(recall_table(recall))
    if regression:
        found.append(regression_table(regression))
    return "\n\n".join(found)


# -- pictures


def _lines(axis: Axes, entries: list[Entry], value: Callable[[Entry], float]) -> None:
    """A line over N for each method: the mean of the seeds, and their range."""
    for method, color in _DRAWN.items():
        by_n: dict[int, list[float]] = {}
        for entry in entries:
            if entry["method"] == method:
                by_n.setdefault(entry["n"], []).append(value(entry))
        counts = sorted(by_n)
        if not counts:
            continue
        mean = [sum(by_n[n]) / len(by_n[n]) for n in counts]
        axis.plot(counts, mean, marker="o", markersize=4, color=color, label=method)
        low, high = ([f(by_n[n]) for n in counts] for f in (min, max))
        axis.fill_between(counts, low, high, color=color, alpha=0.15)


def draw_quality(entries: list[Entry], path: Path) -> None:
    """Whole answers of the context over the number of given questions, a panel a task."""
    figure, axes = plt.subplots(1, len(TASKS), figsize=(13, 3.2), sharey=True, layout="constrained")
    for axis, (title, task) in zip(axes, TASKS.items(), strict=True):
        own = [e for e in entries if (e["kind"], e["name"]) == task]
        _lines(axis, own, lambda entry: entry["quality"]["whole"])
        axis.set(title=title, xscale="log", xlabel="given questions", ylim=(-0.03, 1.03))
        axis.set(xlim=(0.8, 330))
        axis.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("whole answers right")
    handles = {h.get_label(): h for axis in axes for h in axis.get_lines()}
    figure.legend(
        handles=list(handles.values()), loc="outside lower center", ncols=7, frameon=False
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_cost(entries: list[Entry], path: Path) -> None:
    """Means over the tasks at 64 questions: right answers over CPU seconds, and over the unrelated
    prompts that keep their answer.
    """
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    groups = {
        method: [e for e in entries if e["method"] == method and e["n"] == 64 and "others" in e]
        for method in ORDER
        if method not in _CONTROLS
    }
    whole = set(TASKS.values())
    shown = [m for m, group in groups.items() if {(e["kind"], e["name"]) for e in group} == whole]
    for method, marker in zip(shown, cycle(_MARKERS), strict=False):
        group = groups[method]
        right = over_tasks(group, lambda e: e["quality"]["whole"])
        kept = over_tasks(group, _kept)
        style = {"color": _DRAWN.get(method, "black"), "marker": marker}
        seconds = over_tasks(group, lambda e: e["cpu_seconds"])
        axes[0].plot([seconds], [right], linestyle="", **style)
        axes[1].plot([kept], [right], linestyle="", label=method, **style)
    axes[0].set(xscale="log", xlabel="CPU seconds of the fit", ylabel="whole answers right")
    axes[0].set_xticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    axes[0].minorticks_off()
    axes[1].set(xlabel="unrelated prompts that keep their answer", xlim=(-0.03, 1.03))
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Print the tables and draw the pictures."""
    entries = list(read().values())
    print(tables(entries))
    drawn = [e for e in entries if e["kind"] != "regression" and e["model"] == "embedded"]
    drawn = [e for e in drawn if _is_main(e)]
    draw_quality(drawn, DOCS / "pictures" / "static-quality.png")
    draw_cost(drawn, DOCS / "pictures" / "static-cost.png")


if __name__ == "__main__":
    main()
