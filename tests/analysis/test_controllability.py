"""Definitions 3 and 4 on real blocks: who is controllable, who is not, why, and what that means for
this context's patch.
"""

from dataclasses import replace

import pytest
from support.random_models import build, case_of, tokens
from torch import Tensor, nn

from icl_patch import ContextPatcher, ControllabilityError, controllability
from icl_patch.analysis.controllability import BlockControllability
from icl_patch.evaluation import tiny_models

IDS, KEPT = tokens(0, 2, 5), tokens(1, 2, 3)


def examine(model: nn.Module, update: str, **arguments: Tensor) -> tuple[BlockControllability, ...]:
    with ContextPatcher(model, update) as patcher:
        return controllability(patcher, **{"context_ids": IDS, "kept_ids": KEPT} | arguments)


def can_be_patched(model: nn.Module, update: str, **arguments: Tensor) -> bool:
    with ContextPatcher(model, update) as patcher:
        try:
            patcher.compute(**{"context_ids": IDS, "kept_ids": KEPT} | arguments)
        except ControllabilityError:
            return False
        return True


ORDINARY = [(family, "direct") for family in ("gemma3", "llama", "gpt2", "recurrent_gemma")]
ORDINARY += [(family, "exact") for family in ("gemma3", "llama4", "mixtral", "gpt_neox")]


@pytest.mark.parametrize(("family", "update"), ORDINARY)
def test_ordinary_blocks_are_controllable(family: str, update: str) -> None:
    found = examine(tiny_models.build(family, 0), update, **case_of(family, "prefix"))
    assert len(found) == 4
    for block in found:
        for holds in (block.input_controllable, block.output_controllable, block.takes_up):
            assert holds.shape == block.kept_mask.shape == (3, 7) and holds.all()
        assert block.reasons(0, 0) == ()
        sides = {violation.side for violation in block.violations}
        # parallel; a bias
        reads, fails = family != "gpt_neox", family not in ("gpt2", "gpt_neox", "recurrent_gemma")
        assert sides == {side for side, there in (("input", reads), ("output", fails)) if there}


@pytest.mark.parametrize("update", ["direct", "stable", "exact"])
def test_a_dead_row_is_in_the_way_of_a_scale_alone(update: str) -> None:
    """``Norm(h)_k = 0``: no scale reaches through it (Lemma 10), an output matrix does (Appendix
    B).
    """
    model = build("gemma3")
    model.model.layers[1].mlp.down_proj.weight.data[11] = 0
    first, second, third = examine(model, update)
    assert first.output_controllable.all() and third.input_controllable.all()
    assert second.output_controllable.all() == (update != "direct")
    if update == "direct":
        assert not second.output_controllable.any()
        assert second.reasons(1, 2) == (
            "output: the input of post_feedforward_layernorm is 0 where delta is not",
        )
    assert bool(second.takes_up.all()) == can_be_patched(model, update) == (update != "direct")


@pytest.mark.parametrize("update", ["direct", "exact"])
def test_experts_that_cannot_write(update: str) -> None:
    """S, over the active experts with ``h ≠ 0``, is 0."""
    model = tiny_models.build("mixtral", 0)
    model.model.layers[1].mlp.experts.gate_up_proj.data.zero_()
    found = examine(model, update)
    assert not found[1].output_controllable.any() and found[0].output_controllable.all()
    assert found[1].reasons(0, 0) == (
        "output: the weights of the experts that mlp.experts can use sum to 0",
    )
    assert not can_be_patched(model, update)


@pytest.mark.parametrize("update", ["direct", "exact"])
def test_definitions_ask_for_every_change_a_patch_for_one(update: str) -> None:
    """Attention that adds nothing: no change is needed, so there is a patch, though the block could
    not take up any other.
    """
    model = build("llama")
    layer = model.model.layers[0]
    layer.mlp.gate_proj.weight.data.zero_()
    layer.self_attn.o_proj.weight.data.zero_()
    found = examine(model, update)[0]
    assert not found.output_controllable.any()
    assert found.takes_up.all()
    assert can_be_patched(model, update)


def test_a_branch_factor_of_zero() -> None:
    """No model that can be attached to has one: its form is changed behind the patcher's back."""
    model = tiny_models.build("granite", 0)
    with ContextPatcher(model, "direct") as patcher:
        block = patcher.attached_model.blocks[1]
        block.spec = replace(block.spec, residual_multiplier=0.0)
        first, second, *_ = controllability(patcher, IDS, KEPT)
        assert first.output_controllable.all() and second.input_controllable.all()
        assert not second.output_controllable.any() and not second.takes_up.any()
        assert second.reasons(0, 0) == ("output: the factor of the block's branch is 0",)
        message = r"^model\.layers\.1, row 0, kept token 0: the factor of the block's branch is 0$"
        with pytest.raises(ControllabilityError, match=message):
            patcher.compute(IDS, KEPT)


def test_the_answers_print_as_a_table() -> None:
    model = build("llama")
    # h = 0: the output cannot be written
    model.model.layers[1].mlp.up_proj.weight.data.zero_()
    with ContextPatcher(model, "direct") as patcher:
        found = controllability(patcher, tokens(1, 2, 5), tokens(2, 2, 3))
    lines = repr(found).splitlines()
    assert lines[0].split() == ["block", "input", "output", "takes", "up", "why", "not"]
    assert len(lines) == 1 + len(found)
    assert lines[1].split() == ["model.layers.0", *["6", "of", "6"] * 3]
    assert lines[2].startswith("model.layers.1") and "0 of 6" in lines[2]
    assert "output: the input h of mlp.down_proj is 0" in lines[2]
