"""The page and the picture of the evaluation, from its cells.

python examples/static/page.py [CELLS.jsonl] [--out docs]
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

from icl_patch.evaluation.report import markdown as table

matplotlib.use("Agg")

DOCS = Path(__file__).parents[2] / "docs"
CELLS = DOCS / "data" / "static-cells.jsonl"
BASE = DOCS / "data" / "static-cells-base.jsonl"
Entry = dict[str, Any]
Number = Callable[[Entry], float]

STYLES = {  # by method: the colour and marker of the picture
    "steering vector": ("#a6761d", "v"),
    "static patch": ("#1b9e77", "o"),
    "static patch, 12 questions": ("#66c2a5", "o"),
    "LoRA (PEFT)": ("#1f78b4", "s"),
    "prompt tuning (PEFT)": ("#d95f02", "D"),
}
METHODS = ("no context", "context", *STYLES)
KINDS = {"few_shot": "few-shot lines", "chat": "chats", "passage": "passages", "code": "code"}
FACTS = ("weak, question", "weak, paraphrases", "strong, question", "strong, paraphrases")
_DONE_BY_CONTEXT = 0.5  # accuracy with the context of the tasks in the picture

HEAD = """\
# Static patches beside other methods

`make static` measures SmolLM2-135M-Instruct in bf16 on one thread, and writes this page from
[the measured cells](data/static-cells.jsonl). We chose the tasks and the numbers of questions
(`examples/static/evaluation.py`) before the first fit. We also chose the lines of the contexts
before it; for capitals and comparatives we chose them by the accuracy with the context.

- *context* is the model with its context, and *no context* the model alone.
- *static patch* is `static.fit` with its defaults. A second column or row uses 12 questions.
- *steering vector* adds the mean difference of the residual stream after the best of six blocks.
- *LoRA (PEFT)* has rank 8 on the MLPs of all blocks. AdamW minimises the same divergence on the
  same texts, with the static patch's largest number of steps. The first task of each kind decides
  between two learning rates.
- *prompt tuning (PEFT)* trains 16 virtual tokens for the same CPU time as the static patch.

Brackets show the range over seeds.

![right answers over the seconds of a fit](pictures/static-front.png)

Each point is the mean over the few-shot tasks that the context gets at least half right.
"""
SECTIONS = {
    "few_shot": """
## Few-shot tasks

The context has eight lines, and the fit uses 48 questions. The table shows the percentage of 40
held-out questions that the model answers correctly with greedy decoding:
""",
    "chats": """
## Chats

The context is the system message, and the fit uses 64 questions. We compare each method with the
model that has the system message, on that model's answers to 24 held-out chats. The table shows the
KL divergence in nats per token and, in brackets, the share of tokens at which both have the same
first choice. Both are means over seeds:
""",
    "facts": """
## Facts

One patch covers 32 statements that contradict true facts. The fit uses a question and a paraphrase
of each. The table shows the percentage of prompts that get the new answer. *Weak* are the 16 facts
that the model believes least without the statement, and *strong* the 16 that it believes most.
*Neighbours* are prompts about other facts. The percentage counts those at which the first choice
stays the same for each token of the answer:
""",
    "kept": """
## Unrelated prompts

Each kind has 24 prompts. The table shows the percentage of tokens in the unpatched model's answer
that are still the first choice, over all tasks. In bf16 the unpatched model's own choices vary with
the batch: the row *no context* shows how much.
""",
    "cost": """
## Cost

The table shows means over all tasks: CPU seconds, with the time for the answers that the fit uses,
and the stored bytes.
""",
    "base": """
## A base model

Gemma 3 270M has no chat template, and its blocks end in a scale. It is measured on the few-shot
tasks, with one seed ([cells](data/static-cells-base.jsonl)), by `PYTHONPATH=build/peft build/python
examples/static/evaluation.py FOLDER --base`. The table shows the percentage of right answers, as
above; the percentage of tokens at which the patched model and the model with the context have the
same first choice; and the CPU seconds of a fit, with its answers.
""",
}


def read(path: Path = CELLS) -> list[Entry]:
    """The cells of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of(entries: Iterable[Entry], **wanted: Any) -> list[Entry]:
    """The entries with these values."""
    return [e for e in entries if all(e[name] == value for name, value in wanted.items())]


def by_task(entries: Sequence[Entry], number: Number) -> dict[tuple[str, str], list[float]]:
    """The numbers of each task's seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for entry in entries:
        found.setdefault((entry["kind"], entry["task"]), []).append(number(entry))
    return found


def over_tasks(entries: Sequence[Entry], number: Number) -> float:
    """The mean over the tasks of the means over the seeds."""
    return mean(mean(values) for values in by_task(entries, number).values())


def shown(entries: Sequence[Entry], number: Number) -> str:
    """The mean over the tasks, with the range over the seeds if it is one task's."""
    if not entries:
        return "–"
    text = f"{over_tasks(entries, number):.0f}"
    values, *others = by_task(entries, number).values()
    if others or len(values) == 1:
        return text
    return f"{text} [{min(values):.0f}–{max(values):.0f}]"


def percent(group: str, name: str) -> Number:
    """A share of a group of tests, in %."""
    return lambda entry: 100 * entry["tests"][group][name]


Cell = Callable[[list[Entry]], str]


def grid(head: str, rows: dict[str, list[Entry]], columns: dict[str, Cell]) -> str:
    """A table with a row for each group of entries."""
    lines = [[name, *(cell(own) for cell in columns.values())] for name, own in rows.items()]
    return table([head, *columns], lines)


def tables(entries: Sequence[Entry]) -> dict[str, str]:
    """The tables of all sections of which there are entries."""
    right, same, kl = (
        percent("right", "accuracy"),
        percent("answers", "agreement"),
        lambda e: e["tests"]["answers"]["kl"],
    )
    few_shot, chats, facts = (of(entries, kind=kind) for kind in ("few_shot", "chats", "facts"))
    kept = [e for e in entries if e["unrelated"]]

    def by(key: str, own: Sequence[Entry], values: Sequence[str] = ()) -> dict[str, list[Entry]]:
        found = {x: of(own, **{key: x}) for x in values or dict.fromkeys(e[key] for e in own)}
        return {x: group for x, group in found.items() if group}

    def shares(own: Sequence[Entry], numbers: dict[str, Number]) -> str:
        return grid(
            "method",
            by("method", own, METHODS),
            {
                name: lambda group, number=number: shown(group, number)
                for name, number in numbers.items()
            },
        )

    def divergence(group: list[Entry]) -> str:
        return f"{over_tasks(group, kl):.2f} ({over_tasks(group, same):.0f} %)"

    def average(name: str) -> Cell:
        return lambda group: f"{over_tasks(group, lambda e: e[name]):,.0f}"

    found = {
        "few_shot": grid(
            "task",
            {**by("task", few_shot), "mean": few_shot},
            {
                method: lambda own, method=method: shown(of(own, method=method), right)
                for method in by("method", few_shot, METHODS)
            },
        ),
        "chats": grid(
            "method",
            by("method", chats, METHODS),
            {
                task: lambda own, task=task: divergence(of(own, task=task))
                for task in by("task", chats)
            },
        ),
        "facts": shares(
            facts,
            {name: percent(name, "accuracy") for name in FACTS}
            | {"neighbours": percent("neighbours", "kept")},
        ),
        "kept": shares(
            kept,
            {
                title: lambda e, kind=kind: 100 * e["unrelated"][kind]["agreement"]
                for kind, title in KINDS.items()
            },
        ),
        "cost": grid(
            "method",
            by("method", entries, tuple(STYLES)),
            {"CPU seconds": average("cpu_seconds"), "bytes": average("nbytes")},
        ),
    }
    groups = {"few_shot": few_shot, "chats": chats, "facts": facts}
    return {name: text for name, text in found.items() if groups.get(name, entries)}


def base_table(entries: Sequence[Entry]) -> str:
    """The few-shot tasks of a model without a chat template."""
    right, same = percent("right", "accuracy"), percent("answers", "agreement")
    methods = ("no context", "context", "static patch")
    by_method = {method: of(entries, method=method) for method in methods}
    tasks = [*dict.fromkeys(e["task"] for e in entries)]

    def row(name: str, **wanted: Any) -> list[str]:
        own = {method: of(found, **wanted) for method, found in by_method.items()}
        seconds = over_tasks(own["static patch"], lambda e: e["cpu_seconds"])
        cells = [*(shown(found, right) for found in own.values()), shown(own["static patch"], same)]
        return [name, *cells, f"{seconds:.0f}"]

    rows = [*(row(task, task=task) for task in tasks), row(f"mean of {len(tasks)}")]
    return table(["task", *methods, "same tokens", "CPU seconds"], rows)


def draw(entries: Sequence[Entry], path: Path) -> None:
    """The share of the context's accuracy over the seconds of the fit, a marker a method."""
    entries = of(entries, kind="few_shot")
    right = percent("right", "accuracy")
    best = {e["task"]: right(e) for e in of(entries, method="context")}
    done = {task: value for task, value in best.items() if value >= 100 * _DONE_BY_CONTEXT}
    figure, axis = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
    for method, (colour, marker) in STYLES.items():
        group = [e for e in of(entries, method=method) if e["task"] in done]
        if not group:
            continue
        y = over_tasks(group, lambda e: 100 * right(e) / done[e["task"]])
        x = over_tasks(group, lambda e: e["cpu_seconds"])
        axis.plot([x], [y], marker, color=colour, markersize=11, label=method)
    alone = [e for e in of(entries, method="no context") if e["task"] in done]
    levels = {"with the context": 100.0}
    if alone:
        levels["without it"] = over_tasks(alone, lambda e: 100 * right(e) / done[e["task"]])
    for name, value in levels.items():
        axis.axhline(value, color="0.5", linestyle="--", linewidth=1)
        axis.annotate(
            name, (0.01, value), xycoords=("axes fraction", "data"), va="bottom", color="0.4"
        )
    axis.set(xscale="log", ylim=(-4, 110), xlabel="seconds of the CPU for a fit")
    axis.set_ylabel("right answers,\n% of those with the context")
    for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        formatter("{x:g}")
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def complete(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of the tasks on which all methods of their kind have been run."""

    def methods(**of_them: Any) -> set[str]:
        return {e["method"] for e in of(entries, **of_them)}

    return [e for e in entries if methods(task=e["task"]) == methods(kind=e["kind"])]


def page(entries: Sequence[Entry], base: Sequence[Entry] = ()) -> str:
    """The whole page; ``base`` are the cells of a model without a chat template."""
    found = tables(entries) | ({"base": base_table(base)} if base else {})
    return HEAD + "".join(f"{SECTIONS[name]}\n{x}\n" for name, x in found.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page and its picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", type=Path, nargs="?", default=CELLS)
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder of the page")
    options = parser.parse_args(arguments)
    entries = complete(read(options.cells))
    draw(entries, options.out / "pictures" / "static-front.png")
    base = complete(read(BASE)) if options.cells == CELLS else []
    (options.out / "static-results.md").write_text(page(entries, base), encoding="utf-8")


if __name__ == "__main__":
    main()
