"""One process of ``tools/real_steps.py``: patches of a model on real text, each replayed and
compared bit for bit with a run of the unmodified model.

    build/python tools/real_steps_run.py MODEL bfloat16 "3 rows" OUT.json

The references are in ``tools/real_references.py``, the texts in ``tools/real_texts.py``.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
)

sys.path.insert(0, str(Path(__file__).parent))

from real_references import COMPUTE, ONE_PASS, TWO_PASSES, WAYS, References, references
from real_texts import Batch, Case, batch_of

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.errors import UnsupportedModelError
from icl_patch.models.language_model import position_limit
from icl_patch.patch.atomic_file import write_atomically

PLANS: dict[str, list[Case]] = {
    "1 row": [
        Case("pages", 1, 20, False, 24),
        Case("chats", 1, 0, False, 24),
        Case("sources", 1, 250, False, 24),
        Case("pages", 1, 1000, False, 24),
        Case("pages", 1, 4000, False, 24),
    ],
    "3 rows": [
        Case("chats", 3, 0, True, 32),
        Case("sources", 3, 60, False, 32),
        Case("pages", 3, 400, True, 32),
        Case("pages", 3, 700, True, 32),
    ],
    "8 rows": [
        Case("pages", 8, 20, False, 32),
        Case("chats", 8, 0, True, 32),
        Case("sources", 8, 100, True, 32),
        Case("pages", 8, 200, True, 32),
        Case("sources", 8, 256, False, 32),
    ],
    "short": [
        Case("chats", 1, 0, False, 40),
        Case("pages", 3, 40, True, 16),
        Case("chats", 8, 0, True, 16),
    ],
}
SAVE_EVERY, MAX_FILE = 8, 256 * 2**20


@dataclass
class Counts:
    """Tokens of one way and number of rows, over all cases; a token counts per row.

    Attributes:
        way, rows, reason: ``reason`` says why there is no such step, or None.
        tokens: replayed. identical: of these, with all bits of the reference's logits.
        same_token: with the most likely token of the unmodified model.
        misses: elements of block outputs that the patch does not reach. taken_twice: tokens of one
            pass that took another one.
        saved, saved_identical: tokens replayed by another process from a file, likewise.
        reader_error, correction: the largest of the patches' reports.
        shortest, longest: tokens of the contexts.
    """

    way: str
    rows: int
    reason: str | None = None
    tokens: int = 0
    identical: int = 0
    same_token: int = 0
    misses: int = 0
    taken_twice: int = 0
    saved: int = 0
    saved_identical: int = 0
    reader_error: float = 0.0
    correction: float = 0.0
    shortest: int | None = None
    longest: int | None = None

    def add_context(self, mask: Tensor) -> None:
        """Count the lengths of the contexts, mask (B, C)."""
        lengths = mask.sum(1).tolist()
        self.shortest = min([*lengths, *([self.shortest] if self.shortest else [])])
        self.longest = max([*lengths, self.longest or 0])

    def add(self, patch: ContextPatch, logits: Tensor, reference: Tensor, plain: Tensor) -> None:
        """Count a replay, logits (B, T, V), beside its reference and the unmodified model."""
        kept, report = patch.kept_mask, patch.report
        assert report is not None
        self.tokens += int(kept.sum())
        self.identical += int((same_bits(logits, reference) & kept).sum())
        self.same_token += int(((logits.argmax(-1) == plain.argmax(-1)) & kept).sum())
        self.misses += int((report.misses * kept).sum())
        self.taken_twice += int(kept.sum()) if self.way == ONE_PASS and patch.passes > 1 else 0
        for name in ("reader_error", "correction"):
            largest = float(torch.where(kept, getattr(report, name), 0).max())
            setattr(
                self, name, largest if largest != largest else max(getattr(self, name), largest)
            )

    def add_saved(self, patch: ContextPatch, logits: Tensor, reference: Tensor) -> None:
        """Count a replay of another process."""
        self.saved += int(patch.kept_mask.sum())
        self.saved_identical += int((same_bits(logits, reference) & patch.kept_mask).sum())


def same_bits(logits: Tensor, reference: Tensor) -> Tensor:
    """Whether all bits agree: two (B, T, V) of one dtype -> (B, T) bool."""
    assert logits.dtype == reference.dtype
    integers = {4: torch.int32, 2: torch.int16}[logits.element_size()]
    return (logits.view(integers) == reference.view(integers)).all(-1)


# -- patches


class Follow(LogitsProcessor):
    """Makes ``generate`` choose the given tokens (B, N) after a context of ``start`` columns."""

    def __init__(self, tokens: Tensor, start: int) -> None:
        self.tokens, self.start = tokens, start

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) of which the largest is the next token's."""
        chosen = self.tokens[:, ids.shape[1] - self.start, None]
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def patches(
    patcher: ContextPatcher, way: str, batch: Batch, found: References
) -> Iterator[tuple[ContextPatch, slice]]:
    """The patches of a batch, each with its columns of the current tokens."""
    if way == COMPUTE:
        masks = {"context_mask": batch.mask[:, :-1], "kept_mask": batch.kept_mask}
        yield patcher.compute(batch.ids[:, :-1], found.current, **masks), slice(None)
        return
    steps = patcher.generate(
        batch.ids,
        context_mask=batch.mask,
        max_new_tokens=found.tokens.shape[1],
        logits_processor=[Follow(found.tokens, batch.ids.shape[1])],
        **({"arithmetic": "model"} if way == TWO_PASSES else {}),
    )
    for column, step in enumerate(steps):
        yield step.patch, slice(column, column + 1)


def refusal(patcher: ContextPatcher) -> str | None:
    """Why ``generate`` does not take its exact steps in one pass, or None."""
    ids = torch.arange(3, 7)[None]
    try:
        next(patcher.generate(ids, max_new_tokens=1, mode="shared_cache"))
    except UnsupportedModelError as error:
        return str(error)
    (step,) = patcher.generate(ids, max_new_tokens=1)
    arithmetic = step.patch.info.arithmetic
    return None if arithmetic == "batch_invariant" else f"generate chooses {arithmetic!r}"


# -- the other process


def replay_files(model: Path, dtype: torch.dtype, connection: Any) -> None:
    """Replay every patch file that is named over the connection, in a process of its own, and write
    the logits beside it.
    """
    attached, tokenizer = load(model, dtype)
    with ContextPatcher(attached, tokenizer=tokenizer) as patcher:
        for path in iter(connection.recv, None):
            patch = ContextPatch.load(path, attached, tokenizer)
            save_file({"logits": patcher.forward(patch.kept_ids, patch)}, f"{path}.logits")
            connection.send(None)


@contextmanager
def other_process(model: Path, dtype: torch.dtype) -> Iterator[Any]:
    """A process that replays patches from files: a function from a patch to logits."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=replay_files, args=(model, dtype, theirs), daemon=True)
    process.start()
    theirs.close()  # so that its end shows as an end of file

    def replay(patch: ContextPatch) -> Tensor:
        with TemporaryDirectory() as folder:
            path = Path(folder, "patch.safetensors")
            patch.save(path)
            ours.send(path)
            ours.recv()
            return load_file(f"{path}.logits")["logits"]

    yield replay
    ours.send(None)
    process.join()


# -- all of it


def load(model: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model that has no end of text, so that every row takes all steps, and its tokenizer."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    loaded.generation_config.eos_token_id = None
    return loaded, AutoTokenizer.from_pretrained(model)


def measure(model: Path, dtype: torch.dtype, cases: list[Case]) -> list[Counts]:
    """The counts of every way and number of rows."""
    plain, tokenizer = load(model, dtype)
    attached, _ = load(model, dtype)
    limit = position_limit(plain)
    found: dict[tuple[str, int], Counts] = {}
    with (
        other_process(model, dtype) as elsewhere,
        ContextPatcher(attached, tokenizer=tokenizer) as patcher,
    ):
        reason = refusal(patcher)
        for number, case in enumerate(cases):
            began = time.time()
            if case.context + case.steps > limit:
                print(f"left out, longer than the model's {limit} positions: {case}")
                continue
            batch = batch_of(case, number, tokenizer)
            runs = references(plain, batch)
            for way in WAYS:
                counts = found.setdefault((way, case.rows), Counts(way, case.rows))
                if way == ONE_PASS and reason is not None:
                    counts.reason = reason
                else:
                    count(counts, patcher, batch, runs, elsewhere)
            print(f"{case}: {time.time() - began:.0f} s", flush=True)
    return list(found.values())


def count(
    counts: Counts, patcher: ContextPatcher, batch: Batch, runs: References, elsewhere: Any
) -> None:
    """Replay the patches of one way on a batch, here and in the other process."""
    counts.add_context(batch.mask)
    reference, plain = runs.logits[counts.way], runs.logits[TWO_PASSES]
    plain = reference if counts.way == COMPUTE else plain
    for number, (patch, columns) in enumerate(patches(patcher, counts.way, batch, runs)):
        assert torch.equal(patch.kept_ids, runs.current[:, columns])
        logits = patcher.forward(patch.kept_ids, patch)
        counts.add(patch, logits, reference[:, columns], plain[:, columns])
        if number % SAVE_EVERY == 0 and patch.nbytes <= MAX_FILE:
            counts.add_saved(patch, elsewhere(patch), reference[:, columns])


def main(model: str, dtype: str, plan: str, out: str) -> None:
    """Measure one dtype on the cases of a plan, and write the counts."""
    counts = measure(Path(model), getattr(torch, dtype), PLANS[plan])
    text = json.dumps([vars(each) for each in counts], indent=1)
    write_atomically(out, [text.encode()])


if __name__ == "__main__":
    main(*sys.argv[1:])
