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
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import ContextPatcher
from icl_patch.errors import UnsupportedModelError
from icl_patch.models.model_checks import check_language_model
from icl_patch.models.prompts import padded
from icl_patch.tolerances import noise_limit
from tools.model_types import build, jobs
from tools.sweep_page import page, verdict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import realistic_weights  # noqa: E402
from support.random_models import Stock  # noqa: E402

CELLS, PAGE = ROOT / "docs/model_classes.jsonl", ROOT / "docs/model_classes.md"
PROGRAMS = ROOT / "docs/data/step-programs.jsonl"
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


def prepare(model: PreTrainedModel, dtype: torch.dtype, realistic: bool) -> tuple[int, ...]:
    """Put a model into a dtype, with realistic weights first if asked for; the tokens that these
    mark, see ``tests/support/realistic_weights.py``.
    """
    if not realistic:
        untyped: Any = model  # transformers' `to` has another signature
        untyped.to(dtype)
        return ()
    ContextPatcher(model).detach()  # a refused class may lack modules that the features need
    features = realistic_weights.realistic(model)
    realistic_weights.to_dtype(model, dtype, features)
    return features.triggers


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
        assert patch.logits is not None
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


def apart(measured: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
    """What a call returns in a process of its own; None if it crashes or does not end."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        sender.send(measured())

    process = context.Process(target=run)
    process.start()
    sender.close()
    found: list[dict[str, Any]] | None = None
    with contextlib.suppress(EOFError):
        if receiver.poll(LIMIT):
            found = receiver.recv()
    process.kill()
    process.join()
    return found


def cells_apart(
    key: dict[str, str], changes: dict[str, Any], realistic: bool
) -> list[dict[str, Any]]:
    """The cells of a type, from a process of its own."""
    cells = apart(lambda: list(cells_of(key["type"], changes, realistic)))
    key = key | {"transformers": transformers.__version__}
    return [
        key | {k: float(f"{v:.1e}") if isinstance(v, float) else v for k, v in cell.items()}
        for cell in cells or [{"scenario": "", "update": "", "result": "not finished"}]
    ]


def read(path: Path) -> list[dict[str, Any]]:
    """The cells of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


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
            own = cells_apart(key, changes, options.realistic)
            cells += own
            out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
            print(*key.values(), *verdict(own), flush=True)
    PAGE.write_text(page(SCENARIOS, read(CELLS), read(REALISTIC_CELLS), read(PROGRAMS)))


if __name__ == "__main__":
    main()
