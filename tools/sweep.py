"""Try every causal language model class of transformers: a small random model of each type.

    build/python tools/sweep.py                 # all types and variants; hours on one core
    build/python tools/sweep.py llama gemma2    # these types, again
    build/python tools/sweep.py --realistic     # with the features of trained weights

Every type runs in a process of its own with a time limit. A cell is one update on one scenario of
one type. The cells of a type are written to ``docs/model_classes.jsonl``, or
``docs/model_classes_realistic.jsonl``, as soon as they are known, and a second call goes on with
the types that are missing.
``docs/model_classes.md`` is written at the end, from both files. gemma3n needs ``timm``, and is
"not built" without it.

A cell is *right* if the replay without the context has the logits of the unmodified model with it,
``model(ids)`` on each row alone: in fp32 within ten times the model's own noise floor, in bf16 bit
for bit the logits of the unmodified model that reads the context first and the kept tokens then.
The noise floor is how much ``model(ids)`` changes in a batch of two.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from icl_patch import ContextPatcher
from icl_patch.errors import UnsupportedModelError
from icl_patch.evaluation.tiny_models import randomised, with_attention
from icl_patch.models.model_checks import check_language_model
from icl_patch.models.prompts import padded
from icl_patch.tolerances import noise_limit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import realistic_weights  # noqa: E402
from support.random_models import Stock  # noqa: E402

SETTINGS = json.loads((ROOT / "tools/sweep.json").read_text())
CELLS, PAGE = ROOT / "docs/model_classes.jsonl", ROOT / "docs/model_classes.md"
REALISTIC_CELLS = ROOT / "docs/model_classes_realistic.jsonl"
VOCABULARY = 97
LIMIT = 300  # seconds for one type
UPDATES = ("direct", "stable", "exact")


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Lengths of every row's prefix, context and kept tokens, and the absorbed columns."""

    prefix: tuple[int, ...]
    context: tuple[int, ...]
    kept: tuple[int, ...]
    absorbed: list[tuple[int, int]] | None = None
    dtype: torch.dtype = torch.float32


SCENARIOS = {
    "basic": Scenario((0, 0), (11, 11), (4, 4)),
    "one kept token": Scenario((0, 0), (11, 11), (1, 1)),
    "prefix": Scenario((5, 5), (11, 11), (4, 4)),
    "long kept part": Scenario((0, 0), (7, 7), (24, 24)),
    "ragged": Scenario((5, 2), (11, 11), (2, 5)),
    "several spans": Scenario((0, 0), (13, 13), (4, 4), [(0, 5), (8, 10)]),
    "bf16": Scenario((0, 0), (11, 11), (4, 4), dtype=torch.bfloat16),
}
# With realistic weights only.
HALF = {"fp16": Scenario((0, 0), (11, 11), (4, 4), dtype=torch.float16)}


# -- models


def shrink(config_class: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a small configuration: sizes by the names of the fields, then changes."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        for pattern, size in SETTINGS["sizes"]:
            if re.fullmatch(pattern, field.name):
                default = field.default
                if isinstance(default, int) and not isinstance(default, bool):
                    settings[field.name] = min(default, size)
                elif re.fullmatch("num_(key_value|kv)_heads|.*_token_id", field.name):
                    settings[field.name] = size
                break
        if field.name == "is_decoder":
            settings[field.name] = True
    for name, part in parts_of(config_class).items():
        settings[name] = shrink(part, {})
    for name, value in changes.items():
        into = isinstance(value, dict) and "+" in value  # a part that is shrunk first
        settings[name] = {**settings[name], **value["+"]} if into else value
    return settings


def parts_of(config_class: Any) -> dict[str, Any]:
    """The configuration classes within one: of its language model, its vision tower and others."""
    parts = dict(getattr(config_class, "sub_configs", None) or {})
    for name, spec in getattr(config_class, "sub_configs_defaults", {}).items():
        model_type = getattr(spec, "model_type", None)
        known = model_type in CONFIG_MAPPING
        parts[name] = CONFIG_MAPPING[model_type] if known else spec
    return {name: part for name, part in parts.items() if dataclasses.is_dataclass(part)}


def build(model_type: str, changes: dict[str, Any]) -> PreTrainedModel:
    """A small random model of a type in fp32, in eval mode."""
    config_class: Any = CONFIG_MAPPING[model_type]
    settings = {**SETTINGS["types"].get(model_type, {}), **changes}
    attention = settings.pop("attn_implementation", "sdpa")
    part, late = settings.pop("part", None), settings.pop("late", {})
    config = config_class(**shrink(config_class, settings))
    for name, value in late.items():  # what its configuration's own checks do not let it have
        setattr(config.text_config, name, value)
    torch.manual_seed(0)
    if part is not None:  # transformers' own mapping does not build this class
        language_model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        model = language_model(getattr(config, part))
        return randomised(model, torch.float32)
    return randomised(with_attention(AutoModelForCausalLM, config, attention), torch.float32)


def prepare(model: PreTrainedModel, dtype: torch.dtype, realistic: bool) -> tuple[int, ...]:
    """Put a model into a dtype, with realistic weights first if asked for; the tokens that these
    mark, see ``tests/support/realistic_weights.py``.
    """
    if not realistic:
        untyped: Any = model  # transformers' `to` has another signature
        untyped.to(dtype)
        return ()
    ContextPatcher(model).detach()  # a class that is refused may lack what the features need
    features = realistic_weights.realistic(model)
    realistic_weights.to_dtype(model, dtype, features)
    return features.triggers


# -- cells


def error_of(logits: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return float((logits - expected).abs().max() / expected.abs().max())


def measure(
    model: PreTrainedModel, update: str, scenario: Scenario, first: tuple[int, ...] = ()
) -> dict[str, Any]:
    """One cell: the result, the replay's error and the noise floor; rows start with one of the
    tokens ``first``, if there are any.
    """
    generator = torch.Generator().manual_seed(1)
    parts = [
        [torch.randint(3, VOCABULARY - 9, (n,), generator=generator) for n in lengths]
        for lengths in (scenario.prefix, scenario.context, scenario.kept)
    ]
    for row in parts[0] if scenario.prefix[0] else parts[1]:
        row[: len(first[:1])] = torch.tensor(first[:1])
    rows = [torch.cat(row) for row in zip(*parts, strict=True)]
    sides = ("left", "left", "right")
    ids, masks = zip(*map(padded, parts, sides), strict=True)
    prefix, context, kept = (x.masked_fill(~mask, 3) for x, mask in zip(ids, masks, strict=True))
    context, kept_mask, width = torch.cat([prefix, context], 1), masks[2], prefix.shape[1]
    more: dict[str, Any] = {"absorbed": scenario.absorbed}
    if width:
        more = {"context_mask": torch.cat(masks[:2], 1), "absorbed": [(width, context.shape[1])]}
    with ContextPatcher(model, update) as patcher:
        patch = patcher.compute(context, kept, kept_mask=kept_mask, **more)
        logits = patcher.forward(patch.kept_ids, patch)
        misses = int(patch.report.misses.sum()) if patch.report is not None else 0
    lengths = [int(mask.sum()) for mask in patch.kept_mask]
    replayed = torch.cat([row[:n] for row, n in zip(logits, lengths, strict=True)])
    if scenario.dtype is not torch.float32:
        same = torch.equal(logits, patch.logits)  # of the model with its context, to the last bit
        error = error_of(logits, patch.logits)
        return {"result": "right" if same else "wrong", "misses": misses, "error": error}
    with torch.no_grad():
        full = [model(row[None]).logits[0] for row in rows]
        floor = error_of(model(rows[0].repeat(2, 1)).logits[0], full[0])
    spans = {column for span in scenario.absorbed or () for column in range(*span)}
    places = [
        [column for column in range(len(ids)) if column not in spans][-n:]
        for ids, n in zip(rows, lengths, strict=True)
    ]
    expected = torch.cat([row[place] for row, place in zip(full, places, strict=True)])
    error = error_of(replayed, expected)
    limit = noise_limit(min(floor, 1e-3))
    cell = {"error": error, "floor": floor, "misses": misses}
    if error > limit and not scenario.absorbed:
        # some classes have other logits in a batch with padding, or over their cache, than for the
        # row alone: then it agrees with those
        inputs = {"context_ids": context, "kept_ids": kept, "kept_mask": kept_mask, **more}
        own = Stock(model).logits(inputs)[kept_mask]
        cell |= {"own": error_of(own, expected), "error": error_of(replayed, own)}
    return {"result": "right" if cell["error"] <= limit else "wrong", **cell}


def cells_of(
    model_type: str, changes: dict[str, Any], realistic: bool = False
) -> Iterator[dict[str, Any]]:
    """All cells of a type."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()

    @functools.cache
    def prepared(dtype: torch.dtype) -> tuple[PreTrainedModel, tuple[int, ...]]:
        model = build(model_type, changes)
        check_language_model(model)
        with torch.no_grad():
            model(torch.tensor([[3, 4, 5]]))
        return model, prepare(model, dtype, realistic)

    for name, scenario in (SCENARIOS | (HALF if realistic else {})).items():
        for update in UPDATES if scenario.dtype is torch.float32 else ("exact",):
            cell: dict[str, Any] = {"scenario": name, "update": update}
            try:
                model, first = prepared(scenario.dtype)
            except Exception as error:
                yield cell | failure(error, "not built")
                return
            try:
                yield cell | measure(model, update, scenario, first)
            except Exception as error:
                yield cell | failure(error, "crashed")


def failure(error: Exception, unexpected: str) -> dict[str, str]:
    """The result and the text of an error; ``unexpected`` is the result of one that is no
    refusal.
    """
    if isinstance(error, ValueError if unexpected == "crashed" else UnsupportedModelError):
        return {"result": "refused", "text": str(error)[:500]}
    return {"result": unexpected, "text": f"{type(error).__name__}: {error}"[:500]}


# -- processes


def run_apart(
    key: dict[str, str], changes: dict[str, Any], realistic: bool
) -> list[dict[str, Any]]:
    """The cells of a type, from a process of its own."""
    context = multiprocessing.get_context("fork")
    found, made = context.Pipe(duplex=False)

    def run() -> None:
        torch.set_num_threads(1)
        made.send(list(cells_of(key["type"], changes, realistic)))

    process = context.Process(target=run)
    process.start()
    made.close()
    cells = [{"scenario": "", "update": "", "result": "not finished"}]
    with contextlib.suppress(EOFError):  # it has crashed
        if found.poll(LIMIT):
            cells = found.recv()
    process.kill()
    process.join()
    key = key | {"transformers": transformers.__version__}
    return [
        key | {k: float(f"{v:.1e}") if isinstance(v, float) else v for k, v in cell.items()}
        for cell in cells
    ]


def jobs() -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Every type, then every variant: the key of its cells, and its changes of the settings."""
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        yield {"type": model_type, "variant": ""}, {}
    for variant, entry in SETTINGS["variants"].items():
        changes = {k: v for k, v in entry.items() if k != "types"}
        for model_type in entry["types"]:
            yield {"type": model_type, "variant": variant}, changes


# -- the page


def read(path: Path) -> list[dict[str, Any]]:
    """The cells of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def verdict(cells: list[dict[str, Any]]) -> tuple[str, str]:
    """The result of a type or variant in one word, and the reason of what is refused in it."""
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


def page(cells: list[dict[str, Any]], realistic: list[dict[str, Any]]) -> str:
    """All types and variants by what is found of them, with random and with realistic weights."""
    tables = {"random": by_job(cells), "realistic": by_job(realistic)}
    lines = [INTRODUCTION]
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
    return "\n".join(lines) + "\n"


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
"""Patterns of a reason, and what the page has in their place."""
INTRODUCTION = f"""# Model classes

Every model type of the causal mapping of transformers, as a small random
model: `make sweep` writes this page. Classes that can be encoders or decoders (BERT and its
relatives) are built as decoders, with `is_decoder=True`; gemma3n where `timm` is installed.

*Right*: the replay without the context has the logits of the unmodified model with it, in every
scenario that is not named as refused ({", ".join(SCENARIOS)}):
direct, stable and exact in fp32 within 10 times the noise floor or {noise_limit(0):.1e} of the
largest logit, exact in bf16 bit for bit. [model_classes.jsonl](model_classes.jsonl) has all errors.
Where a class has other logits in a batch or over its cache than for a row alone, a replay is
compared with those of the batch, and `own` there says how far they are off.

*Realistic weights* have the features of trained ones
([model_classes_realistic.jsonl](model_classes_realistic.jsonl), with exact in fp16 too): a neuron
that makes one channel 2,000 times larger than the others, a token that draws all attention, norms
with scales from 0.01 to 30, nearly dependent rows and nearly tied logits.
"""


def main() -> None:
    """Run the types that have no cells yet, or those named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="these types alone, again")
    parser.add_argument("--realistic", action="store_true", help="with features of trained weights")
    options = parser.parse_args()
    out = REALISTIC_CELLS if options.realistic else CELLS
    cells = [cell for cell in read(out) if cell["type"] not in options.types]
    done = {(cell["type"], cell["variant"]) for cell in cells}
    for key, changes in jobs():
        chosen = not options.types or key["type"] in options.types
        if chosen and (key["type"], key["variant"]) not in done:
            own = run_apart(key, changes, options.realistic)
            cells += own
            out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
            print(*key.values(), *verdict(own), flush=True)
    PAGE.write_text(page(read(CELLS), read(REALISTIC_CELLS)))


if __name__ == "__main__":
    main()
