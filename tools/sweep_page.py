"""The page ``docs/model_classes.md``, from the cells of ``tools/sweep.py``."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from icl_patch.tolerances import noise_limit
from tools.model_types import jobs

RESULTS = ("right", "wrong", "refused", "not built", "not finished")
WORDS = (
    (r"\s+", " "),
    (r" \(docs/model_classes.md .*?\)|^[\w.]+ \(\w+\): ", ""),
    (r"\b(?!Auto)\w+(For\w+|LMHeadModel|ModelWithLMHead)\b", "the class"),
    (r"\bmodel\.layers\.\d+\.[\w.]+ (?=has)", "a module "),
    (r"^\w+(?= reads the context after)", "a module"),
    (r"\d+ residual streams", "several residual streams"),
    (r"list of \d+ blocks", "list of blocks"),
    (r"; found .*?: ", ": "),
    (r"; got the class of type .*| but it was not found .*", ""),
    (r"[:.] (choose|compute|absorb|Choose|Load|Attach) .*", ""),
)
"""Patterns of a reason, and their replacements on the page."""
INTRODUCTION = """# Model classes

Every model type of the causal mapping of transformers, as a small random
model: `make sweep` writes this page. Classes that can be encoders or decoders (BERT and its
relatives) are built as decoders, with `is_decoder=True`; gemma3n where `timm` is installed.

*Right*: the replay without the context has the logits of the unmodified model with it, in every
scenario that is not named as refused ({scenarios}):
direct, stable and exact in fp32 within 10 times the noise floor or {limit:.1e} of the
largest logit, exact in bf16 bit for bit. [model_classes.jsonl](model_classes.jsonl) has all errors.
Where a class has other logits in a batch or over its cache than for a row alone, a replay is
compared with those of the batch, and `own` there says how far they are off.

*Realistic weights* have the features of trained ones
([model_classes_realistic.jsonl](model_classes_realistic.jsonl), with exact in fp16 too): a neuron
that makes one channel 2,000 times larger than the others, a token that draws all attention, norms
with scales from 0.01 to 30, nearly dependent rows and nearly tied logits.
"""


MOST_NAMES = 20  # in a cell of the table of programs; of more types it has the number
PROGRAMS = """## Decode steps as programs

On the CPU `generate` records a step and runs it as a program
([how](how_it_works.md#a-token-in-a-block-operator-by-operator)). `tools/step_programs.py` compares
all bits of 5 steps with the model's own code ([results](data/step-programs.jsonl)): one row in fp32
and fp16, three padded rows in bf16, in caches of 24 tokens. The first step is also compared with
one over the model's own cache, which has no empty columns. A type with several results stands in
several rows.
"""


def verdict(cells: list[dict[str, Any]]) -> tuple[str, str]:
    """The result of a type or variant in one word, and the reason of a refusal."""
    order = ("crashed", "wrong", "right", "not finished", "refused", "not built")
    word = next(name for name in order if name in {cell["result"] for cell in cells})
    others = [cell for cell in cells if cell["result"] != "right"]
    text = next((cell["text"] for cell in others if "text" in cell), "")
    if word == "right" and others:
        parts = sorted({cell["scenario"] for cell in others})
        text = f"refused: {', '.join(parts)}. {text}"
    return word, text


def by_job(cells: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The cells of each type and variant, in the order of :func:`jobs`."""
    found: dict[tuple[str, str], list[dict[str, Any]]]
    found = {(key["type"], key["variant"]): [] for key, _ in jobs()}
    for cell in cells:
        found[cell["type"], cell["variant"]].append(cell)
    return {job: cells for job, cells in found.items() if cells}


def label(cells: list[dict[str, Any]]) -> str:
    """The result and its reason, without the names of one class and its modules, and the cure."""
    word, text = verdict(cells)
    for pattern, words in WORDS:
        text = re.sub(pattern, words, text)
    separator = ", " if word == "right" else ": "
    return f"{word}{separator}{text}" if text else word


def page(
    scenarios: Iterable[str],
    cells: list[dict[str, Any]],
    realistic: list[dict[str, Any]],
    programs: list[dict[str, Any]],
) -> str:
    """All types and variants by their results, with random and with realistic weights."""
    tables = {"random": by_job(cells), "realistic": by_job(realistic)}
    lines = [INTRODUCTION.format(scenarios=", ".join(scenarios), limit=noise_limit(0))]
    for weights, table in tables.items():
        versions = {cell["transformers"] for cells in table.values() for cell in cells}
        lines.append(f"- {weights} weights, with transformers {', '.join(sorted(versions))}:")
        for name, variants in (("types", False), ("variants", True)):
            words = Counter(verdict(table[job])[0] for job in table if bool(job[1]) == variants)
            counts = ", ".join(f"{words[word]} {word}" for word in RESULTS if words[word])
            lines.append(f"  - {name}: {counts}")
    groups: dict[str, list[str]] = {}
    for job, found in tables["random"].items():
        text, other = (label(x) for x in (found, tables["realistic"].get(job, found)))
        if other != text:
            text += f"; with realistic weights {other.removeprefix('right, ')}"
        groups.setdefault(text, []).append(f"{job[0]} ({job[1]})" if job[1] else job[0])
    lines += ["", "| result | types and variants |", "|---|---|"]
    for text, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        lines.append(f"| {text} | {', '.join(names)} |")
    lines += ["", *program_lines(programs)]
    return "\n".join(lines) + "\n"


def program_lines(programs: list[dict[str, Any]]) -> list[str]:
    """Which types' decode steps run as programs, by update, and the reasons of the others."""
    lines, groups = [PROGRAMS], dict[str, dict[str, list[str]]]()
    for line in programs:
        name = f"{line['type']} ({line['variant']})" if line["variant"] else line["type"]
        for reason in {program_reason(run) for run in line["runs"].values()}:
            groups.setdefault(reason, {}).setdefault(line["update"], []).append(name)
    lines += ["", "| steps | exact | stable |", "|---|---|---|"]
    for reason, found in sorted(
        groups.items(), key=lambda group: -sum(map(len, group[1].values()))
    ):
        shown = [found.get(update, []) for update in ("exact", "stable")]
        short = [
            str(len(names)) if len(names) > MOST_NAMES else ", ".join(names) for names in shown
        ]
        lines.append(f"| {reason} | {' | '.join(short)} |")
    return lines


def program_reason(run: str) -> str:
    """A run's result without the names of one class and its modules."""
    if run.startswith("refused"):
        return "refused by every update, as above"
    for pattern, words in ((r".* a program of them: |\. Ask for compile=.*", ""), *WORDS):
        run = re.sub(pattern, words, run)
    windows = r"keep (\d+ tokens, and its window has \d+|more than 4 windows of \d+ tokens)"
    run = re.sub(windows, "keep more than four windows", run)
    return re.sub(r"change by [\d.e-]+ in", "change in", run)
