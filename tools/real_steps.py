"""Prove on a real model that exact patches are exact: 5,000 tokens of real text and more in each
dtype, and 0 bits that differ.

    make real                                 # on SmolLM2-135M-Instruct
    make real MODEL=FOLDER                    # on another model
    make real REAL=--short                    # few tokens, into build/real
    build/python tools/real_steps.py FOLDER --wide    # most tokens in 32 rows, in one pass alone
    build/python tools/real_steps.py FOLDER --device cuda

The tokens come in 1, 3 and 8 rows, padded and not, after contexts of 20 to 4,000 tokens of the
repository's pages and sources. Each token is patched in three ways and replayed without its
context, a part of the patches from a file. The references are runs of another copy of the model,
which no patcher has touched. What is measured is kept in ``build/real``, and a second call goes on
with the rest. The exit status is 0 if every bit is the same. Environment variables as
``ATEN_CPU_CAPABILITY=avx2`` make torch choose the kernels of other machines.
"""

import argparse
import copy
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from icl_patch import ContextPatch, ContextPatcher, batch_invariant
from icl_patch.bench.results import code_fingerprint, environment
from icl_patch.evaluation.loading import load_model
from icl_patch.evaluation.verify import ROUNDINGS
from icl_patch.models.forward import cache_name
from icl_patch.models.language_model import position_limit

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "build" / "real"
DTYPES = ("float16", "float32", "bfloat16")
LEAST = 5000  # tokens in each dtype
SAVE_EVERY, MAX_FILE = 8, 256 * 2**20
ONE_PASS = "one pass"
"""A step of ``generate``. Reference: the model's step in ``batch_invariant``."""
TWO_PASSES = "two passes"
"""A step of ``generate(mode="two_pass")``. Reference: the model's step."""
COMPUTE = "compute"
"""``compute`` of all tokens at once. Reference: the model's call on all tokens."""
WAYS = (ONE_PASS, TWO_PASSES, COMPUTE)


class Case(NamedTuple):
    """Contexts of ``rows`` rows, of up to ``context`` tokens of the pages or sources, of different
    lengths if they are ``padded``, and the number of tokens that follow them.
    """

    source: str
    rows: int
    context: int
    padded: bool
    steps: int


WIDE = [  # 32 rows take little longer than 8
    Case("sources", 32, 20, True, 48),
    Case("pages", 32, 16, False, 48),
    Case("pages", 3, 200, True, 32),
    Case("pages", 1, 700, False, 24),
    Case("sources", 8, 60, False, 48),
    Case("pages", 32, 40, True, 48),
    Case("sources", 1, 1500, False, 24),
    Case("pages", 1, 4000, False, 24),
]
SHORT = [
    Case("sources", 1, 100, False, 40),
    Case("pages", 3, 40, True, 16),
    Case("sources", 8, 30, True, 16),
]
CASES = [
    Case("pages", 1, 20, False, 24),
    Case("sources", 1, 100, False, 24),
    Case("sources", 1, 250, False, 24),
    Case("pages", 1, 1000, False, 24),
    Case("pages", 1, 4000, False, 24),
    Case("sources", 3, 60, False, 32),
    Case("sources", 3, 100, True, 32),
    Case("pages", 3, 400, True, 32),
    Case("pages", 3, 700, True, 32),
    Case("pages", 8, 20, False, 32),
    Case("sources", 8, 50, True, 32),
    Case("sources", 8, 100, True, 32),
    Case("pages", 8, 200, True, 32),
    Case("sources", 8, 256, False, 32),
]


class Batch(NamedTuple):
    """Contexts (B, C), left-padded, with their mask; the tokens (B, N) that follow; the current
    tokens, which begin with the context's last; and their mask (B, N) when they are computed at
    once.
    """

    ids: Tensor
    mask: Tensor
    tokens: Tensor
    current: Tensor
    kept_mask: Tensor


@cache
def text_of(source: str, tokenizer: Any) -> Tensor:
    """The tokens of all pages or all Python sources, one file after another."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files = pages if source == "pages" else (ROOT / "icl_patch").rglob("*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]


def batch_of(case: Case, number: int, tokenizer: Any) -> Batch:
    """The batch of the ``number``-th case. Cases of different numbers have different texts."""
    rows, steps, length = range(case.rows), case.steps, case.context
    text = text_of(case.source, tokenizer)
    room = len(text) - length - steps
    starts = [(number * 7919 + row * 1009) % room for row in rows]
    cuts = [row * length // (2 * case.rows) if case.padded else 0 for row in rows]
    spans = list(zip(starts, cuts, strict=True))
    parts = [text[start + cut : start + length] for start, cut in spans]
    ids = pad_sequence(parts, batch_first=True, padding_side="left")
    mask = torch.arange(length) >= torch.tensor(cuts)[:, None]
    tokens = torch.stack([text[start + length : start + length + steps] for start in starts])
    short = torch.tensor([row * 5 % steps // 2 if case.padded else 0 for row in rows])
    kept_mask = torch.arange(steps) < steps - short[:, None]
    return Batch(ids, mask, tokens, torch.cat([ids[:, -1:], tokens[:, :-1]], 1), kept_mask)


@torch.no_grad()
def references(model: Any, batch: Batch, ways: Sequence[str] = WAYS) -> dict[str, Tensor]:
    """The logits (B, N, V) of the ways, of a model that nothing is attached to."""
    mask = torch.cat([batch.mask, torch.ones_like(batch.kept_mask[:, 1:])], 1)
    start = batch.ids.shape[1] - 1
    cache = DynamicCache(config=model.config)
    call(model, batch.ids[:, :-1], mask[:, :start], cache, logits_to_keep=1)

    def step_by_step() -> Tensor:
        own, logits = copy.deepcopy(cache), []
        for step, token in enumerate(batch.current.split(1, 1)):
            logits.append(call(model, token, mask[:, : start + step + 1], own))
        return torch.cat(logits, 1)

    def one_pass() -> Tensor:
        with batch_invariant(model, attention=False):
            return step_by_step()

    def together() -> Tensor:
        kept = torch.cat([batch.mask[:, :-1], batch.kept_mask], 1)
        return call(model, batch.current, kept, copy.deepcopy(cache))

    run = {ONE_PASS: one_pass, TWO_PASSES: step_by_step, COMPUTE: together}
    return {way: run[way]() for way in ways}


def call(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache, **further: Any) -> Tensor:
    """One call on tokens (B, T) over a cache, with the mask (B, S) of all tokens so far."""
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(
        ids,
        attention_mask=mask,
        position_ids=positions,
        **{cache_name(model): cache},
        **further,
    ).logits


def patches(
    patcher: ContextPatcher, way: str, batch: Batch
) -> Iterator[tuple[ContextPatch, slice]]:
    """The patches of a batch, each with its columns of the current tokens."""
    if way == COMPUTE:
        patch = patcher.compute(
            batch.ids[:, :-1],
            batch.current,
            context_mask=batch.mask[:, :-1],
            kept_mask=batch.kept_mask,
        )
        yield patch, slice(None)
        return
    start = batch.ids.shape[1]
    steps = patcher.generate(
        batch.ids,
        context_mask=batch.mask,
        max_new_tokens=batch.tokens.shape[1],
        prefix_allowed_tokens_fn=lambda row, ids: batch.tokens[row, len(ids) - start, None],
        mode="two_pass" if way == TWO_PASSES else "auto",
    )
    for column, step in enumerate(steps):
        if way == ONE_PASS and step.patch.info.arithmetic != "batch_invariant":
            raise ValueError("expected exact steps in one pass: generate takes this model's in two")
        yield step.patch, slice(column, column + 1)


def same_bits(logits: Tensor, reference: Tensor) -> Tensor:
    """Whether all bits agree: two (B, T, V) of one dtype -> (B, T) bool."""
    assert logits.dtype == reference.dtype
    return (logits.view(torch.uint8) == reference.view(torch.uint8)).all(-1)


def count(patcher: ContextPatcher, way: str, batch: Batch, expected: Tensor) -> dict[str, Any]:
    """Replay the patches of one way on a batch.

    Returns:
        tokens: replayed, one for each row. identical: of these, with all bits of the reference's
        logits. saved, saved_identical: likewise, replayed from a file. misses: elements of block
        outputs that the patch does not reach. reader_error, correction: the largest of the patches'
        reports.
    """
    names = ("tokens", "identical", "saved", "saved_identical", "misses")
    found = {**dict.fromkeys(names, 0), "reader_error": 0.0, "correction": 0.0}
    for number, (patch, columns) in enumerate(patches(patcher, way, batch)):
        assert torch.equal(patch.kept_ids, batch.current[:, columns])
        kept, report, reference = patch.kept_mask, patch.report, expected[:, columns]
        assert report is not None
        same = same_bits(patcher.forward(patch.kept_ids, patch), reference) & kept
        found["tokens"] += int(kept.sum())
        found["identical"] += int(same.sum())
        found["misses"] += int((report.misses * kept).sum())
        for name in ("reader_error", "correction"):  # a NaN stays
            largest = torch.where(kept, getattr(report, name), 0).max().double()
            found[name] = float(largest.maximum(torch.tensor(found[name])))
        if number % SAVE_EVERY == 0 and patch.nbytes <= MAX_FILE:
            same = same_bits(replayed_from_file(patcher, patch), reference) & kept
            found["saved"] += int(kept.sum())
            found["saved_identical"] += int(same.sum())
    return found


def replayed_from_file(patcher: ContextPatcher, patch: ContextPatch) -> Tensor:
    """The logits of a patch that was saved and loaded."""
    with TemporaryDirectory() as folder:
        patch.save(path := Path(folder, "patch.safetensors"))
        loaded = ContextPatch.load(path, patcher.model, patcher.tokenizer)
        return patcher.forward(loaded.kept_ids, loaded)


def measure(
    folder: Path,
    dtype: str,
    device: torch.device,
    cases: list[Case],
    ways: Sequence[str],
    done: set[Any],
) -> Iterator[Any]:
    """The counts of every case and way that is not done."""
    (plain, tokenizer), (attached, _) = (
        load_model(folder, dtype=getattr(torch, dtype), device=device) for _ in range(2)
    )
    attached.generation_config.eos_token_id = None  # every row takes all steps
    with ContextPatcher(attached, tokenizer=tokenizer) as patcher:
        for number, case in enumerate(cases):
            if case.context + case.steps > position_limit(plain):
                print(f"left out, beyond the model's positions: {case}", file=sys.stderr)
            elif missing := [way for way in ways if (dtype, way, *case) not in done]:
                batch = Batch(*(x.to(device) for x in batch_of(case, number, tokenizer)))
                expected = references(plain, batch, missing)
                for way in missing:
                    about = {"dtype": dtype, "way": way, "case": case}
                    yield about | count(patcher, way, batch, expected[way])


def failures(counts: list[dict[str, Any]], least: int) -> list[str]:
    """The broken promises, a line each.

    All bits are the same, here and from files, the patches correct only rounding, and each dtype
    has ``least`` tokens.
    """
    tokens, lines = Counter[str](), []
    for each in counts:
        tokens[each["dtype"]] += each["tokens"]
        rounding = ROUNDINGS[each["dtype"]] * torch.finfo(getattr(torch, each["dtype"])).eps
        if not (
            each["tokens"] == each["identical"] > 0
            and each["saved"] == each["saved_identical"]
            and each["misses"] == 0
            and each["reader_error"] <= rounding
            and each["correction"] <= rounding
        ):
            lines.append("not exact: " + json.dumps(each))
    few = [f"{n} tokens in {dtype}, fewer than {least}" for dtype, n in tokens.items() if n < least]
    return lines + few


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write the counts; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", type=Path, help="a folder with a model and its tokenizer")
    parser.add_argument("--short", action="store_true", help="few tokens")
    parser.add_argument("--wide", action="store_true", help="most in 32 rows, in one pass alone")
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu by default")
    parser.add_argument("--dtype", choices=DTYPES, help="one of them; else all, one by one")
    parser.add_argument("--out", type=Path, help="the file for the counts, as JSON")
    options = parser.parse_args(arguments)
    folder = options.model.resolve()
    cases = SHORT if options.short else WIDE if options.wide else CASES
    ways = (ONE_PASS,) if options.wide else WAYS
    PARTS.mkdir(parents=True, exist_ok=True)
    where = "" if options.device.type == "cpu" else f"-{options.device.type}"
    name = f"{folder.name}-{code_fingerprint()}{where}"
    kept = PARTS / f"{name}.jsonl"
    kept.touch()
    counts = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    done = {(each["dtype"], each["way"], *each["case"]) for each in counts}
    with kept.open("a", encoding="utf-8") as file:
        for dtype in [options.dtype] if options.dtype else DTYPES:
            for each in measure(folder, dtype, options.device, cases, ways, done):
                counts.append(each)
                print(json.dumps(each), file=file, flush=True)
                print(dtype, each["way"], each["case"], file=sys.stderr, flush=True)
    tokens, identical = (sum(each[name] for each in counts) for name in ("tokens", "identical"))
    print(f"{identical:,} of {tokens:,} replayed tokens have all bits")
    if options.out is not None:
        machine = environment(options.device) | {"transformers": version("transformers")}
        content = {"model": folder.name, "machine": machine, "counts": counts}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    wrong = failures(counts, 0 if options.short else LEAST)
    print("\n".join(wrong) or "0 bits differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
