"""Algorithm 1 as written, with every matrix written out, is what the two streams compute in one
pass.
"""

import copy

import pytest
import torch
from support.algorithm1 import algorithm_1
from support.numeric import noise_limit
from support.random_models import build, shallow, tokens
from torch import Tensor, nn

from icl_patch import ContextPatcher, metrics
from icl_patch.models.block_detection import blocks_of

FORMS = [(family, "direct") for family in ("gemma3", "llama", "gpt2", "gpt_neox", "granite")]
FORMS += [("gemma3", "stable")]
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
IDS = tokens(3, 1, 10)


def family_model(family: str, dtype: torch.dtype) -> nn.Module:
    return build(family, 0, dtype) if family in ("gemma3", "llama") else shallow(family, 0, dtype)


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, position: int = 0) -> Tensor:
    """Of the last token."""
    positions = torch.arange(position, position + ids.shape[1])[None]
    return model(ids, position_ids=positions, use_cache=False).logits[:, -1]


@pytest.mark.parametrize(("family", "update"), FORMS)
@dtypes
def test_algorithm_1_is_the_computed_patch(family: str, update: str, dtype: torch.dtype) -> None:
    model = family_model(family, dtype)
    # Gemma's update goes through a norm of the class, which computes in fp32
    limit = noise_limit(model, IDS, torch.float32 if family == "gemma3" else dtype)
    state, expected = copy.deepcopy(model.state_dict()), logits(model, IDS)
    updated = algorithm_1(model, blocks_of(model), IDS, stable=update == "stable")
    alone = IDS[:, -1:]
    assert metrics.linf(logits(updated, alone, 9), expected) <= limit
    assert metrics.linf(logits(model, alone, 9), expected) > 0.05
    with ContextPatcher(model, update) as patcher:
        patch = patcher.compute(IDS[:, :-1], alone)
        replayed = patcher.forward(alone, patch)[:, -1]
    assert metrics.linf(replayed, logits(updated, alone, 9)) <= limit
    parameters = dict(updated.named_parameters())
    changed = {name for name, value in parameters.items() if not torch.equal(value, state[name])}
    expected_changes = dict(patch.weight_changes(0, 0))
    assert expected_changes.keys() == changed
    for name, change in expected_changes.items():
        made = parameters[name].detach() - state[name]
        size = change.norm() + state[name].norm()  # the whole parameter was rounded, not its change
        # divides by activations, and magnifies what they are off by
        if update == "direct" and "norm" in name:
            size = size * (1 + change.abs().max())
        assert (made - change).norm() <= limit * size < change.norm(), name
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_algorithm_1_is_for_its_token_and_context() -> None:
    """The updated weights are no better than any others on another token, and another context asks
    for others.
    """
    model = family_model("llama", torch.float64)
    blocks = blocks_of(model)
    updated = algorithm_1(model, blocks, IDS)
    other = IDS.clone()
    other[0, -1] = 1 + IDS[0, -1] % 90
    assert metrics.linf(logits(updated, other[:, -1:], 9), logits(model, other)) > 0.05
    rolled = torch.cat([IDS[:, :-1].roll(4, 1), IDS[:, -1:]], 1)
    for_rolled = logits(algorithm_1(model, blocks, rolled), IDS[:, -1:], 9)
    assert metrics.linf(for_rolled, logits(model, IDS)) > 0.01
