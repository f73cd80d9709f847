"""Static patches on the embedded model's tasks, beside other methods that replace a context.

    python examples/static/evaluation.py             # the reduced grid
    python examples/static/evaluation.py --full      # N from 1 to 256, ranks 1 to full, five seeds

Each cell is appended to ``docs/static.jsonl`` as it is made; a run that was stopped goes on. At the
end the tables of ``docs/static.md`` are printed, from all cells of the file.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from baselines import Logits, one_shot, prompt_tuning, steering_vector
from torch import Tensor

from icl_patch import ContextPatcher, embedded, static
from icl_patch.evaluation.embedded import tasks
from icl_patch.static.block_parts import read_blocks
from icl_patch.static.block_runner import Batch, BlockRunner, make_batches
from icl_patch.static.examples import Example, Row, answered, greedy, rows_of
from icl_patch.static.report import Tally, plain_logits, spread

DOCS = Path(__file__).parents[2] / "docs"
LONGEST = 27  # tokens of an answer, line end included
PRESERVED = 50  # generic documents
OTHER = 10  # unrelated prompts of each kind
FOLDS = 4


@dataclass(frozen=True)
class Cell:
    """One fit: its task, method, questions, rank and seed."""

    kind: str
    name: str
    method: str
    n: int
    rank: int | None
    seed: int

    @property
    def key(self) -> str:
        """Its name in the file."""
        return "/".join(map(str, asdict(self).values()))


# -- tasks


def contexts(kind: str, name: str, seed: int) -> str:
    """The context of a task."""
    rng = random.Random(f"{kind}/{name}/{seed}")
    if kind == "fewshot":
        words = rng.sample(tasks._atoms("word", True), 3)
        return "".join(f"{word}>{tasks._FUNCTIONS[name](word)}\n" for word in words)
    if kind == "recall":
        values = rng.sample(tasks._atoms("value", True), 3)
        return name + "".join(f" {a}{value}" for a, value in zip("abc", values, strict=True)) + "\n"
    return f"say {name}\n" if kind == "language" else f"mode {name}\n"


def questions(kind: str, name: str, count: int, held_out: bool, seed: int) -> list[str]:
    """Questions of a task. Recall has three facts: c is never asked in the sample."""
    rng = random.Random(f"{kind}/{name}/{seed}/{held_out}")
    if kind == "recall":
        return [f"{name} c"] if held_out else [f"{name} {'ab'[i % 2]}" for i in range(2)]
    if kind == "language":
        return [f"{triple}." for triple in rng.sample(tasks._atoms("digits", held_out), count)]
    return [f"{word}>" for word in rng.sample(tasks._atoms("word", held_out), count)]


@cache
def model() -> Any:
    """The embedded model and its tokenizer."""
    return embedded.load()


@cache
def runner() -> BlockRunner:
    """Its blocks."""
    return BlockRunner(model()[0], read_blocks(model()[0]))


@cache
def example(kind: str, name: str, count: int, held_out: bool, seed: int) -> Example:
    """A task's answered example."""
    found = Example.from_text(
        model()[1],
        contexts(kind, name, seed),
        questions(kind, name, count, held_out, seed),
        end="\n",
    )
    return answered(model()[0], [found], LONGEST)[0]


@cache
def preserved() -> list[tuple[int, ...]]:
    """Documents of all kinds, each with a context of its own."""
    rng = random.Random(0)
    return static.documents(model()[1], [tasks.training_document(rng)[0] for _ in range(PRESERVED)])


@cache
def unrelated() -> list[tuple[str, list[Row]]]:
    """Held-out prompts of each kind with their own contexts, and the model's answers."""
    network, tokenizer = model()
    found = []
    for kind in embedded.KINDS:
        prompts = embedded.held_out_prompts(kind, OTHER, seed=1)
        ids = static.documents(tokenizer, [p.context + p.question for p in prompts])
        end = tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])
        answers = greedy(network, ids, LONGEST, end)
        rows = []
        for prompt, answer in zip(ids, answers, strict=True):
            whole = (*prompt, *answer[:-1])
            rows.append(Row(whole, whole, len(whole), len(prompt) - 1, answer))
        found.append((kind, rows))
    return found


# -- methods


def patched(patch: static.StaticPatch) -> tuple[Logits, int]:
    """The model with a static patch."""

    def logits(ids: Tensor) -> Tensor:
        with patch.applied(model()[0]):
            return plain_logits(runner(), ids)

    return logits, patch.nbytes


def static_fit(cell: Cell, **options: Any) -> static.StaticPatch:
    """A fit of the cell's rank; N below the folds is fitted without them."""
    sample = example(cell.kind, cell.name, cell.n, False, cell.seed)
    folds = FOLDS if len(sample.questions) >= FOLDS else 1
    defaults = {"rank": cell.rank, "preserve": preserved(), "folds": folds}
    return static.fit(model()[0], [sample], **{**defaults, **options})


def distilled(cell: Cell, **options: Any) -> static.StaticPatch:
    """Distillation with the cell's seed."""
    settings = static.Distillation(seed=cell.seed)
    return static_fit(cell, method="distill", distillation=settings, **options)


def batches(cell: Cell) -> list[Batch]:
    """The cell's sample before the first block."""
    rows = rows_of([example(cell.kind, cell.name, cell.n, False, cell.seed)])
    return make_batches(runner(), rows, [i % FOLDS for i in range(len(rows))], 0.0)


def other_context(cell: Cell) -> static.StaticPatch:
    """A control: the patch of another context."""
    names = {"language": "spanish", "recall": "zzz"}
    return static_fit(replace(cell, name=names.get(cell.kind, "twin")))


def shuffled(cell: Cell) -> static.StaticPatch:
    """A control: every question with another question's answer."""
    sample = example(cell.kind, cell.name, cell.n, False, cell.seed)
    assert sample.answers is not None
    mixed = replace(sample, answers=(*sample.answers[1:], sample.answers[0]))
    return static.fit(
        model()[0], [mixed], rank=cell.rank, preserve=preserved(), folds=min(FOLDS, cell.n)
    )


METHODS: dict[str, Callable[[Cell], tuple[Logits, int]]] = {
    "no context": lambda cell: (lambda ids: plain_logits(runner(), ids), 0),
    "steering vector": lambda cell: steering_vector(runner(), batches(cell)),
    "one shot (Mazzawi)": lambda cell: one_shot(runner(), batches(cell), FOLDS),
    "prompt tuning": lambda cell: prompt_tuning(runner(), batches(cell), 16, 100, cell.seed),
    "writer alone (PatchKV)": lambda cell: patched(
        static_fit(cell, parts=("writer",), rank=None, preserve=())
    ),
    "ridge, nothing preserved": lambda cell: patched(static_fit(cell, preserve=())),
    "ridge": lambda cell: patched(static_fit(cell)),
    "ridge with o_proj": lambda cell: patched(
        static_fit(cell, parts=("o_proj", "readers", "writer"))
    ),
    "distill, nothing preserved": lambda cell: patched(distilled(cell, preserve=())),
    "distill": lambda cell: patched(distilled(cell)),
    "ridge, then distill": lambda cell: patched(distilled(cell, start=static_fit(cell))),
    "another context's patch": lambda cell: patched(other_context(cell)),
    "shuffled answers": lambda cell: patched(shuffled(cell)),
}
TASKS = [("format", name) for name in ("upper", "halves", "flip")]
TASKS += [("fewshot", "upper"), ("language", "german")]
RANKED = ("ridge", "distill")  # methods that are measured at every rank


def per_token(cell: Cell) -> dict[str, Any]:
    """The ceiling: a patch for each token, replayed without the context."""
    test = example(cell.kind, cell.name, 100, True, cell.seed)
    tally = Tally()
    made = make_batches(runner(), rows_of([test]), [0] * len(test.questions), 0.0)
    teachers = [spread(batch, plain_logits(runner(), batch.teacher.ids)) for batch in made]
    with ContextPatcher(model()[0], "stable") as patcher:
        for batch, wanted in zip(made, teachers, strict=True):
            ids = batch.student.ids
            first, count = len(test.prefix), len(ids)
            context = torch.tensor([test.context]).expand(count, -1)
            patch = patcher.compute(
                context, ids[:, first:], prefix_ids=ids[:, :first], kept_mask=batch.valid[:, first:]
            )
            logits = patcher.forward(patch.kept_ids, patch)
            tally.add(batch, wanted, torch.cat([wanted[:, :first], logits], 1))
    return {"quality": asdict(tally.quality())}


# -- cells


def quality(rows: list[Row], logits: Logits) -> dict[str, Any]:
    """Of a method on rows."""
    tally = Tally()
    for batch in make_batches(runner(), rows, [0] * len(rows), 0.0):
        wanted = spread(batch, plain_logits(runner(), batch.teacher.ids))
        tally.add(batch, wanted, logits(batch.student.ids))
    return asdict(tally.quality())


@torch.no_grad()
def measure(cell: Cell) -> dict[str, Any]:
    """One cell: fit, then quality on 100 held-out questions and on unrelated prompts."""
    if cell.method == "patch for each token":
        return per_token(cell)
    test = rows_of([example(cell.kind, cell.name, 100, True, cell.seed)])
    example(cell.kind, cell.name, cell.n, False, cell.seed)  # the answers are not timed
    preserved()
    began, cpu = time.perf_counter(), time.process_time()
    logits, nbytes = METHODS[cell.method](cell)
    seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    others = {kind: quality(rows, logits) for kind, rows in unrelated()}
    return {"quality": quality(test, logits), "others": others, "bytes": nbytes, **seconds}


def grid(full: bool) -> Iterator[Cell]:
    """The cells, the reduced ones first."""
    more = [("format", "dash"), ("language", "french")]
    more += [("fewshot", name) for name in ("dash", "twin", "flip")]
    for seed in range(5 if full else 1):
        for n in (64, 16, 4, 1, 256) if full else (64, 16):
            for kind, name in [*TASKS, *more] if full else TASKS:
                yield Cell(kind, name, "patch for each token", 1, None, seed)
                for method in METHODS:
                    if n >= FOLDS or "shuffled" not in method:
                        yield Cell(kind, name, method, n, 4, seed)
                for method in RANKED if full else ():
                    for rank in (1, 2, 8, 16, None if method == "ridge" else 64):
                        yield Cell(kind, name, method, n, rank, seed)
        for method in ("no context", "ridge", "distill"):
            yield Cell("recall", "bem", method, 2, 4, seed)


def read(file: Path) -> dict[str, dict[str, Any]]:
    """The cells that the file has."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {entry["key"]: entry for entry in map(json.loads, lines)}


def main() -> None:
    """Make the missing cells, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--out", type=Path, default=DOCS / "static.jsonl")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th cell from the i-th on")
    parser.add_argument("--hours", type=float, default=3.0, help="start no cell after so many")
    options = parser.parse_args()
    began, known = time.perf_counter(), read(options.out)
    part, parts = map(int, options.part.split("/"))
    for cell in list(dict.fromkeys(grid(options.full)))[part::parts]:
        if cell.key in known or time.perf_counter() - began > 3600 * options.hours:
            continue
        entry = {"key": cell.key, **asdict(cell), **measure(cell)}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        print(cell.key, {k: round(v, 3) for k, v in entry["quality"].items()}, flush=True)
    print(tables(list(read(options.out).values())))


# -- the tables


def tables(entries: list[dict[str, Any]]) -> str:
    """Methods by N at rank 4, and ranks at N = 64; means over tasks and seeds."""
    known = [entry for entry in entries if entry["kind"] != "recall"]
    by_method = [e for e in known if e["rank"] == 4 or e["method"] == "patch for each token"]
    ranked = [e for e in known if e["method"] in RANKED and e["n"] == 64]
    measured = {(e["kind"], e["name"]) for e in ranked if e["rank"] != 4}
    by_rank = [e for e in ranked if (e["kind"], e["name"]) in measured]
    return _table(by_method, "n", "N") + "\n\n" + _table(by_rank, "rank", "rank")


def _table(entries: list[dict[str, Any]], column: str, title: str) -> str:
    lines = [
        f"| method | {title} | upper | halves | flip | few-shot upper | german | KL |"
        " recall | modes | few-shot | languages | CPU s | bytes |",
        "|---|" + "---|" * 13,
    ]
    groups: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault((entry["method"], entry[column]), []).append(entry)
    order = ["patch for each token", *METHODS]
    for (method, value), group in sorted(
        groups.items(), key=lambda item: (-(item[0][1] or 999), order.index(item[0][0]))
    ):
        cells = [
            _mean([e["quality"]["whole"] for e in group if (e["kind"], e["name"]) == task])
            for task in TASKS
        ]
        kept = [
            _mean([e["others"][kind]["whole"] for e in group if "others" in e])
            for kind in embedded.KINDS
        ]
        row = [method, "full" if value is None else value, *cells]
        row += [_mean([e["quality"]["kl"] for e in group], 3), *kept]
        row += [_mean([e["cpu_seconds"] for e in group if "cpu_seconds" in e], 1)]
        row += [_mean([e["bytes"] for e in group if "bytes" in e], 0)]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def _mean(values: list[float], digits: int = 2) -> str:
    return f"{sum(values) / len(values):,.{digits}f}" if values else ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
