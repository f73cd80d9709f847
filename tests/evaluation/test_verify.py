"""The papers' protocol, on the embedded model (the proof at full size) and on random models (its
parts).
"""

import copy
import dataclasses
import json
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.generation import own_steps, spoil_closing
from support.numeric import noise_limit
from support.random_models import build
from torch import Tensor

from icl_patch import batch_invariant, embedded, metrics, verify
from icl_patch.evaluation import demo, exact_steps, tiny_models
from icl_patch.evaluation.loading import encode_contexts
from icl_patch.evaluation.verify import VerifyReport
from icl_patch.generation.decoding import DecodeResult, DecodeState, decode_one_token
from icl_patch.recording import block_math
from icl_patch.tolerances import noise_limit as noise_limit_of
from icl_patch.tolerances import rounding_limit
from tools.train_embedded import build_tokenizer

FEW, FULL = (8, 5), (20, 25)  # prompts and new tokens of each
RANDOM_VOCABULARY = 259  # the byte tokenizer's


def proof(update: str, dtype: torch.dtype, prompts: int, count: int) -> VerifyReport:
    texts = [prompt.context + prompt.question for prompt in demo.held_out(prompts)]
    report = verify(context=texts, max_new_tokens=count, update=update, dtype=dtype)
    model, tokenizer = embedded.load(dtype)
    lengths = []  # of the model's own answers; in 16 bits a batch rounds otherwise
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        lengths.append(model.generate(ids, max_new_tokens=count, do_sample=False).shape[1])
        lengths[-1] -= ids.shape[1]
    if dtype == torch.float32:
        assert report.lengths == lengths
    assert len(report.steps) == sum(report.lengths) == pytest.approx(sum(lengths), rel=0.1)
    return report


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        *((dtype, FEW) for dtype in (torch.float32, torch.bfloat16)),
        *(
            pytest.param(dtype, FULL, marks=pytest.mark.stress)
            for dtype in (torch.bfloat16, torch.float16)
        ),
    ],
    ids=str,
)
def test_exact_on_the_embedded_model(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    report = proof("exact", dtype, *sizes)
    epsilon = torch.finfo(dtype).eps
    assert report.bit_identical == report.token_match == report.blocks_bit_identical == 1.0
    assert report.misses == 0
    # bit identity alone would hold with no reader patched
    assert report.reader_error_max <= 4 * epsilon
    assert report.correction_max <= 8 * epsilon
    assert report.passed
    in_two_passes, in_one = report.arithmetics
    assert in_two_passes.linf_max == 0  # the unmodified model itself
    for steps in report.arithmetics:
        assert steps.reason is None
        assert steps.bit_identical == 1.0 and steps.misses == steps.tokens_taken_twice == 0
        assert steps.reader_error_max <= 4 * epsilon and steps.correction_max <= 8 * epsilon
    # rounding decides a near tie of 16-bit logits otherwise now and then
    assert in_one.token_match >= (0.99 if dtype == torch.float32 else 0.97)
    if dtype == torch.float32:
        assert in_one.linf_max <= noise_limit(embedded.load()[0])
    else:
        assert 0 < in_one.linf_max_fp32 <= 2 * in_two_passes.linf_max_fp32


@torch.no_grad()
def test_exact_steps_are_compared_with_the_model_in_each_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The numbers against the model's own calls; and a wrong replay in one pass shows."""
    model = build("llama", 0, torch.bfloat16, vocab_size=RANDOM_VOCABULARY)
    texts = ["some context that matters", "and a longer one of another length"]
    arguments = {"context": texts, "max_new_tokens": 3}
    report = verify(model, build_tokenizer(), **arguments)
    ids, mask = encode_contexts(build_tokenizer(), texts)
    tokens = torch.tensor([step.token_id for step in report.steps]).view(2, 3)
    invariant = partial(batch_invariant, model, attention=False)
    around = {"model": nullcontext, "batch_invariant": invariant}
    runs = {
        name: torch.stack(list(own_steps(model, ids, mask, 3, tokens.unbind(1), inside)), 1)
        for name, inside in around.items()
    }
    whole = torch.cat([ids, tokens[:, :-1]], 1)
    seen = torch.cat([mask, mask.new_ones(2, 2)], 1).long()
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    fp32 = copy.deepcopy(model).float()(whole, seen, positions).logits[:, -3:]
    for steps in report.arithmetics:
        logits = runs[steps.arithmetic]
        assert steps.bit_identical == 1.0
        assert steps.linf_max == float(metrics.linf(logits, runs["model"]).max())
        assert steps.token_match == float((logits.argmax(-1) == tokens).double().mean())
        assert steps.linf_max_fp32 == pytest.approx(float(metrics.linf(logits, fp32).max()), 1e-3)
    monkeypatch.setattr(exact_steps, "decode_one_token", _spoilt)
    report = verify(model, build_tokenizer(), **arguments)
    in_two_passes, in_one = report.arithmetics
    assert (in_two_passes.bit_identical, in_one.bit_identical) == (1.0, 0.0)
    assert report.bit_identical == 1.0
    assert not report.passed and "in one pass" in str(report.failure)


def _spoilt(state: DecodeState, token_ids: Tensor) -> DecodeResult:
    """A step with a patch that is a little off."""
    result = decode_one_token(state, token_ids)
    patch, name = result.make_patch(), "mlp.down_proj.u"
    layers = tuple(layer | {name: 1.01 * layer[name]} for layer in patch.layers)
    return dataclasses.replace(result, make_patch=lambda: dataclasses.replace(patch, layers=layers))


def test_exact_steps_that_miss_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block misses at every step: both rows are closed again, and nothing is left."""
    spoil_closing(monkeypatch, 0)
    model = build("llama", 0, vocab_size=RANDOM_VOCABULARY)
    texts = ["some context", "and another one"]
    report = verify(model, build_tokenizer(), context=texts, max_new_tokens=3)
    in_one = report.arithmetics[1]
    assert (in_one.tokens_taken_twice, in_one.misses, in_one.bit_identical) == (6, 0, 1.0)


@pytest.mark.parametrize(
    ("family", "stay", "reason"),
    [
        ("llama", {"keep_last": 2}, "several tokens that stay"),
        ("llama", {"keep_first": 1}, "several tokens that stay"),
        ("llama4", {}, "its experts scale their input"),
    ],
)
def test_where_one_pass_is_not_possible_the_reason_stands(
    family: str, stay: dict[str, int], reason: str
) -> None:
    model = tiny_models.build(family, 0, vocab_size=RANDOM_VOCABULARY)
    arguments = {"context": "some context", "max_new_tokens": 2} | stay
    report = verify(model, build_tokenizer(), **arguments)
    in_two_passes, in_one = report.arithmetics
    assert report.passed and in_two_passes.bit_identical == 1.0
    assert reason in in_one.reason and in_one.bit_identical is None


def test_the_report_would_show_a_wrong_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the readers' part of the patch the check must fail, and by far."""

    monkeypatch.setattr(block_math, "reader_update", lambda y_ctx, y: torch.zeros_like(y))
    # attaching would notice
    monkeypatch.setattr("icl_patch.recording.self_check.SelfCheck.run", lambda *_: None)
    model = build("gemma3", 0, vocab_size=RANDOM_VOCABULARY)
    arguments = {"max_new_tokens": 20, "update": "stable"}
    report = verify(model, build_tokenizer(), context="some context that matters", **arguments)
    assert not report.passed
    assert report.to_dict()["linf_max"] > 100 * report.limit
    assert report.reader_error_max > 0.01


def test_an_error_far_above_the_noise_does_not_pass() -> None:
    report = verify(max_new_tokens=2, update="stable")
    step = dataclasses.replace(report.steps[0], match=True, linf=9e-5)
    for floor, passes in ((1e-6, False), (0.0, False), (1e-5, True)):
        noise = {"linf_max": floor, "tvd_max": floor}
        changed = dataclasses.replace(report, steps=[step], noise_floor=noise)
        assert changed.passed is passes
        assert passes or "logits differ by 9e-05, and " in str(changed.failure)
    assert noise_limit_of(2e-5) == 2e-4


def test_report_is_plain_json_with_the_documented_fields() -> None:
    numbers = verify(max_new_tokens=4, update="stable", dtype=torch.bfloat16).to_dict()
    assert json.loads(json.dumps(numbers)) == numbers
    documented = "model family update dtype device tokens passes token_match bit_identical linf_max"
    documented += " linf_median tvd_max tvd_median noise_floor reader_error_max experts_identical"
    documented += " correction_max arithmetics steps"
    assert set(documented.split()) <= numbers.keys()
    assert numbers["tokens"] == len(numbers["steps"]) == 4
    assert set(numbers["steps"][0]) == {"token_id", "match", "bit_identical", "linf", "tvd"}
    assert set(numbers["noise_floor"]) == {"linf_max", "tvd_max"}


def test_a_model_passed_in_is_not_changed() -> None:
    model = build("llama", 1, vocab_size=RANDOM_VOCABULARY)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verify(model, build_tokenizer(), context="abc", max_new_tokens=2, dtype=torch.bfloat16)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name].dtype == x.dtype for name, x in before.items())
    assert all(torch.equal(after[name], x) for name, x in before.items())


PADDED_RIGHT = {"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.eye(3)[:1]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens ≥ 1"),
        ({"keep_last": -1}, "keep_last ≥ 0"),
        ({"keep_first": -1}, "keep_first ≥ 0, got 50, 0 and -1"),
        ({"context": "ab", "keep_last": 5}, "more than 6 tokens"),
        ({"context": []}, "at least one token"),
        ({"context": {"attention_mask": torch.ones(1, 3)}}, "expected input_ids in the context, "),
        ({"context": {"input_ids": torch.tensor([[1, 10**6, 2]])}}, "expected ids from 0 to"),
        ({"context": "ab", "max_new_tokens": 100_000}, r"positions for, got \d+ and 99999 new"),
        ({"update": "best"}, "expected update"),
        ({"chat": True}, "chat template"),
        ({"context": PADDED_RIGHT}, "expected context_mask with padding on the left only"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(**arguments)


@pytest.mark.parametrize("update", ["direct", "stable", "exact"])
def test_an_fp64_model_passes(update: str) -> None:
    report = verify(update=update, dtype=torch.float64, max_new_tokens=3)
    assert report.passed and report.token_match == 1
    assert max(step.linf for step in report.steps) <= 1e-6


def test_arguments_of_other_types() -> None:
    with pytest.raises(TypeError, match="or as a processor's output with input_ids, got Tensor"):
        verify(context=torch.ones(1, 3).long())
    with pytest.raises(TypeError, match=r"expected dtype as torch\.float32, .* got 'bf16'"):
        verify(dtype="bf16")


def test_weights_that_are_missing(tmp_path: Path) -> None:
    """The library makes them up and goes on."""
    model, tokenizer = embedded.load()
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name: x for name, x in load_file(file).items() if "layers.1.mlp.up_proj" not in name}
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(OSError, match=r"expected all weights in .*, 1 are missing, as model\.lay"):
        verify(tmp_path)
    other = {"model.layers.1.mlp.up_proj.weight": torch.ones(3, 3)}
    save_file(weights | other, file, {"format": "pt"})
    for content in (file.read_bytes(), (embedded.MODEL_DIR / file.name).read_bytes()[:-100]):
        file.write_bytes(content)  # of another shape; cut off
        with pytest.raises(OSError, match="expected whole weights in"):
            verify(tmp_path)


@pytest.mark.parametrize(
    ("update", "dtype"),
    [("exact", torch.float32), ("stable", torch.float32), ("exact", torch.bfloat16)],
)
def test_nothing_is_proven_of_a_model_that_contradicts_itself(
    update: str, dtype: torch.dtype
) -> None:
    report = verify(max_new_tokens=2, update=update, dtype=dtype)
    assert report.passed
    for floor in (2.6, math.nan) if dtype == torch.bfloat16 else (0.02, 2.6, math.nan):
        noise = report.noise_floor | {"linf_max": floor}
        failure = dataclasses.replace(report, noise_floor=noise).failure
        assert failure and f"contradicts itself: its logits differ by {floor:.2g}, and" in failure
    model = build("llama", 0, dtype, vocab_size=RANDOM_VOCABULARY)
    with pytest.raises(ValueError, match="eval mode"):
        verify(model.train(), build_tokenizer(), context="abc", max_new_tokens=2, update=update)


def test_metrics_on_known_numbers() -> None:
    reference = torch.tensor([[0.0, 0.0, 4.0]])
    assert metrics.linf(torch.tensor([[0.0, 1.0, 4.0]]), reference).item() == 0.25
    assert metrics.linf(torch.tensor([[0.0, math.nan, 4.0]]), reference).item() == math.inf
    assert metrics.linf(torch.zeros(1, 3), torch.zeros(1, 3)).item() == 0
    infinite = torch.tensor([[1.0, 2.0, math.inf]])
    assert metrics.linf(reference, infinite) == metrics.linf(infinite, reference) == math.inf
    assert metrics.linf(infinite, infinite).item() == 0
    # of the largest that is finite
    assert metrics.linf(torch.tensor([[1.0, 5.0, math.inf]]), infinite).item() == 1.5
    nan = torch.tensor([[[math.nan, 1.0, 4.0], [0.0, 3.0, 4.0]]])  # a token of each
    valid = torch.tensor([[True, False]])
    expected = torch.tensor([[[math.nan, 2.0, 4.0], [0.0, 0.0, 4.0]]])
    assert metrics.replay_error(nan, expected, valid) == math.inf  # NaN is equal to nothing
    assert metrics.replay_error(nan, expected, ~valid) == 0.75
    assert metrics.replay_error(nan, expected, valid & ~valid) == 0
    two = torch.tensor([[math.log(3.0), 0.0]])
    assert metrics.total_variation(two, torch.zeros(1, 2)).item() == pytest.approx(0.25)
    assert metrics.same_argmax(two, reference[:, :2] + torch.tensor([[1.0, 0.0]])).all()
    assert not metrics.bit_identical(two, torch.zeros(1, 2)).any()
    assert rounding_limit(torch.bfloat16) == 2.0**-3.5  # √2⁻⁷
    assert rounding_limit(torch.float64) == rounding_limit(torch.float32) == 2.0**-11.5
