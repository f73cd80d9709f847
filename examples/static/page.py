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
Entry = dict[str, Any]
Number = Callable[[Entry], float]

STYLES = {  # by method: the colour and marker of the picture
    "steering vector": ("#a6761d", "v"),
    "task vector": ("#e6ab02", "^"),
    "static patch": ("#1b9e77", "o"),
    "static patch, 12 questions": ("#66c2a5", "o"),
    "LoRA (PEFT)": ("#1f78b4", "s"),
    "prompt tuning (PEFT)": ("#d95f02", "D"),
}
METHODS = ("no context", "context", "patch for each token", *STYLES)
KINDS = {"few_shot": "few-shot lines", "chat": "chats", "passage": "passages", "code": "code"}
FACTS = ("weak, question", "weak, paraphrases", "strong, question", "strong, paraphrases")
_DONE_BY_CONTEXT = 0.5  # accuracy with the context of the tasks in the picture

HEAD = """\
# Static patches beside other methods

`make static` measures SmolLM2-135M-Instruct in bf16 on one thread, and writes this page from
[its cells](data/static-cells.jsonl). Tasks and numbers of questions
(`examples/static/evaluation.py`) were chosen before anything was fitted; so were the lines of the
contexts, for capitals and comparatives by the accuracy with the context.

- *context*: the model with its context; *no context*: the model alone.
- *patch for each token*: the exact patch of this package, which is made for one prompt. **It was
  tried on the first eight held-out prompts of each column alone.** Its replays chose the token of
  the run that each patch was computed from at {same} of {tokens} tokens; the row *context* runs in
  batches, which in bf16 changes some tokens.
- *static patch*: `static.fit` with its defaults; also with 12 questions.
- *steering vector*, *task vector*: the mean difference of the residual stream is added, or the mean
  stream with the context put in the question's last token, behind the best of six blocks.
- *LoRA (PEFT)*: rank 8 on the MLPs of all blocks, AdamW on the same divergence and texts, as many
  steps as the static patch makes at most; the better of two learning rates on the first task of a
  kind, without the time of the other.
- *prompt tuning (PEFT)*: 16 virtual tokens, for as many seconds of the CPU as the static patch.

Brackets hold the range over seeds.
"""
SECTIONS = {
    "few_shot": """
## Few-shot tasks

Eight lines are the context and 48 questions are fitted. The share of 40 held-out questions (for
*patch for each token* of 8) whose right answer is the greedy one, in %:
""",
    "chats": """
## Chats

The system message is the context and 64 questions are fitted. On 24 held-out chats (*patch for
each token*: 8), at the tokens of the model's answer with the system message: KL divergence in nats
a token, and in brackets the share of tokens that are the first choice with the system message,
too; means over seeds:
""",
    "facts": """
## Facts

One patch for 32 statements that contradict what is true, fitted on a question and a paraphrase of
each. The share of prompts that get the new answer, in %, for the 16 facts that the model believes
least without the statement, and the 16 that it believes most (*patch for each token*: 8 each).
*Neighbours*: prompts on other facts where each token of the answer has the first choice that it
had:
""",
    "kept": """
## Unrelated prompts

24 prompts of each kind, each with the unpatched model's greedy answer of eight tokens: the share of
these tokens that are still the first choice, in %, over all tasks. In bf16 even the unpatched model
chooses otherwise in other batches: that is the row *no context*.
""",
    "cost": """
## Cost

Means over all tasks: seconds on the clock, in which other processes ran too, and of the CPU,
answers to fit on included; *floor*, the CPU seconds of as many forward and backward passes of the
whole model over such batches, which a fit that computes its first blocks once can stay below; bytes
of what is stored; *refused*, fits that raise `HarmfulPatchError`.
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


def shown(entries: Sequence[Entry], number: Number, form: str = "{:.0f}") -> str:
    """The mean over the tasks, with the range over the seeds if it is one task's."""
    if not entries:
        return "–"
    text = form.format(over_tasks(entries, number))
    ((values), *others) = by_task(entries, number).values()
    if others or len(values) == 1:
        return text
    return f"{text} [{form.format(min(values))}–{form.format(max(values))}]"


def percent(group: str, name: str) -> Number:
    """A share of a group of tests, in %."""
    return lambda entry: 100 * entry["tests"][group][name]


def few_shot(entries: Sequence[Entry]) -> str:
    """Right answers by task and method."""
    methods, right = methods_of(entries), percent("right", "accuracy")
    rows = [
        [task, *(shown(of(entries, task=task, method=m), right) for m in methods)]
        for task in dict.fromkeys(e["task"] for e in entries)
    ]
    rows.append(["mean", *(shown(of(entries, method=m), right) for m in methods)])
    return table(["task", *methods], rows)


def methods_of(entries: Sequence[Entry]) -> list[str]:
    """The methods with entries, in the page's order."""
    return [method for method in METHODS if of(entries, method=method)]


def chats(entries: Sequence[Entry]) -> str:
    """KL, and agreement in brackets, by method and chat."""
    names = list(dict.fromkeys(e["task"] for e in entries))
    rows = []
    for method in methods_of(entries):
        groups = [of(entries, method=method, task=name) for name in names]
        kl = [f"{over_tasks(x, lambda e: e['tests']['answers']['kl']):.2f}" for x in groups]
        same = [f"{over_tasks(x, percent('answers', 'agreement')):.0f}" for x in groups]
        rows.append([method, *(f"{x} ({y} %)" for x, y in zip(kl, same, strict=True))])
    return table(["method", *names], rows)


def facts(entries: Sequence[Entry]) -> str:
    """New answers by method and belief, and the neighbours."""
    rows = []
    for method in methods_of(entries):
        group = of(entries, method=method)
        near = [e for e in group if "neighbours" in e["tests"]]
        numbers = [shown(group, percent(name, "accuracy")) for name in FACTS]
        rows.append([method, *numbers, shown(near, percent("neighbours", "kept"))])
    return table(["method", *FACTS, "neighbours"], rows)


def kept(entries: Sequence[Entry]) -> str:
    """Tokens of the answers to unrelated prompts that stay, by method and kind."""
    entries = [e for e in entries if e["unrelated"]]
    rows = [
        [
            method,
            *(
                shown(
                    of(entries, method=method),
                    lambda e, kind=kind: 100 * e["unrelated"][kind]["agreement"],
                )
                for kind in KINDS
            ),
        ]
        for method in methods_of(entries)
    ]
    return table(["method", *KINDS.values()], rows)


def cost(entries: Sequence[Entry]) -> str:
    """Seconds, steps, bytes and refusals by method."""
    rows = []
    for method in methods_of(entries):
        group = of(entries, method=method)
        seconds = [
            f"{over_tasks(group, lambda e, n=name: e[n]):.0f}"
            for name in ("seconds", "cpu_seconds")
        ]
        floors = all("floor" in e for e in group)
        floor = f"{over_tasks(group, lambda e: e['floor']):.0f}" if floors else "–"
        refused = sum(bool(e.get("refused")) for e in group)
        nbytes = f"{over_tasks(group, lambda e: e['nbytes']):,.0f}"
        rows.append([method, *seconds, floor, nbytes, f"{refused} of {len(group)}"])
    rows = [row for row in rows if row[0] in STYLES]
    return table(["method", "seconds", "CPU seconds", "floor", "bytes", "refused"], rows)


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
    for level, name in ((100.0, "with the context"), (None, "without it")):
        if level is None and not alone:
            continue
        value = level or over_tasks(alone, lambda e: 100 * right(e) / done[e["task"]])
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
    methods: dict[str, set[str]] = {}
    for e in entries:
        methods.setdefault(e["kind"], set()).add(e["method"])
    of_task: dict[str, set[str]] = {}
    for e in entries:
        of_task.setdefault(e["task"], set()).add(e["method"])
    return [e for e in entries if of_task[e["task"]] == methods[e["kind"]]]


def page(entries: Sequence[Entry]) -> str:
    """The whole page."""
    parts = {
        "few_shot": (few_shot, of(entries, kind="few_shot")),
        "chats": (chats, of(entries, kind="chats")),
        "facts": (facts, of(entries, kind="facts")),
        "kept": (kept, entries),
        "cost": (cost, entries),
    }
    picture = (
        "\n![right answers over the seconds of a fit](pictures/static-front.png)\n\n"
        "Mean over the few-shot tasks of which the context gets at least half right.\n"
    )
    found = [f"{SECTIONS[name]}\n{make(own)}\n" for name, (make, own) in parts.items() if own]
    counts = of(entries, method="patch for each token")
    same, tokens = (sum(entry[name] for entry in counts) for name in ("same_token", "tokens"))
    return HEAD.format(same=f"{same:,}", tokens=f"{tokens:,}") + picture + "".join(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page and its picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", type=Path, nargs="?", default=CELLS)
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder of the page")
    options = parser.parse_args(arguments)
    entries = complete(read(options.cells))
    draw(entries, options.out / "pictures" / "static-front.png")
    (options.out / "static-results.md").write_text(page(entries), encoding="utf-8")


if __name__ == "__main__":
    main()
