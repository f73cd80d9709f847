"""Generation with freshly patched weights at every token."""

import pytest
import torch
from support.generation import generated_logits, own_steps
from support.numeric import noise_floor, noise_limit
from support.patchers import families, updates
from support.random_models import build, ragged, tokens

from icl_patch import ContextPatcher, metrics


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_generation_says_what_the_model_says(family: str, dtype: torch.dtype) -> None:
    """Not only the tokens of ``model.generate`` but the bits of the model's own steps, where the
    context is cached in the same split.
    """
    model, ids, mask = build(family, 1, dtype), tokens(7, 3, 12), ragged(3, 12, side="left")
    expected = torch.stack(list(own_steps(model, ids, mask, 6)), 1)
    settings: dict = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    generated = model.generate(ids, attention_mask=mask.long(), **settings)[:, ids.shape[1] :]
    expected_ids = expected.argmax(-1)
    with ContextPatcher(model, "exact") as patcher:
        steps = list(patcher.generate(ids, context_mask=mask, mode="two_pass", **settings))
    assert torch.equal(torch.stack([step.token_ids for step in steps], 1), expected_ids)
    assert torch.equal(torch.stack([step.logits for step in steps], 1), expected)
    # a token of bf16 may differ where the context is run at once, and all that follow
    if dtype == torch.float32:
        assert torch.equal(expected_ids, generated)
    # three rows with something of their own to say
    assert len({tuple(row) for row in expected_ids.tolist()}) == 3


@families
@updates
def test_every_step_is_what_its_patch_replays(family: str, update: str) -> None:
    model, ids, mask = build(family), tokens(8, 3, 9), ragged(3, 9, side="left")
    current, limit = ids[:, -1], noise_limit(model)
    with ContextPatcher(model, update) as patcher:
        steps = list(patcher.generate(ids, context_mask=mask, max_new_tokens=3))
        assert len(steps) == 3
        for number, step in enumerate(steps):
            assert step.token_ids.shape == (3,)
            assert step.token_ids.dtype == torch.int64
            assert step.logits.shape == (3, model.config.vocab_size)
            assert torch.equal(step.token_ids, step.logits.argmax(-1))
            assert torch.equal(step.patch.kept_ids, current.unsqueeze(1))
            assert torch.equal(step.patch.position_ids.squeeze(1), mask.sum(1) - 1 + number)
            assert step.patch.prefix_ids.shape == (3, 0)
            assert all(layer["readers.v"].shape[:2] == (3, 1) for layer in step.patch.layers)
            logits = patcher.forward(step.patch.kept_ids, step.patch)[:, -1]
            if step.patch.passes == 2:  # recorded in the replay's shapes
                assert torch.equal(logits, step.logits)
            assert metrics.linf(logits, step.logits).max() <= limit
            current = step.token_ids


@pytest.mark.parametrize(
    ("family", "update", "mode"),
    [
        ("llama", "direct", "auto"),
        ("gemma3", "stable", "two_stream"),
        ("llama", "stable", "shared_cache"),
    ],
)
def test_generation_under_autocast(family: str, update: str, mode: str) -> None:
    """In the dtype that autocast says, also for a patcher that has generated without it: the
    model's own logits up to its rounding.
    """
    model, ids = build(family), tokens(7, 2, 8)
    settings: dict = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    plain = generated_logits(model, ids, **settings)
    # every weight moved by a spacing of bf16 is far more than another batch in bf16
    limit, limit_bf16 = noise_limit(model), noise_floor(model, dtype=torch.bfloat16)
    for before in (False, True):
        with ContextPatcher(model, update) as patcher:
            if before:
                list(patcher.generate(ids, mode=mode, **settings))
            with torch.autocast("cpu", torch.bfloat16):
                expected = generated_logits(model, ids, **settings)
                steps = list(patcher.generate(ids, mode=mode, **settings))
                with pytest.raises(ValueError, match=r"does not cover .*autocast"):
                    next(patcher.generate(ids, compile=True, mode=mode, **settings))
            again = list(patcher.generate(ids, mode=mode, **settings))
        for step, logits, after, exact in zip(steps, expected, again, plain, strict=True):
            assert metrics.linf(step.logits.float(), logits).max() <= limit_bf16
            assert metrics.linf(after.logits, exact).max() <= limit
            assert metrics.linf(step.logits.float(), after.logits).max() > limit  # it was bf16
