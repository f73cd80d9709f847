"""Static patches on the embedded model's tasks, beside other methods that replace a context.

    python examples/static/evaluation.py                 # the reduced grid
    python examples/static/evaluation.py --full          # N from 1 to 256, ranks, five seeds
    python examples/static/evaluation.py --model llama   # the Llama of llama_model.py

The time that the missing cells will take is printed first. Each cell is appended to
``docs/static.jsonl`` as it is made; a run that was stopped goes on. ``page.py`` makes the tables
and pictures of ``docs/static.md`` from all cells of the file.
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

import llama_model
import regression
import torch
from baselines import Logits, one_shot, prompt_tuning, steering_vector
from page import DOCS, read
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from icl_patch import ContextPatcher, embedded, static
from icl_patch.evaluation.embedded import tasks
from icl_patch.static.block_parts import read_blocks
from icl_patch.static.block_runner import Batch, BlockRunner, make_batches
from icl_patch.static.examples import Example, Row, answered, greedy, rows_of
from icl_patch.static.report import Tally, plain_logits, spread

LONGEST = 27  # tokens of an answer, line end included
PRESERVED = 50  # generic documents
OTHER = 25  # unrelated prompts of each kind
FOLDS = 4
# For samples that the model itself extends: all their questions, steps, documents by method.
STUDIED, STUDIED_STEPS = 256, 150
STUDIED_PRESERVED = {"ridge": 200, "distill": 400}
TUNED_SECONDS = 10.0  # of the CPU: what distillation takes at 64 questions
ATTENTION = ("o_proj", "readers", "writer")
LLAMA = False  # --model llama


@dataclass(frozen=True)
class Cell:
    """One fit: its task, method, questions, rank and seed; the model is the embedded one, or the
    Llama.
    """

    kind: str
    name: str
    method: str
    n: int
    rank: int | None
    seed: int

    @property
    def key(self) -> str:
        """Its name in the file."""
        return "llama/" * LLAMA + "/".join(map(str, asdict(self).values()))


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
    """Questions of a task. Recall has three facts, and c is never asked in the sample; the model
    takes a key in capitals as the same key.
    """
    rng = random.Random(f"{kind}/{name}/{seed}/{held_out}")
    if kind == "recall":
        return [f"{name} c"] if held_out else [f"{name} {'ab'[i % 2]}" for i in range(2)]
    if kind == "language":
        return [f"{triple}." for triple in rng.sample(tasks._atoms("digits", held_out), count)]
    return [f"{word}>" for word in rng.sample(tasks._atoms("word", held_out), count)]


@cache
def model() -> Any:
    """The embedded model or the Llama, and its tokenizer."""
    if not LLAMA:
        return embedded.load()
    folder = llama_model.FOLDER
    if not (folder / "config.json").exists():
        llama_model.main([str(folder)])
    return LlamaForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def kinds() -> tuple[str, ...]:
    """The kinds of task that the model has learned."""
    return ("format", "language") if LLAMA else embedded.KINDS


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
def paraphrased(name: str, seed: int) -> list[Row]:
    """The facts that a recall sample asks, asked in other words."""
    sample = questions("recall", name, 2, False, seed)
    asked = [question.replace(name, name.upper()) for question in sample]
    found = Example.from_text(model()[1], contexts("recall", name, seed), asked, end="\n")
    return rows_of(answered(model()[0], [found], LONGEST))


@cache
def preserved(count: int) -> list[tuple[int, ...]]:
    """Documents of all kinds, each with a context of its own."""
    rng = random.Random(0)
    document = llama_model.document if LLAMA else tasks.training_document
    return static.documents(model()[1], [document(rng)[0] for _ in range(count)])


@cache
def unrelated() -> list[tuple[str, list[Row]]]:
    """Held-out prompts of each kind with their own contexts, and the model's answers."""
    network, tokenizer = model()
    found = []
    for kind in kinds():
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


def studied(cell: Cell, count: int) -> static.Example:
    """The cell's sample with questions of the model's own, less those with held-out atoms."""
    sample = example(cell.kind, cell.name, cell.n, False, cell.seed)
    end = sample.questions[0][-1:]
    more = static.self_study(
        model()[0], sample, count, end=end, seed=cell.seed, max_new_tokens=LONGEST
    )
    assert more.answers is not None
    kept = [
        pair
        for pair in zip(more.questions, more.answers, strict=True)
        if not tasks.is_held_out(model()[1].decode(pair[0][:-1]))
    ]
    given, answers = zip(*kept, strict=True)
    return replace(more, questions=given, answers=answers)


def static_fit(cell: Cell, sample: static.Example | None = None, **options: Any) -> Any:
    """A patch of the cell's rank; fewer than FOLDS questions are fitted without folds."""
    sample = sample or example(cell.kind, cell.name, cell.n, False, cell.seed)
    folds = FOLDS if len(sample.questions) >= FOLDS else 1
    defaults = {
        "method": "ridge",
        "rank": cell.rank,
        "preserve": preserved(PRESERVED),
        "folds": folds,
    }
    return static.fit(model()[0], [sample], **{**defaults, **options})


def distilled(cell: Cell, steps: int = 50, **options: Any) -> static.StaticPatch:
    """Distillation with the cell's seed."""
    settings = static.Distillation(steps, seed=cell.seed)
    options = {"method": "distill", "distillation": settings, **options}
    return static_fit(cell, **options)


def fit_studied(
    cell: Cell, method: str, count: int = STUDIED, texts: int = 0, **options: Any
) -> static.StaticPatch:
    """A fit on the extended sample, o_proj included: more questions bear more steps."""
    settings = static.Distillation(
        STUDIED_STEPS, preserve_batch_size=8, patience=STUDIED_STEPS, seed=cell.seed
    )
    return static_fit(
        cell,
        studied(cell, count),
        method=method,
        distillation=settings,
        parts=ATTENTION,
        preserve=preserved(texts or STUDIED_PRESERVED[method]),
        **options,
    )


def tuned(cell: Cell, tokens: int) -> tuple[Logits, int]:
    """Prompt tuning for as long as distillation takes; 216 vectors are its parameters at rank 4."""
    return prompt_tuning(runner(), batches(cell), tokens, None, cell.seed, TUNED_SECONDS)


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
    return static_fit(cell, mixed)


METHODS: dict[str, Callable[[Cell], tuple[Logits, int]]] = {
    "no context": lambda cell: (lambda ids: plain_logits(runner(), ids), 0),
    "steering vector": lambda cell: steering_vector(runner(), batches(cell)),
    "one shot (Mazzawi)": lambda cell: one_shot(runner(), batches(cell), FOLDS),
    "prompt tuning": lambda cell: prompt_tuning(runner(), batches(cell), 16, 100, cell.seed),
    "prompt tuning, equal seconds": lambda cell: tuned(cell, 16),
    "prompt tuning, equal parameters": lambda cell: tuned(cell, 216),
    "writer alone (PatchKV)": lambda cell: patched(
        static_fit(cell, parts=("writer",), rank=None, preserve=())
    ),
    "ridge, nothing preserved": lambda cell: patched(static_fit(cell, preserve=())),
    "ridge": lambda cell: patched(static_fit(cell)),
    "ridge with o_proj": lambda cell: patched(static_fit(cell, parts=ATTENTION)),
    "ridge, self-study": lambda cell: patched(fit_studied(cell, "ridge")),
    "ridge, one weight": lambda cell: patched(static_fit(cell, preserve_first=1.0)),
    "ridge, self-study, one weight": lambda cell: patched(
        fit_studied(cell, "ridge", preserve_first=1.0)
    ),
    "ridge, self-study of 512, weight 3": lambda cell: patched(
        fit_studied(cell, "ridge", 512, texts=400, preserve_first=3.0)
    ),
    "ridge, self-study, κ = 3": lambda cell: patched(fit_studied(cell, "ridge", kappa=3.0)),
    "auto": lambda cell: patched(distilled(cell, method="auto")),
    "distill, nothing preserved": lambda cell: patched(distilled(cell, preserve=())),
    "distill": lambda cell: patched(distilled(cell)),
    "distill, 15 steps": lambda cell: patched(distilled(cell, steps=15)),
    "distill, 20 steps": lambda cell: patched(distilled(cell, steps=20)),
    "distill, self-study": lambda cell: patched(fit_studied(cell, "distill")),
    "distill, self-study of 512": lambda cell: patched(fit_studied(cell, "distill", 512)),
    "ridge, then distill": lambda cell: patched(distilled(cell, start=static_fit(cell))),
    "another context's patch": lambda cell: patched(other_context(cell)),
    "shuffled answers": lambda cell: patched(shuffled(cell)),
}
TASKS = [("format", name) for name in ("upper", "halves", "flip")]
TASKS += [("fewshot", "upper"), ("language", "german")]
# methods that are measured with every N and seed, and at every rank
MAIN = ("no context", "ridge", "distill", "ridge, self-study", "distill, self-study")
RANKED = ("ridge", "distill")
# what the page's goals are about, with three seeds in the reduced grid too
GOALS = [("ridge, self-study", *TASKS[i]) for i in (4, 3, 0)]
GOALS += [
    (method, "format", "flip") for method in ("distill, self-study", "distill, self-study of 512")
]
# the weight of preserved texts by block, with the model's own questions
WEIGHTS = ("ridge, self-study, one weight", "ridge, self-study, κ = 3")
GOALS += [(method, *TASKS[i]) for method in WEIGHTS for i in (3, 4)]
GOALS += [("ridge, self-study of 512, weight 3", *TASKS[4])]
# methods that have their places in the grid
PLACED = {*MAIN, *(goal[0] for goal in GOALS), "ridge, one weight", "auto"}


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
    if cell.kind == "regression":
        began = time.process_time()
        error = regression.measure(cell.method, cell.n, cell.rank, cell.seed)
        return {"quality": error, "cpu_seconds": time.process_time() - began}
    if cell.method == "patch for each token":
        return per_token(cell)
    test = rows_of([example(cell.kind, cell.name, 100, True, cell.seed)])
    example(cell.kind, cell.name, cell.n, False, cell.seed)  # the answers are not timed
    for count in (PRESERVED, *STUDIED_PRESERVED.values()):
        preserved(count)
    began, cpu = time.perf_counter(), time.process_time()
    logits, nbytes = METHODS[cell.method](cell)
    seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    others = {kind: quality(rows, logits) for kind, rows in unrelated()}
    found = {"quality": quality(test, logits), "others": others, "bytes": nbytes, **seconds}
    if cell.kind == "recall":  # its held-out question asks the third fact, which no sample asks
        seen = rows_of([example(cell.kind, cell.name, cell.n, False, cell.seed)])
        found["seen"] = quality(seen, logits)
        found["paraphrased"] = quality(paraphrased(cell.name, cell.seed), logits)
    return found


def grid(full: bool) -> Iterator[Cell]:
    """The cells, the reduced ones first."""
    unlearned = [("format", "flip")] if LLAMA else []
    tasks_of_model = [t for t in TASKS if t[0] in kinds() and t not in unlearned]
    for seed in range(3) if not LLAMA else ():
        for method, kind, name in GOALS:
            yield Cell(kind, name, method, 64, 8, seed)
    for kind, name in tasks_of_model if LLAMA else ():
        yield Cell(kind, name, "ridge, one weight", 64, 4, 0)
    if LLAMA:
        yield Cell("language", "german", WEIGHTS[0], 64, 8, 0)
    seeds = (3 if LLAMA else 5) if full else 1
    for seed in range(seeds):
        yield from _regression(seed)
        for n in (64, 16, 4, 1, 256) if full and not LLAMA else (64, 16, 4):
            for kind, name in tasks_of_model:
                yield Cell(kind, name, "patch for each token", 1, None, seed)
                if seed < 3:
                    yield Cell(kind, name, "auto", n, 4, seed)
                if LLAMA:
                    yield Cell(kind, name, "ridge, then distill", n, 4, seed)
                for method in MAIN:
                    yield Cell(kind, name, method, n, 8 if "study" in method else 4, seed)
        for n in (64, 16) if seed < 2 and not LLAMA else ():
            for kind, name in tasks_of_model:
                for method in METHODS:
                    if method not in PLACED:
                        yield Cell(kind, name, method, n, 4, seed)
        for method in RANKED if seed < 2 and not LLAMA else ():
            for kind, name in tasks_of_model if full else [("language", "german")]:
                for rank in (1, 2, 8, 16, None if method == "ridge" else 64):
                    yield Cell(kind, name, method, 64, rank, seed)
        for method in ("no context", "ridge", "distill") if not LLAMA else ():
            yield Cell("recall", "bem", method, 2, 4, seed)


def _regression(seed: int) -> Iterator[Cell]:
    for n in (4, 16, 64, 256) if not LLAMA else ():
        for method in regression.METHODS:
            for rank in (1, None) if method == "ridge" else (None,):
                yield Cell("regression", "linear", method, n, rank, seed)


def seconds_of(cell: Cell, known: dict[str, dict[str, Any]]) -> float:
    """An estimate: the mean of the method's known cells, fitted and measured."""
    spent = [
        entry["cpu_seconds"]
        for entry in known.values()
        if entry["method"] == cell.method
        and "cpu_seconds" in entry
        and (entry["kind"] == "regression") == (cell.kind == "regression")
    ]
    return sum(spent) / len(spent) + 5 if spent else 10.0


def main() -> None:
    """Make the missing cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--out", type=Path, default=DOCS / "static.jsonl")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th cell from the i-th on")
    parser.add_argument("--hours", type=float, default=3.0, help="start no cell after so many")
    parser.add_argument("--model", choices=("embedded", "llama"), default="embedded")
    parser.add_argument("--only", default="", help="only the cells with this text in their key")
    options = parser.parse_args()
    global LLAMA
    LLAMA = options.model == "llama"
    began, known = time.perf_counter(), read(options.out)
    part, parts = map(int, options.part.split("/"))
    cells = [cell for cell in dict.fromkeys(grid(options.full)) if cell.key not in known]
    cells = [cell for cell in cells[part::parts] if options.only in cell.key]
    hours = sum(seconds_of(cell, known) for cell in cells) / 3600
    print(f"{len(cells)} cells, about {hours:.1f} hours of one core", flush=True)
    for cell in cells:
        if time.perf_counter() - began > 3600 * options.hours:
            break
        entry = {"key": cell.key, "model": options.model, **asdict(cell), **measure(cell)}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        print(cell.key, {k: round(v, 3) for k, v in entry["quality"].items()}, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
