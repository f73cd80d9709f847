"""Generation with freshly patched weights at every token."""

import pytest
import torch
from support.generation import generated_logits, own_steps, tokens_of
from support.numeric import noise_floor, noise_limit
from support.patchers import families
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
    assert torch.equal(tokens_of(steps), expected_ids)
    assert torch.equal(torch.stack([step.logits for step in steps], 1), expected)
    # a token of bf16 may differ where the context is run at once, and all that follow
    if dtype == torch.float32:
        assert torch.equal(expected_ids, generated)
    # three rows with something of their own to say
    assert len({tuple(row) for row in expected_ids.tolist()}) == 3


@pytest.mark.parametrize("width", [6, 8, 10, 12, 14])
def test_the_room_of_a_cache_does_not_show_in_odd_heads(width: int) -> None:
    """torch's products round by the place of a head in memory, which the room would shift."""
    sizes = {"head_dim": width, "num_attention_heads": 4, "num_key_value_heads": 4}
    model, ids = build("llama", **sizes), tokens(7, 1, 9)
    expected = own_steps(model, ids, torch.ones_like(ids), 6)
    settings: dict = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with ContextPatcher(model, "exact") as patcher:
        for step in patcher.generate(ids, mode="two_pass", **settings):
            assert torch.equal(step.logits, next(expected))


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
