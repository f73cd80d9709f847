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

Every dtype, plan and environment runs in a process of its own; ``--jobs`` of them at a time. Their
counts are kept in ``build/real``, and a second call goes on with the rest. The exit status is 0 if
every bit is the same.
"""

import argparse
import copy
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
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
from icl_patch.errors import UnsupportedModelError
from icl_patch.models.language_model import position_limit
from icl_patch.patch.atomic_file import write_atomically

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "build" / "real"
RUN = [sys.executable, __file__, "--part"]
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
CHATS = (
    "What is the capital of Finland, and what is it known for?",
    "Write a haiku about the first snow of the year.",
    "My bread does not rise. The yeast is fresh, the water was boiling. What went wrong?",
    "Translate into French: The train to Lyon leaves at half past seven.",
    "Explain to a child of eight why the sky is blue.",
    "List five things to check before a long bicycle tour.",
    "A shop sells three pens for two euros. How much do twelve pens cost? Show the steps.",
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "Which planet of the solar system has the shortest day?",
    "Summarise in one sentence: Bees collect nectar and pollen. On the way they carry pollen from"
    " flower to flower, so that fruit and seeds can grow. Without them many plants would die out.",
    "Give me a polite way to say that I cannot come to the meeting on Thursday.",
    "What is the difference between weather and climate?",
    "Name three uses of copper and the property that each of them needs.",
    "Is 91 a prime number? Answer yes or no, then give the reason.",
    "Write the first paragraph of a story that begins in a lighthouse.",
    "How do I undo the last commit in git without losing my changes?",
)


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
        chats = [CHATS[(number + row) % len(CHATS)] for row in rows]
        return Batch(*_left_padded([_chat(text, tokenizer) for text in chats]), None, kept_mask)
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


def _chat(text: str, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """A question as the tokenizer's chat template writes it, up to the answer; as it is where there
    is no template.
    """
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": text}]
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
        **({"mode": "two_pass"} if way == TWO_PASSES else {}),
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


# -- one process


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
            print(case, flush=True)
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


def write_part(model: str, dtype: str, plan: str, out: str) -> None:
    """Measure one dtype on the cases of a plan, and write the counts."""
    counts = measure(Path(model), getattr(torch, dtype), PLANS[plan])
    write_atomically(out, [json.dumps([vars(each) for each in counts], indent=1).encode()])


# -- all processes

Record = dict[str, Any]  # the counts of one way, number of rows, dtype and environment


@dataclass(frozen=True)
class Part:
    """What one process measures: one of the :data:`PLANS` in a dtype and an environment."""

    dtype: str
    plan: str
    environment: str

    @property
    def name(self) -> str:
        """The name of its files."""
        return re.sub(r"\W+", "-", f"{self.dtype} {self.plan} {self.environment}")


def parts_of(short: bool) -> list[Part]:
    """Everything to measure, the longest first."""
    plans = ("short",) if short else ("8 rows", "3 rows", "1 row")
    full = [Part(dtype, plan, AS_IT_IS) for dtype in DTYPES for plan in plans]
    return full + [Part(dtype, "short", name) for name in ENVIRONMENTS for dtype in DTYPES]


def measured(part: Part, model: Path, folder: Path) -> list[Record]:
    """The counts of a part, from its file or from a process that writes the file.

    Raises:
        RuntimeError: the process failed.
    """
    out, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    if not out.exists():
        further = [] if part.environment == AS_IT_IS else [part.environment.split("=")]
        with log.open("w") as file:
            done = subprocess.run(
                [*RUN, model, part.dtype, part.plan, out],
                env={**os.environ, **dict(further)},
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-12:])
            raise RuntimeError(f"{part} ended with {done.returncode}, see {log}:\n{tail}")
    found = json.loads(out.read_text(encoding="utf-8"))
    return [{"dtype": part.dtype, "environment": part.environment, **each} for each in found]


def is_kept(counts: Record) -> bool:
    """Whether everything promised holds: all bits, here and from files, with nothing but rounding
    to correct.
    """
    rounding = ROUNDINGS * torch.finfo(getattr(torch, counts["dtype"])).eps
    return (
        counts["reason"] is None
        and counts["tokens"] == counts["identical"] > 0
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


def lines(results: list[Record]) -> Iterator[str]:
    """The sums of each dtype and way, a line each."""
    sums: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for counts in results:
        sums[counts["dtype"], counts["way"]].append(counts)
    names = ("tokens", "identical", "saved", "saved_identical", "misses", "taken_twice")
    for key, group in sorted(sums.items()):
        yield f"{' '.join(key)}: " + ", ".join(
            f"{sum(each[name] for each in group):,} {name.replace('_', ' ')}" for name in names
        )


def weights_hash(model: Path) -> str:
    """SHA-256 of a model's files."""
    content = hashlib.sha256()
    for path in sorted(path for path in model.iterdir() if path.is_file()):
        with path.open("rb") as file:
            content.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return content.hexdigest()


def machine() -> dict[str, Any]:
    """The machine and the versions that the counts come from."""
    return environment(torch.device("cpu")) | {"transformers": version("transformers")}


def parts_folder(model: Path) -> Path:
    """Where the parts are kept: of these weights, this code and this machine."""
    own = Path(__file__).read_text(encoding="utf-8")
    key = [weights_hash(model), code_fingerprint(), json.dumps(machine()), own]
    folder = PARTS / hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the tables and write the counts; 1 if a promise does not hold."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--part"]:
        write_part(*given[1:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder with a model and its tokenizer")
    parser.add_argument("--short", action="store_true", help="the short plan only")
    parser.add_argument("--out", type=Path, help="the file for the counts, as JSON")
    threads = torch.get_num_threads()
    jobs = max(1, len(os.sched_getaffinity(0)) // threads)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes at a time")
    options = parser.parse_args(given)
    if not (options.model / "config.json").is_file():
        parser.error(f"expected a folder with a model, got {options.model} without a config.json")
    folder, parts = parts_folder(options.model), parts_of(options.short)
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(measured, part, options.model, folder) for part in parts]
        try:
            for done in track(running, "measuring", console=Console(stderr=True)):
                done.exception()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    broken = [str(done.exception()) for done in running if done.exception()]
    counts = [each for done in running if not done.exception() for each in done.result()]
    print(*lines(counts), sep="\n")
    if options.out is not None and not broken:
        content = {"model": options.model.resolve().name, "machine": machine(), "counts": counts}
        write_atomically(options.out, [(json.dumps(content, indent=1) + "\n").encode()])
    wrong = broken + failures(counts, 0 if options.short else LEAST)
    print("\n".join(wrong) or "0 bits differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
