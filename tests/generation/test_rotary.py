"""Rotary positions in one operation: which models' steps have them, and whose bits they are."""

from itertools import cycle
from typing import Any

import pytest
import torch
from support.generation import generated_logits
from support.inversion import needs_native
from support.numeric import noise_limit
from support.random_models import build, ragged, shallow, tokens
from torch import Tensor

from icl_patch import ContextPatcher, metrics, ops
from icl_patch.generation import one_pass_plan

IDS, MASK = tokens(3, 3, 11), ragged(3, 11, side="left")
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
FUSED = ("llama", "gemma3", "qwen3_moe", "phi3", "phi")
# of part of a head, of pairs of neighbours, and none
OTHERS = ("gpt_neox", "cohere", "gpt2")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of our op."""
    found: list[int] = []

    def counted(query: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        found.append(len(query))
        return own(query, *others)

    own = ops.rotary_embedding
    monkeypatch.setattr(ops, "rotary_embedding", counted)
    return found


@needs_native
@pytest.mark.parametrize(
    ("family", "dtype"),
    zip([*FUSED, *OTHERS], cycle([torch.float32, torch.bfloat16]), strict=False),
    ids=str,
)
def test_a_step_has_the_bits_of_a_step_without(
    family: str, dtype: torch.dtype, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = IDS % 32
    with ContextPatcher(shallow(family, dtype=dtype), "stable") as patcher:
        made = list(patcher.generate(ids, context_mask=MASK, **ARGUMENTS))
        layers = len(patcher.attached_model.blocks)
        used = calls.count(len(ids) * (2 if made[0].mode == "two_stream" else 1))
        assert (used >= 3 * layers) == (family in FUSED)
        monkeypatch.setattr(one_pass_plan, "rotary_overrides", lambda _: set())
        patcher.plans.clear()
        calls.clear()
        for step, other in zip(
            made, patcher.generate(ids, context_mask=MASK, **ARGUMENTS), strict=True
        ):
            assert torch.equal(step.logits, other.logits)
        assert not calls


@needs_native
def test_a_function_that_takes_the_place_later(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kernels of other packages do, for all models of a source file."""
    from transformers.models.llama import modeling_llama

    own = modeling_llama.apply_rotary_pos_emb

    def half_as_far(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        angle = torch.atan2(sin, cos) / 2
        return own(query, key, angle.cos(), angle.sin())

    model = build("llama")
    with ContextPatcher(model, "stable") as patcher:
        list(patcher.generate(IDS, **ARGUMENTS))
        assert calls
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", half_as_far)
        expected, limit = generated_logits(model, IDS, **ARGUMENTS), noise_limit(model)
        calls.clear()
        for step, logits in zip(patcher.generate(IDS, **ARGUMENTS), expected, strict=True):
            assert metrics.linf(step.logits, logits).max() <= limit
        assert len(calls) == 1  # on random numbers
        assert modeling_llama.apply_rotary_pos_emb is half_as_far
