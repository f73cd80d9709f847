"""The check of a real model, tried on a small one: references, and what it notices."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.numeric import bits, noise_limit
from support.random_models import build
from torch import Tensor

from icl_patch import ContextPatcher, embedded, metrics
from tools import real_steps
from tools.real_steps import COMPUTE, ONE_PASS, TWO_PASSES, WAYS, Case, batch_of, references

TOKENIZER = embedded.load()[1]
RAGGED = Case("pages", 3, 20, True, 6)


def small_model(dtype: torch.dtype) -> Any:
    model = build("llama", 0, dtype, vocab_size=len(TOKENIZER))
    model.generation_config.eos_token_id = None
    return model


def test_the_references_are_the_model_on_each_row_alone() -> None:
    """Up to rounding; and each is a run of its own, with other bits."""
    model = small_model(torch.float32)
    batch = batch_of(RAGGED, 0, TOKENIZER)
    logits = references(model, batch)
    assert torch.equal(batch.current, torch.cat([batch.ids[:, -1:], batch.tokens[:, :-1]], 1))
    limit = noise_limit(model, batch.ids)
    for row in range(3):
        ids = torch.cat([batch.ids[row, batch.mask[row]], batch.tokens[row, :-1]])
        with torch.no_grad():
            alone = model(ids[None]).logits[0, -6:]
        for way in WAYS:
            kept = batch.kept_mask[row] if way == COMPUTE else slice(None)
            error = metrics.linf(logits[way][row, kept], alone[kept]).max()
            assert error <= limit, (way, row)
    assert not torch.equal(logits[ONE_PASS], logits[TWO_PASSES])


@pytest.fixture(scope="module")
def measured() -> Any:
    """A patcher, a batch and its references."""
    batch = batch_of(RAGGED, 1, TOKENIZER)
    logits = references(small_model(torch.bfloat16), batch)
    with ContextPatcher(small_model(torch.bfloat16), tokenizer=TOKENIZER) as patcher:
        yield patcher, batch, logits


def flipped(logits: Tensor) -> Tensor:
    """The lowest bit of one logit of the last row's first token."""
    logits = logits.clone()
    bits(logits)[-1, 0, 7] ^= 1
    return logits


@pytest.mark.parametrize("way", WAYS)
def test_all_tokens_are_bit_identical_and_one_flipped_bit_is_counted(
    way: str, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patcher, batch, logits = measured
    counts = real_steps.count(patcher, way, batch, logits[way])
    tokens = int(batch.kept_mask.sum()) if way == COMPUTE else 18
    assert counts["tokens"] == counts["identical"] == tokens
    assert counts["saved"] == counts["saved_identical"] == (tokens if way == COMPUTE else 3)
    assert counts["misses"] == 0
    forward = patcher.forward
    monkeypatch.setattr(patcher, "forward", lambda *inputs: flipped(forward(*inputs)))
    counts = real_steps.count(patcher, way, batch, logits[way])
    assert counts["identical"] == tokens - (1 if way == COMPUTE else 6)
    assert counts["saved_identical"] == counts["saved"] - 1


@pytest.mark.stress
def test_a_folder_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model(torch.float32).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(real_steps, "PARTS", tmp_path / "parts")
    monkeypatch.setattr(real_steps, "SHORT", [RAGGED])
    out = tmp_path / "counts.json"
    for _ in range(2):  # the second goes on, with nothing
        assert real_steps.main([str(tmp_path / "model"), "--short", "--out", str(out)]) == 0
        counts = json.loads(out.read_text())["counts"]
        assert [each["way"] for each in counts] == [*WAYS] * 3


COUNTS = {
    "rows": 3, "tokens": 900, "identical": 900, "misses": 0, "saved": 7, "saved_identical": 7,
    "reader_error": 1e-7, "correction": 1e-7, "dtype": "float32", "way": "compute",
}  # fmt: skip


WRONG = [{"identical": 899}, {"saved_identical": 6}, {"misses": 1}, {"reader_error": 1e-3}]
WRONG += [{"correction": float("nan")}, {"tokens": 0, "identical": 0}]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
def test_a_promise_that_does_not_hold_fails(wrong: dict[str, Any]) -> None:
    assert real_steps.failures([COUNTS] * 6, 5000) == []
    assert "fewer than 5000" in real_steps.failures([COUNTS] * 5, 5000)[0]
    [line] = real_steps.failures([*[COUNTS] * 6, COUNTS | wrong], 5000)
    assert line.startswith("not exact: ") and '"dtype": "float32"' in line


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("real-exact", real_steps.LEAST),
        ("real-exact-gpu", 600),
        ("real-exact-gemma-3-270m", real_steps.LEAST),
    ],
)
def test_the_committed_counts_keep_all_promises(name: str, least: int) -> None:
    path = real_steps.ROOT / "docs" / "data" / f"{name}.json"
    counts = json.loads(path.read_text(encoding="utf-8"))["counts"]
    assert real_steps.failures(counts, least) == []
    # Gemma 3 270M overflows in fp16 by itself
    dtypes = {*real_steps.DTYPES} - ({"float16"} if "gemma" in name else set())
    assert {each["dtype"] for each in counts} == dtypes
