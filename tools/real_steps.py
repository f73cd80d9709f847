"""Prove on a real model that exact patches are exact: 5,000 tokens of real text and more in each
dtype, and 0 bits that differ.

    make real                                 # on SmolLM2-135M-Instruct
    make real MODEL=FOLDER                    # on another model
    build/python tools/real_steps.py FOLDER --short    # the short plan alone

The tokens come in 1, 3 and 8 rows, padded and not, after contexts of 20 to 4,000 tokens of the
repository's pages and sources and of chats. Each token is patched in three ways and replayed
without its context. Part of the patches are saved, and replayed from the file by another process.
The references are runs of another copy of the model, which no patcher has touched. A short plan is
then repeated with environment variables that make torch's libraries choose other kernels.

Every dtype, plan and environment runs in a process of its own. Their counts are kept in
``build/real``, and a second call goes on with the rest. The exit status is 0 if every bit is the
same.
"""

import argparse
import copy
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from icl_patch import ContextPatch, ContextPatcher, batch_invariant
from icl_patch.bench.results import code_fingerprint, environment
from icl_patch.models.language_model import position_limit

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "build" / "real"
DTYPES = ("float16", "float32", "bfloat16")  # the slowest first
LEAST = 5000  # tokens in each dtype
ROUNDINGS = 16  # limit of reader errors and corrections, in spacings of the dtype, as in verify
AS_IT_IS = "as it is"
ENVIRONMENTS = (
    "ATEN_CPU_CAPABILITY=avx2",
    "ATEN_CPU_CAPABILITY=default",
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "MKL_ENABLE_INSTRUCTIONS=AVX2",
    "OMP_NUM_THREADS=2",
)
SAVE_EVERY, MAX_FILE = 8, 256 * 2**20
ONE_PASS = "one pass"
"""A step of ``generate``. Reference: the model's step in ``batch_invariant``."""
TWO_PASSES = "two passes"
"""A step of ``generate(mode="two_pass")``. Reference: the model's step."""
COMPUTE = "compute"
"""``compute`` of all tokens at once. Reference: the model's call on all tokens."""
WAYS = (ONE_PASS, TWO_PASSES, COMPUTE)
CHATS = ROOT / "examples" / "papers" / "texts" / "chats.toml"


# -- texts


@dataclass(frozen=True)
class Case:
    """Contexts of ``rows`` rows and the tokens that follow them.

    Attributes:
        source: ``"pages"``, ``"sources"`` or ``"chats"``.
        context: tokens of the longest context; chats have the length that they have.
        padded: whether the rows have different lengths. Chats are padded in any case.
        steps: tokens after the context, of every row.
    """

    source: str
    rows: int
    context: int
    padded: bool
    steps: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Contexts (B, C), left-padded, with their mask; the tokens (B, N) that follow, or None if the
    model is to choose them; and the mask (B, N) of those tokens when they are computed at once.
    """

    ids: Tensor
    mask: Tensor
    tokens: Tensor | None
    kept_mask: Tensor


def batch_of(case: Case, number: int, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """The batch of the ``number``-th case. Cases of different numbers have different texts."""
    rows, steps = range(case.rows), case.steps
    short = [(row * 5) % steps // 2 if case.padded else 0 for row in rows]
    kept_mask = torch.arange(steps) < torch.tensor([steps - less for less in short])[:, None]
    if case.source == "chats":
        chats = tomllib.loads(CHATS.read_text(encoding="utf-8"))["chat"]
        chosen = [_chat(chats[(number + row) % len(chats)], tokenizer) for row in rows]
        return Batch(*_left_padded(chosen), None, kept_mask)
    text = _text(case.source, tokenizer)
    room = len(text) - case.context - steps
    if room < 1:
        raise ValueError(f"expected more than {case.context + steps} tokens, got {len(text)}")
    starts = [(number * 7919 + row * 1009) % room for row in rows]
    cuts = [row * case.context // (2 * case.rows) if case.padded else 0 for row in rows]
    ids, mask = _left_padded(
        [text[start + cut : start + case.context] for start, cut in zip(starts, cuts, strict=True)]
    )
    following = [text[start + case.context :][:steps] for start in starts]
    return Batch(ids, mask, torch.stack(following), kept_mask)


def _left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    return ids, torch.arange(ids.shape[1]) >= ids.shape[1] - lengths


def _chat(chat: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """A chat up to the first answer, as the tokenizer's template writes it; the question alone
    where there is no template.
    """
    text = chat["users"][0]
    if tokenizer.chat_template is not None:
        turns = [("system", chat["system"]), ("user", text)]
        turns = [{"role": role, "content": content} for role, content in turns]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]


@cache
def _text(source: str, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The tokens of all pages or all Python sources, one file after another."""
    if source == "pages":
        files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    else:
        files = [*(ROOT / "icl_patch").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]


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


# -- references


@dataclass(frozen=True, eq=False)
class References:
    """The tokens (B, N) that follow the contexts; the current tokens, which begin with the
    context's last; and the logits (B, N, V) of every way's reference.
    """

    tokens: Tensor
    current: Tensor
    logits: dict[str, Tensor]


@torch.no_grad()
def references(model: PreTrainedModel, batch: Batch) -> References:
    """The runs of a model that nothing is attached to."""
    steps = batch.kept_mask.shape[1]
    mask = torch.cat([batch.mask, torch.ones_like(batch.kept_mask[:, 1:])], 1)
    start = batch.ids.shape[1] - 1
    cache = DynamicCache(config=model.config)
    call(model, batch.ids[:, :-1], mask[:, :start], cache, logits_to_keep=1)

    def step_by_step(tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        own, logits, current = copy.deepcopy(cache), [], [batch.ids[:, -1]]
        for step in range(steps):
            seen = mask[:, : start + step + 1]
            logits.append(call(model, current[-1][:, None], seen, own)[:, -1])
            current.append(logits[-1].argmax(-1) if tokens is None else tokens[:, step])
        return torch.stack(logits, 1), torch.stack(current, 1)

    two_passes, followed = step_by_step(batch.tokens)
    current, tokens = followed[:, :-1], followed[:, 1:]
    with batch_invariant(model, attention=False):
        one_pass, _ = step_by_step(tokens)
    kept = torch.cat([batch.mask[:, :-1], batch.kept_mask], 1)
    together = call(model, current, kept, copy.deepcopy(cache))
    logits = dict(zip(WAYS, (one_pass, two_passes, together), strict=True))
    return References(tokens, current, logits)


def call(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache, **further: Any) -> Tensor:
    """One call on tokens (B, T) over a cache, with the mask (B, S) of all tokens so far."""
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(
        ids, attention_mask=mask, position_ids=positions, past_key_values=cache, **further
    ).logits


# -- counts


@dataclass
class Counts:
    """Tokens of one way and number of rows, over all cases; a token counts per row.

    Attributes:
        tokens: replayed. identical: of these, with all bits of the reference's logits.
        misses: elements of block outputs that the patch does not reach.
        saved, saved_identical: tokens replayed by another process from a file, likewise.
        reader_error, correction: the largest of the patches' reports.
    """

    way: str
    rows: int
    tokens: int = 0
    identical: int = 0
    misses: int = 0
    saved: int = 0
    saved_identical: int = 0
    reader_error: float = 0.0
    correction: float = 0.0

    def add(self, patch: ContextPatch, logits: Tensor, reference: Tensor) -> None:
        """Count a replay, logits (B, T, V), beside its reference."""
        kept, report = patch.kept_mask, patch.report
        assert report is not None
        self.tokens += int(kept.sum())
        self.identical += int((same_bits(logits, reference) & kept).sum())
        self.misses += int((report.misses * kept).sum())
        for name in ("reader_error", "correction"):  # a NaN stays
            largest = torch.where(kept, getattr(report, name), 0).max().double()
            setattr(self, name, float(largest.maximum(torch.tensor(getattr(self, name)))))

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
        **({"mode": "two_pass"} if way == TWO_PASSES else {}),
    )
    for column, step in enumerate(steps):
        if way == ONE_PASS and step.patch.info.arithmetic != "batch_invariant":
            raise ValueError("expected exact steps in one pass: generate takes this model's in two")
        yield step.patch, slice(column, column + 1)


# -- one process


@cache
def patcher_of(model: Path, dtype: torch.dtype) -> ContextPatcher:
    """A patcher of a model that is loaded once in a process."""
    loaded, tokenizer = load(model, dtype)
    return ContextPatcher(loaded, tokenizer=tokenizer)


def replay_file(path: Path, model: Path, dtype: torch.dtype) -> Tensor:
    """The logits of a patch from its file."""
    patcher = patcher_of(model, dtype)
    patch = ContextPatch.load(path, patcher.model, patcher.tokenizer)
    return patcher.forward(patch.kept_ids, patch)


@contextmanager
def other_process(model: Path, dtype: torch.dtype) -> Iterator[Callable[[ContextPatch], Tensor]]:
    """A process that replays patches from files: a function from a patch to logits."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

        def replay(patch: ContextPatch) -> Tensor:
            with TemporaryDirectory() as folder:
                path = Path(folder, "patch.safetensors")
                patch.save(path)
                return pool.submit(replay_file, path, model, dtype).result()

        yield replay


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
        for number, case in enumerate(cases):
            if case.context + case.steps > limit:
                print(f"left out, beyond {limit} positions: {case}", file=sys.stderr)
                continue
            batch = batch_of(case, number, tokenizer)
            runs = references(plain, batch)
            for way in WAYS:
                counts = found.setdefault((way, case.rows), Counts(way, case.rows))
                count(counts, patcher, batch, runs, elsewhere)
            print(dtype, case, file=sys.stderr, flush=True)
    return list(found.values())


def count(
    counts: Counts, patcher: ContextPatcher, batch: Batch, runs: References, elsewhere: Any
) -> None:
    """Replay the patches of one way on a batch, here and in the other process."""
    for number, (patch, columns) in enumerate(patches(patcher, counts.way, batch, runs)):
        assert torch.equal(patch.kept_ids, runs.current[:, columns])
        reference = runs.logits[counts.way][:, columns]
        counts.add(patch, patcher.forward(patch.kept_ids, patch), reference)
        if number % SAVE_EVERY == 0 and patch.nbytes <= MAX_FILE:
            counts.add_saved(patch, elsewhere(patch), reference)


# -- all processes

Record = dict[str, Any]  # the counts of one way, number of rows, dtype and environment
Part = tuple[str, str, str]  # dtype, plan and environment: what one process measures


def parts_of(short: bool) -> list[Part]:
    """Everything to measure, the longest first."""
    plans = ("short",) if short else ("8 rows", "3 rows", "1 row")
    full = [(dtype, plan, AS_IT_IS) for dtype in DTYPES for plan in plans]
    return full + [(dtype, "short", name) for name in ENVIRONMENTS for dtype in DTYPES]


def measured(part: Part, model: Path, folder: Path) -> list[Record]:
    """The counts of a part, from its file or from a process that writes the file.

    Raises:
        CalledProcessError: the process failed.
    """
    dtype, plan, environment = part
    out = folder / (re.sub(r"\W+", "-", " ".join(part)) + ".json")
    if not out.exists():
        further = [] if environment == AS_IT_IS else [environment.split("=")]
        command = [sys.executable, __file__, str(model), "--part", dtype, plan]
        done = subprocess.run(
            command, env=os.environ | dict(further), stdout=subprocess.PIPE, text=True, check=True
        )
        out.write_text(done.stdout.splitlines()[-1], encoding="utf-8")
    found = json.loads(out.read_text(encoding="utf-8"))
    return [{"dtype": dtype, "environment": environment, **each} for each in found]


def is_kept(counts: Record) -> bool:
    """Whether everything promised holds: all bits, here and from files, with nothing but rounding
    to correct.
    """
    rounding = ROUNDINGS * torch.finfo(getattr(torch, counts["dtype"])).eps
    return (
        counts["tokens"] == counts["identical"] > 0
        and counts["saved"] == counts["saved_identical"]
        and counts["misses"] == 0
        and counts["reader_error"] <= rounding
        and counts["correction"] <= rounding
    )


def failures(results: Iterable[Record], least: int) -> list[str]:
    """What is not as promised, a line each."""
    tokens: dict[str, int] = defaultdict(int)
    lines = []
    for counts in results:
        tokens[counts["dtype"]] += counts["tokens"] if counts["environment"] == AS_IT_IS else 0
        if not is_kept(counts):
            lines.append("not exact: " + json.dumps(counts))
    few = [f"{n} tokens in {dtype}, fewer than {least}" for dtype, n in tokens.items() if n < least]
    return lines + few


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write the counts; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", type=Path, help="a folder with a model and its tokenizer")
    parser.add_argument("--short", action="store_true", help="the short plan only")
    parser.add_argument("--out", type=Path, help="the file for the counts, as JSON")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    model = options.model.resolve()
    if options.part is not None:
        dtype, plan = options.part
        counts = measure(model, getattr(torch, dtype), PLANS[plan])
        print(json.dumps([vars(each) for each in counts]))
        return 0
    folder = PARTS / f"{model.name}-{code_fingerprint()}"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads())
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda part: measured(part, model, folder), parts_of(options.short))
        counts = [each for records in found for each in records]
    tokens, identical = (sum(each[name] for each in counts) for name in ("tokens", "identical"))
    print(f"{identical:,} of {tokens:,} replayed tokens have all bits")
    if options.out is not None:
        machine = environment(torch.device("cpu")) | {"transformers": version("transformers")}
        content = {"model": model.name, "machine": machine, "counts": counts}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    wrong = failures(counts, 0 if options.short else LEAST)
    print("\n".join(wrong) or "0 bits differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
