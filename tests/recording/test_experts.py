"""Mixtures of experts: the library's implementations, and what is built on the way."""

from unittest.mock import Mock

import pytest
import torch
from support.numeric import is_noise
from support.random_models import Stock, case, shallow, tokens
from support.storages import largest_of

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


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("mixtral", "eager"), ("gpt_oss", "grouped_mm"), ("qwen2_moe", "grouped_mm")],
)
def test_no_matrix_of_an_experts_size_is_made(family: str, implementation: str) -> None:
    """In a model whose experts' matrices have far more elements than the activations of a few
    tokens.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 256}
    sizes |= {"moe_intermediate_size": 256} if family == "qwen2_moe" else {}
    model = tiny_models.build(family, **sizes)
    model.config._experts_implementation = implementation
    smallest = min(parameter[0].numel() for parameter in model.parameters() if parameter.dim() == 3)
    inputs = {"context_ids": tokens(0, 1, 4), "kept_ids": tokens(1, 1, 2)}
    with torch.no_grad():
        stock, _ = largest_of(lambda: model(torch.cat(list(inputs.values()), 1)))
    with ContextPatcher(model, "direct") as patcher:
        computing, patch = largest_of(lambda: patcher.compute(**inputs))
        replaying, _ = largest_of(lambda: patcher.forward(patch.kept_ids, patch))
    assert max(computing, replaying) <= max(2 * stock, smallest / 4)
    assert max(computing, replaying) < smallest


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
