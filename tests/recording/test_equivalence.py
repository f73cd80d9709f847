"""The main claim, on random models: a replay without the context gives what the model gives with
it.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from support.numeric import EPSILON, NARROW, every_narrow, replay_limit
from support.patchers import refuses, updates
from support.random_models import FAMILIES, Stock, build, case, shallow, tokens
from torch import Tensor, nn

from icl_patch import ContextPatch, ContextPatcher, metrics
from icl_patch.evaluation import tiny_models
from icl_patch.models.block_detection import blocks_of
from icl_patch.recording.sequences import assemble
from tools import model_types


def replayed(patcher: ContextPatcher, patch: ContextPatch) -> Tensor:
    return patcher.forward(patch.kept_ids, patch)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatched_readers_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no reader patched the writer absorbs everything and the logits are still right; the
    report must say so.
    """
    model, inputs = build(family, 3, torch.bfloat16), case("span", 3)
    reference = Stock(model).logits(inputs)
    with ContextPatcher(model, "exact") as patcher:
        monkeypatch.setattr(
            "icl_patch.recording.block_math.reader_update",
            lambda y_ctx, y: torch.zeros_like(y, dtype=torch.float32),
        )
        patch = patcher.compute(**inputs)
        logits = replayed(patcher, patch)
    mask = patch.kept_mask
    assert torch.equal(logits[mask], reference[mask])
    assert patch.report.reader_error.max() > 30 * EPSILON[torch.bfloat16]
    assert patch.report.correction.max() > 30 * EPSILON[torch.bfloat16]


WRONG = [("gemma3", {"readers": ("mlp.up_proj",)}), ("llama", {"readers": ("mlp.gate_proj",)})]
WRONG += [("gemma3", {"scale_offset": 0.0}), ("llama", {"residual_factor": 0.5})]
# in bf16 this is within rounding
WRONG_BY_A_PER_CENT = [("gemma3", {"scale_offset": 1.01}), ("llama", {"residual_factor": 1.01})]


def read_otherwise(model: nn.Module, monkeypatch: pytest.MonkeyPatch, changes: dict) -> None:
    """From now on attaching finds blocks whose forms have these changes."""
    blocks = [
        dataclasses.replace(block, spec=dataclasses.replace(block.spec, **changes))
        for block in blocks_of(model)
    ]
    place = "icl_patch.recording.self_check.blocks_of"
    monkeypatch.setattr(place, lambda _model, run: run() or blocks)


@pytest.mark.parametrize(
    ("family", "wrong", "dtype"),
    [(*form, dtype) for form in WRONG for dtype in NARROW.values()]
    + [(*form, torch.float32) for form in WRONG_BY_A_PER_CENT],
)
def test_attaching_notices_a_wrong_form(
    family: str, wrong: dict, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shallow(family, 3, dtype)
    read_otherwise(model, monkeypatch, wrong)
    refuses(model, r"model\.layers\.\d has inputs or parameters")


@pytest.mark.parametrize("found", [0.2203, 1.0])
@every_narrow
def test_a_multiplier_is_measured(
    dtype: torch.dtype, found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One found in a model's rounded outputs is right to as many digits as its dtype has."""
    model = shallow("granite", 3, dtype)
    read_otherwise(model, monkeypatch, {"residual_multiplier": found})
    with ContextPatcher(model) as patcher:
        specs = {block.spec.residual_multiplier for block in patcher.attached_model.block_specs}
    assert specs == {0.22}


def _gpt_neo() -> nn.Module:
    """With windows that count its cache, longer ones than attaching tries."""
    types = [[["global", "local"], 1]]
    return model_types.build(
        "gpt_neo", {"attention_types": types, "num_layers": 2, "window_size": 12}
    )


def _llama4() -> nn.Module:
    """With a temperature that rises with every 16 tokens in its cache (8192 in the released
    models).
    """
    sizes = {"floor_scale": 16, "attn_scale": 0.5, "attention_chunk_size": 64}
    return tiny_models.build("llama4", attn_temperature_tuning=True, **sizes)


@pytest.mark.parametrize("make", [_gpt_neo, _llama4])
@updates
def test_attention_that_counts_its_cache(make: Callable[[], nn.Module], update: str) -> None:
    """A replay's is shorter: what the kept tokens attend to is another computation there, unless
    each is alone.
    """
    model = make()
    prefix, context, kept = tokens(0, 2, 6) % 97, tokens(1, 2, 20) % 97, tokens(2, 2, 6) % 97
    behind = torch.cat([prefix, context], 1)
    all_inputs = {
        "prefix": assemble(behind, kept, keep_first=6),
        "prefix, one token": assemble(behind, kept[:, :1], keep_first=6),
        "span": assemble(context, kept),
        "one token": assemble(context, kept[:, :1]),
    }
    with ContextPatcher(model, update) as patcher:
        for inputs in all_inputs.values():
            computed = patcher.attached_model.compute(inputs)
            with torch.no_grad():
                logits = model(inputs.ids).logits
            expected = logits[:, inputs.head :]
            limit = replay_limit(patcher, computed.patch)
            assert metrics.linf(computed.patch.logits, expected).max() <= limit
            assert metrics.linf(replayed(patcher, computed.patch), expected).max() <= limit


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_attention_to_the_tokens_with_the_highest_scores(kind: str) -> None:
    """An indexer lets a token attend to 6 others, and its two heads often give scores of 0: which
    of several such tokens they are depends on how many tokens there are.
    """
    sizes = {"index_topk": 6, "index_n_heads": 2, "index_head_dim": 16}
    model = model_types.build(kind, sizes)
    prefix, context, kept = tokens(0, 2, 4), tokens(1, 2, 9), tokens(2, 2, 9)
    behind = torch.cat([prefix, context], 1)
    cases = [
        {"context_ids": behind, "kept_ids": kept[:, :4], "keep_first": 4},
        {"context_ids": context[:, :3], "kept_ids": kept},
        {"context_ids": context, "kept_ids": kept[:, :1]},
    ]
    references = [Stock(model).logits(inputs) for inputs in cases]
    for update in ("direct", "stable", "exact"):
        with ContextPatcher(model, update) as patcher:
            for inputs, expected in zip(cases, references, strict=True):
                patch = patcher.compute(**inputs)
                assert metrics.linf(patch.logits, expected).max() <= 1e-5, update
                assert metrics.linf(replayed(patcher, patch), expected).max() <= 1e-5, update
                if patch.kept_ids.shape[1] > 1:
                    part = patch.select(tokens=slice(0, 1))
                    with pytest.raises(ValueError, match="got a part of one"):
                        patcher.forward(part.kept_ids, part)


def test_a_long_window_context_is_masked_by_position() -> None:
    """The replay's cache lacks the context: a window counted in its slots would reach prefix tokens
    too far away.
    """
    model = build("gemma3", 5, sliding_window=4)
    inputs = case("prefix", 5)
    reference = Stock(model).logits(inputs)
    with ContextPatcher(model, "exact") as patcher:
        patch = patcher.compute(**inputs)
        logits = replayed(patcher, patch)
        assert torch.equal(logits[patch.kept_mask], reference[patch.kept_mask])
        slots = torch.arange(12).expand(3, -1)
        by_slot = dataclasses.replace(patch, prefix_slots=slots[:, :5], kept_slots=slots[:, 5:])
        wrong = patcher.forward(patch.kept_ids, by_slot)
    assert not torch.equal(wrong[patch.kept_mask], reference[patch.kept_mask])
