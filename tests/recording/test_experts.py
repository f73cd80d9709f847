"""Mixtures of experts: the library's implementations, what is read on the way, and routers."""

from unittest.mock import Mock

import pytest
import torch
from support.numeric import is_noise
from support.random_models import EXPERTS, Stock, case, of_the_zoo, shallow, tokens

from icl_patch import ContextPatcher, metrics, ops
from icl_patch.evaluation import tiny_models
from icl_patch.generation.decode_mode import DecodeMode
from icl_patch.layers.experts import PatchedExperts

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *(("gpt_oss", implementation) for implementation in IMPLEMENTATIONS),
        *zip(("mixtral", "qwen2_moe", "deepseek_v3"), IMPLEMENTATIONS, strict=True),
    ],
)
def test_every_implementation_of_the_library(family: str, implementation: str) -> None:
    arguments = case("prefix")
    for dtype, update in ((torch.float32, "direct"), (torch.bfloat16, "exact")):
        model = shallow(family, 0, dtype)
        model.config._experts_implementation = implementation
        reference = Stock(model).logits(arguments)
        with ContextPatcher(model, update) as patcher:
            patch = patcher.compute(**arguments)
            logits = patcher.forward(patch.kept_ids, patch)
            error = metrics.linf(logits, reference)[patch.kept_mask].max()
            assert error == 0 if update == "exact" else is_noise(error, patcher, patch)
        assert not patch.report.experts_changed.any()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "gemma4-moe"])
def test_a_step_reads_the_matrices_of_both_streams_at_once(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice a block, in one op."""
    model = shallow(family)
    with ContextPatcher(model, "stable") as patcher:
        mixtures = sum(block.experts is not None for block in patcher.attached_model.blocks)
        patcher.plans.for_mode(DecodeMode.TWO_STREAM)  # which is tried now
        counted = Mock(wraps=ops.expert_linear)
        monkeypatch.setattr(ops, "expert_linear", counted)
        list(patcher.generate(tokens(0, 2, 8), max_new_tokens=1, mode="two_stream"))
        assert [len(call.args[2]) for call in counted.call_args_list] == [6, 4] * mixtures


def test_a_setting_that_is_made_on_attached_experts_is_theirs() -> None:
    model, ids = shallow("gpt_oss"), tokens(0, 1, 6)
    with ContextPatcher(model) as patcher:
        model.model.layers[0].mlp.experts.limit = 0.1
        with torch.no_grad():
            changed = model(ids).logits
        assert "limit" not in vars(patcher.attached_model.blocks[0].experts)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, changed)
    assert model.model.layers[0].mlp.experts.limit == 0.1


def test_an_expert_without_factors_is_left_as_it_is() -> None:
    """Factors belong to experts, not to slots: in another order they are the same, and for other
    experts there are none.
    """
    base = shallow("mixtral").model.layers[0].mlp.experts
    experts, generator = PatchedExperts(base), torch.Generator().manual_seed(0)
    z, weights = torch.randn(3, 32, generator=generator), torch.rand(3, 2, generator=generator)
    index = torch.tensor([[0, 3], [5, 1], [2, 7]])
    sizes = {"read_u": (2, 96), "read_v": (32,), "write_u": (32,), "write_v": (2, 48)}
    for name, size in sizes.items():
        setattr(experts, name, torch.randn(3, *size, generator=generator))
    experts.index = index
    experts.replay()
    patched = experts(z, index, weights)
    torch.testing.assert_close(experts(z, index.flip(1), weights.flip(1)), patched)
    others = (index + 2) % 8
    torch.testing.assert_close(experts(z, others, weights), base(z, others, weights))
    assert (patched - base(z, index, weights)).abs().max() > 0.1


# -- routers, which choose the experts: the patch changes their logits

WITH_ROUTERS = [name for name in EXPERTS if "parallel" not in tiny_models.SUPPORTED[name].note]


@pytest.mark.parametrize("family", of_the_zoo(WITH_ROUTERS))
def test_an_unpatched_router_chooses_other_experts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What identical choices are worth: without the routers' part of the patch many are others."""
    model, arguments = shallow(family, 0), case("span", 0)
    with ContextPatcher(model, "exact") as patcher:
        assert not patcher.compute(**arguments).report.experts_changed.any()
        monkeypatch.setattr(
            "icl_patch.recording.block_math.reader_update", lambda y_ctx, y: torch.zeros_like(y)
        )
        report = patcher.compute(**arguments).report
    assert (report.experts_changed > 0).sum() > 3


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "granitemoe"])
def test_a_replay_has_the_bits_of_its_step(family: str) -> None:
    """In bf16 a router's ties are decided by rounding: a replay that rounds otherwise would choose
    experts that have no factors.
    """
    for seed, rows in enumerate((2, 66)):
        with ContextPatcher(shallow(family, seed, torch.bfloat16), "stable") as patcher:
            for step in patcher.generate(
                tokens(seed, rows, 8), max_new_tokens=3, mode="auto", eos_token_id=None
            ):
                assert step.mode == "two_stream"
                assert torch.equal(patcher.attached_model.replay(step.patch)[0][:, -1], step.logits)
