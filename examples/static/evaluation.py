"""Static patches of a pretrained chat model beside other methods that replace a context.

    python examples/static/evaluation.py FOLDER                 # all cells, in bf16, on one thread
    python examples/static/evaluation.py FOLDER --quick --out build/static/cells.jsonl
    python examples/static/evaluation.py FOLDER --base          # a model without a chat template

A cell is one method on one task with one seed. It is appended to the file as a line of JSON as soon
as it is made; a second call goes on with the missing ones. ``page.py`` makes a page of them.
"""

import argparse
import json
import random
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from baselines import Run, batched, divergences, lora, plain, prompt_tuning, steering_vector
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from icl_patch import static
from icl_patch.models.language_model import layers_of
from icl_patch.models.prompts import Tokens, encode
from icl_patch.static.answers import answered
from icl_patch.static.examples import Example
from icl_patch.static.student import Student
from icl_patch.static.targets import Target, targets_of, targets_of_texts

# Tasks and numbers of questions: chosen before anything was fitted.
FEW_SHOT = (
    "country to capital",
    "word to upper case",
    "singular to plural",
    "present to past",
    "word to opposite",
    "number to next number",
    "country to continent",
    "word to first letter",
    "name to initials",
    "adjective to comparative",
    "three words to the last",
    "English to Spanish",
)
CHATS = ("knight", "Spanish", "short", "Mira")
# pairs: the first of the list as context; of the others, in random order, those to fit and to test
SHOTS, QUESTIONS, HELD_OUT = 8, 48, 40
FEW_QUESTIONS = 12  # of another static patch
NEW_TOKENS = 32  # of an answer, at most
KEPT_TOKENS = 8  # of an answer to an unrelated prompt
SEEDS = 3
STEPS, BATCH_SIZE = 60, 16
TRIED_QUESTIONS = 8  # by which vectors are chosen
TRIED_BLOCKS, FACTORS = 6, (0.5, 1.0, 2.0)
VIRTUAL_TOKENS = 16
LORA_RANK = 8
# By kind, the better of 1e-3 and 5e-3 on a tenth of the data of its first task.
LORA_RATES = {"few_shot": 1e-3, "chats": 1e-3, "facts": 5e-3}

NONE, CONTEXT = "no context", "context"
OURS, OURS_FEW = "static patch", f"static patch, {FEW_QUESTIONS} questions"
LORA, PROMPT, STEERING = "LoRA (PEFT)", "prompt tuning (PEFT)", "steering vector"

DATA = Path(__file__).parents[2] / "docs" / "data"
OUT, BASE_OUT = DATA / "static-cells.jsonl", DATA / "static-cells-base.jsonl"
TASKS = Path(__file__).with_name("tasks")
Entry = dict[str, Any]
Tested = dict[str, list[Target]]  # by group


@dataclass(frozen=True)
class Cell:
    """One method on one task."""

    kind: str
    task: str
    method: str
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        """Its name in the file."""
        return self.kind, self.task, self.method, str(self.seed)


def read(name: str) -> Any:
    """A file of tasks."""
    return tomllib.loads((TASKS / f"{name}.toml").read_text(encoding="utf-8"))


def named(kind: str, name: str) -> Any:
    """The few-shot task or chat of a name."""
    found = read(kind)["task" if kind == "few_shot" else "chat"]
    return next(task for task in found if task["name"] == name)


# -- tasks


@dataclass
class Task:
    """What a patch is fitted on, and tested on by group; the CPU seconds that the answers took on
    which it is fitted.
    """

    fit: list[Example]
    targets: list[Target]
    tests: Tested
    seconds: float


@dataclass(eq=False)
class Subject:
    """A model, and what all cells share."""

    model: Any
    tokenizer: Any
    steps: int = STEPS
    student: Student = field(init=False)

    def __post_init__(self) -> None:
        self.model.requires_grad_(False)
        self.student = Student(self.model)
        self.task = cache(self.task)  # type: ignore[method-assign]

    @cached_property
    def front(self) -> Tokens:
        """The token in front of every text."""
        return static.front(self.model, self.tokenizer)

    @cached_property
    def texts(self) -> list[Target]:
        """Texts on which a LoRA of PEFT is to stay as it is, too."""
        texts = static.documents(self.model, self.tokenizer, static.preserved_texts())
        return targets_of_texts(self.student, texts)

    @cached_property
    def unrelated(self) -> Tested:
        """Unrelated prompts by kind, with the model's own answers."""
        found = {}
        for kind, prompts in read("unrelated").items():
            rows = [(*self.front, *encode(self.tokenizer, prompt)) for prompt in prompts]
            if kind == "chat":
                if not self.tokenizer.chat_template:
                    continue
                rows = [self.chat_ids(prompt) for prompt in prompts]
            found[kind] = self.tested([Example(row, row) for row in rows], KEPT_TOKENS)
        return found

    def chat_ids(self, message: str) -> Tokens:
        """A user's message in the chat template."""
        chat = [{"role": "user", "content": message}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return encode(self.tokenizer, str(text))

    def tested(self, examples: Sequence[Example], tokens: int = NEW_TOKENS) -> list[Target]:
        """The runs that examples are to be like, answered with at most so many tokens."""
        return targets_of(self.student, answered(self.model, examples, tokens))

    def task(self, kind: str, name: str) -> Task:
        """A task, its answers given by the model with the context."""
        make = {"few_shot": self.few_shot, "chats": self.chat, "facts": self.facts}[kind]
        fit, tests = make(name)
        began = time.process_time()
        fit = answered(self.model, fit, NEW_TOKENS)
        seconds = time.process_time() - began
        return Task(fit, targets_of(self.student, fit), tests, seconds)

    def few_shot(self, name: str) -> tuple[list[Example], Tested]:
        """Lines "input -> output" as context; tested on the right answers and on the model's."""
        listed = named("few_shot", name)["pairs"]
        others = listed[SHOTS:]  # they are listed from known to rare, some of them
        random.Random(name).shuffle(others)
        pairs = listed[:SHOTS] + others
        context = "".join(f"{given} -> {answer}\n" for given, answer in pairs[:SHOTS])
        make = partial(static.examples, self.model, self.tokenizer, context=context, end="\n")
        asked = [f"{given} ->" for given, _ in pairs]
        tested = asked[-HELD_OUT:]
        right = make(tested, answers=[f" {answer}" for _, answer in pairs[-HELD_OUT:]])
        tests = {"right": self.tested(right), "answers": self.tested(make(tested))}
        return make(asked[SHOTS : SHOTS + QUESTIONS]), tests

    def chat(self, name: str) -> tuple[list[Example], Tested]:
        """A system message; tested on messages and on conversations."""
        chat = named("chats", name)
        roles = ("user", "assistant", "user")
        turns = [
            [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]
            for texts in chat["conversations"]
        ]
        make = partial(static.examples, self.model, self.tokenizer, system=chat["system"])
        return make(chat["fit"]), {"answers": self.tested(make([*chat["held_out"], *turns]))}

    def facts(self, _name: str) -> tuple[list[Example], Tested]:
        """All facts at once; tested by the strength of the model's belief, and on neighbours."""

        def example(statement: str, prompt: str, answer: str) -> Example:
            own = encode(self.tokenizer, prompt)
            whole = encode(self.tokenizer, f"{statement} {prompt}") if statement else own
            ids = (*self.front, *whole), (*self.front, *own)
            return Example(*ids, encode(self.tokenizer, f" {answer}"))

        facts = read("facts")["fact"]
        facts.sort(key=lambda x: self.belief(example("", x["question"], x["true"])))
        half = len(facts) // 2
        fit, tests = [], {}
        for name, group in (("weak", facts[:half]), ("strong", facts[half:])):
            made = [
                [example(x["statement"], prompt, x["new"]) for prompt in prompts]
                for x in group
                for prompts in [(x["question"], *x["paraphrases"])]
            ]
            fit += [x for prompts in made for x in prompts[:2]]
            tests[f"{name}, question"] = self.tested([prompts[0] for prompts in made])
            others = [x for prompts in made for x in prompts[2:]]
            tests[f"{name}, paraphrases"] = self.tested(others)
        near = [example("", *pair) for x in facts for pair in x["neighbours"]]
        return fit, {**tests, "neighbours": self.tested(near)}

    def belief(self, example: Example) -> float:
        """log p(answer) without a context."""
        (target,) = targets_of(self.student, [example])
        surprise = self.student.logits(target.hidden).log_softmax(-1)
        return float(surprise[range(len(target.labels)), target.labels].sum())


# -- methods: each changes the model until the stack is closed


@dataclass(frozen=True)
class Made:
    """What a method made of a task; details go into the cell."""

    run: Run
    nbytes: int = 0
    details: Entry = field(default_factory=dict)


Method = Callable[[Subject, Cell, dict[tuple[str, ...], Entry], ExitStack], Made]


def no_context(subject: Subject, *_: Any) -> Made:
    """The model without its context."""
    return Made(partial(plain, subject.student))


def context(subject: Subject, *_: Any) -> Made:
    """The model with its context."""
    return Made(lambda batch: [subject.student.logits(target.hidden) for target in batch])


def vector(subject: Subject, cell: Cell, *_: Any) -> Made:
    """A vector in the residual stream."""
    task, count = subject.task(cell.kind, cell.task), len(layers_of(subject.model))
    blocks = sorted({(i + 1) * count // (TRIED_BLOCKS + 1) for i in range(TRIED_BLOCKS)})
    tried = task.targets[:TRIED_QUESTIONS]
    return Made(*steering_vector(subject.student, task.fit, tried, blocks, FACTORS))


def ours(subject: Subject, cell: Cell, _entries: Any, stack: ExitStack) -> Made:
    """A static patch, with the defaults of its fit; a harmful one is measured all the same."""
    patch = static.fit(
        subject.model,
        fitted(subject, cell),
        tokenizer=subject.tokenizer,
        max_new_tokens=NEW_TOKENS,
        distillation=static.Distillation(steps=subject.steps, seed=cell.seed),
        accept_worse=True,
    )
    stack.enter_context(patch.applied(subject.model, check_front=False))
    assert patch.report is not None
    details = {"steps": patch.report.steps, "report": patch.report.to_json()}
    return Made(partial(plain, subject.student), patch.nbytes, details)


def fitted(subject: Subject, cell: Cell) -> list[Example]:
    """The questions that a cell's patch is fitted on."""
    examples = subject.task(cell.kind, cell.task).fit
    return examples[:FEW_QUESTIONS] if cell.method == OURS_FEW else examples


def peft_lora(subject: Subject, cell: Cell, _entries: Any, stack: ExitStack) -> Made:
    """A LoRA of PEFT."""
    run, nbytes, model = lora(
        subject.student,
        (subject.task(cell.kind, cell.task).targets, subject.texts),
        rate=LORA_RATES[cell.kind],
        rank=LORA_RANK,
        steps=subject.steps,
        batch_size=BATCH_SIZE,
        seed=cell.seed,
    )
    stack.callback(model.unload)
    return Made(run, nbytes, {"steps": subject.steps})


def peft_prompt(
    subject: Subject, cell: Cell, entries: dict[tuple[str, ...], Entry], _stack: ExitStack
) -> Made:
    """Virtual tokens of PEFT, trained for as long as the static patch of seed 0."""
    first = entries[(cell.kind, cell.task, OURS, "0")]
    task = subject.task(cell.kind, cell.task)
    return Made(
        *prompt_tuning(
            subject.student,
            (task.targets, subject.texts),
            tokens=VIRTUAL_TOKENS,
            seconds=first["cpu_seconds"] - task.seconds,
            batch_size=BATCH_SIZE,
            seed=cell.seed,
        )
    )


METHODS: dict[str, Method] = {
    NONE: no_context,
    CONTEXT: context,
    STEERING: vector,
    OURS: ours,
    OURS_FEW: ours,
    LORA: peft_lora,
    PROMPT: peft_prompt,
}


def cells(few_shot: Sequence[str] = FEW_SHOT, chats: Sequence[str] = CHATS) -> list[Cell]:
    """All cells, those of the first seed first."""
    tasks = [*(("few_shot", x) for x in few_shot), *(("chats", x) for x in chats)]
    tasks += [("facts", "facts")] if chats else []
    return [
        Cell(*task, method, seed)
        for seed in range(SEEDS)
        for task in tasks
        for method in METHODS
        if seed == 0 or method == OURS or (method == LORA and task[0] == "few_shot")
        if task[0] != "facts" or method != OURS_FEW  # twelve of its questions ask for six facts
    ]


def base_cells(few_shot: Sequence[str] = FEW_SHOT) -> list[Cell]:
    """Those of a model without a chat template: the static patches of the few-shot tasks."""
    shown = (NONE, CONTEXT, OURS)
    return [cell for cell in cells(few_shot, ()) if cell.seed == 0 and cell.method in shown]


# -- measuring


@torch.no_grad()
def measure(subject: Subject, run: Run, targets: Iterable[Target]) -> Entry:
    """Of a run: ``accuracy``, the share of answers whose tokens are all its first choice; ``kl``,
    the mean KL(with context ‖ run) in nats a token; ``agreement``, the share of tokens at which its
    first choice is the one with the context; ``kept``, of answers at all of whose tokens it is.
    """
    student, right, kept, same, kls = subject.student, [], [], [], []
    for batch in batched(list(targets)):
        logits = run(batch)
        kls.append(divergences(student, batch, logits))
        for target, got in zip(batch, logits, strict=True):
            choices = got.argmax(-1)
            equal = choices == student.logits(target.hidden).argmax(-1)
            right.append(choices.tolist() == list(target.labels))
            kept.append(bool(equal.all()))
            same.append(equal)
    return {
        "questions": len(right),
        "accuracy": sum(right) / len(right),
        "kl": float(torch.cat(kls).mean()),
        "agreement": float(torch.cat(same).float().mean()),
        "kept": sum(kept) / len(kept),
    }


def measured(subject: Subject, cell: Cell, entries: dict[tuple[str, ...], Entry]) -> Entry:
    """The entry of a cell."""
    task = subject.task(cell.kind, cell.task)
    with ExitStack() as stack:
        began = time.process_time()
        made = METHODS[cell.method](subject, cell, entries, stack)
        seconds = time.process_time() - began
        if cell.method not in (NONE, CONTEXT):  # the answers to fit on take time, too
            seconds += task.seconds * len(fitted(subject, cell)) / len(task.fit)
        found, kept = (
            {name: measure(subject, made.run, group) for name, group in tests.items()}
            for tests in (task.tests, {} if cell.method == CONTEXT else subject.unrelated)
        )
    numbers = {"tests": found, "unrelated": kept, "nbytes": made.nbytes, "cpu_seconds": seconds}
    return {**asdict(cell), **numbers, **made.details}


# -- the file


def known(path: Path) -> dict[tuple[str, ...], Entry]:
    """The cells of a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines]
    return {(e["kind"], e["task"], e["method"], str(e["seed"])): e for e in entries}


def append(path: Path, entry: Entry) -> None:
    """Add a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_short(entry), ensure_ascii=False) + "\n")


def _short(value: Any) -> Any:
    """Floats with five digits."""
    if isinstance(value, dict):
        return {name: _short(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_short(x) for x in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def run(subject: Subject, wanted: Sequence[Cell], out: Path) -> None:
    """Make the cells that the file lacks."""
    for number, cell in enumerate(wanted, 1):
        entries = known(out)
        if cell.key in entries:
            continue
        began = time.perf_counter()
        append(out, measured(subject, cell, entries))
        took = time.perf_counter() - began
        print(f"{number}/{len(wanted)} {' / '.join(cell.key)}: {took:.1f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the cells that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a causal language model")
    parser.add_argument("--out", type=Path, help="the file of the cells (default: in docs/data)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="two tasks, one seed, 20 steps")
    size.add_argument("--base", action="store_true", help="static patches of the few-shot tasks")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    wanted, out = (base_cells(), BASE_OUT) if options.base else (cells(), OUT)
    if options.quick:
        wanted = [cell for cell in cells(FEW_SHOT[:2], ()) if cell.seed == 0]
    run(Subject(model, tokenizer, 20 if options.quick else STEPS), wanted, options.out or out)


if __name__ == "__main__":
    main()
