"""Algorithm 1, with every matrix written out, is what the two streams compute in one pass."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.numeric import noise_limit
from support.random_models import build, shallow, tokens
from torch import Tensor, nn

from icl_patch import ContextPatcher, metrics
from icl_patch.errors import ControllabilityError, UnsupportedModelError
from icl_patch.models.block_detection import blocks_of
from icl_patch.models.forward import cache_name
from icl_patch.models.kv_cache import new_cache
from icl_patch.recording.algorithm_1 import algorithm_1

FORMS = [(family, "direct") for family in ("gemma3", "llama", "gpt2", "gpt_neox", "granite")]
FORMS += [("gemma3", "stable")]
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
IDS = tokens(3, 1, 10)
NORM = "model.layers.1.post_attention_layernorm.weight"


def family_model(family: str, dtype: torch.dtype) -> nn.Module:
    return build(family, 0, dtype) if family in ("gemma3", "llama") else shallow(family, 0, dtype)


def run(ids: Tensor, position: int = 0) -> Callable[[Any], Tensor]:
    """The logits (1, V) of a model at the last token of ids, the first of which has a position."""
    positions = torch.arange(position, position + ids.shape[1])[None]
    return lambda model: model(ids, position_ids=positions, use_cache=False).logits[:, -1]


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, position: int = 0) -> Tensor:
    return run(ids, position)(model)


@pytest.mark.parametrize(("family", "update"), FORMS)
@dtypes
def test_algorithm_1_is_the_computed_patch(family: str, update: str, dtype: torch.dtype) -> None:
    model = family_model(family, dtype)
    # Gemma's update goes through a norm of the class, which computes in fp32
    limit = noise_limit(model, IDS, torch.float32 if family == "gemma3" else dtype)
    state, expected = copy.deepcopy(model.state_dict()), logits(model, IDS)
    alone, parameters = IDS[:, -1:], dict(model.named_parameters())
    assert metrics.linf(logits(model, alone, 9), expected) > 0.05
    with algorithm_1(model, blocks_of(model), run(IDS), run(alone, 9), update) as found:
        assert metrics.linf(found, expected) <= limit
        assert torch.equal(logits(model, alone, 9), found)  # the weights are those of the run
        made = {name: parameter.detach() - state[name] for name, parameter in parameters.items()}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with ContextPatcher(model, update) as patcher:
        patch = patcher.compute(IDS[:, :-1], alone)
        replayed = patcher.forward(alone, patch)[:, -1]
    assert metrics.linf(replayed, found) <= limit
    expected_changes = dict(patch.weight_changes(0, 0))
    assert expected_changes.keys() == {name for name, change in made.items() if change.any()}
    for name, change in expected_changes.items():
        size = change.norm() + state[name].norm()  # the whole parameter was rounded, not its change
        # divides by activations, and magnifies what they are off by
        if update == "direct" and "norm" in name:
            size = size * (1 + change.abs().max())
        assert (made[name] - change).norm() <= limit * size < change.norm(), name


@pytest.mark.parametrize("update", ["direct", "stable"])
def test_rounded_weights_are_made_up_for_by_later_blocks(update: str) -> None:
    """In bf16 the loop is closed: each update sees what rounding has made of the blocks before it.
    The same changes, computed without rounding and then added at once, are further off.
    """
    model = build("gemma3", 0, torch.bfloat16)
    own = {name: x.detach().clone() for name, x in model.named_parameters()}
    limit, errors = noise_limit(model, IDS), []
    for shift in range(6):  # of one token either may happen to round better
        ids = IDS.roll(shift, 1)
        expected, alone = logits(model, ids), ids[:, -1:]
        with algorithm_1(model, blocks_of(model), run(ids), run(alone, 9), update) as closed:
            assert metrics.linf(closed, expected) <= limit
        with ContextPatcher(model, update) as patcher:
            patch = patcher.compute(ids[:, :-1], alone)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, change in patch.weight_changes(0, 0):
                parameters[name].copy_(parameters[name] + change)
            at_once = logits(model, alone, 9)
            for name, parameter in parameters.items():
                parameter.copy_(own[name])
        errors.append([float(metrics.linf(x, expected)) for x in (closed, at_once)])
    of_closed, of_at_once = map(sum, zip(*errors, strict=True))
    assert 1.5 * of_closed < of_at_once


def test_a_part_of_the_context_may_stay() -> None:
    """The first tokens stay in a cache, which unchanged weights have filled."""
    model = family_model("llama", torch.float64)
    expected, limit = logits(model, IDS), noise_limit(model, IDS)
    cache = new_cache(model)
    with torch.no_grad():
        model(IDS[:, :3], **{cache_name(model): cache})

    def alone(model: Any) -> Tensor:
        inputs = {cache_name(model): copy.deepcopy(cache), "position_ids": torch.tensor([[9]])}
        return model(IDS[:, -1:], **inputs).logits[:, -1]

    with torch.no_grad():
        assert metrics.linf(alone(model), expected) > 0.05
    with algorithm_1(model, blocks_of(model), run(IDS), alone) as found:
        assert metrics.linf(found, expected) <= limit


class Doubled(nn.Linear):
    """Multiplies its output."""

    def forward(self, z: Tensor) -> Tensor:
        return 2 * super().forward(z)


def test_what_algorithm_1_does_not_take() -> None:
    """A refusal leaves the weights as they were, and the cure works."""
    model, experts, alone = shallow("llama"), shallow("mixtral"), run(IDS[:, -1:], 9)
    blocks, state = blocks_of(model), copy.deepcopy(model.state_dict())

    def refused(error: type[Exception], message: str, *runs: Any, of: Any = model) -> None:
        found = blocks if of is model else blocks_of(of)
        with pytest.raises(error, match=message), algorithm_1(of, found, *runs):
            pass

    refused(ValueError, "'direct' or 'stable', got 'exact'", run(IDS), alone, "exact")
    model.model.layers[1].train()  # dropout would change the targets
    refused(ValueError, "in eval mode, got one that is training", run(IDS), alone)
    with pytest.raises(ValueError, match="in eval mode, got one that is training"):
        blocks_of(model.train())
    model.eval()
    refused(ValueError, "runs of one row, got 2", run(IDS.repeat(2, 1)), alone)
    refused(ValueError, "one token in the run alone, got 2", run(IDS), run(IDS[:, -2:], 8))
    refused(UnsupportedModelError, "layers.0 with experts", run(IDS), alone, of=experts)
    with ContextPatcher(model):
        refused(UnsupportedModelError, "PatchedLinear: detach the patcher", run(IDS), alone)
    first, second = (layer.mlp for layer in model.model.layers[:2])
    for module in (first.up_proj, second.down_proj):
        hook = module.register_forward_hook(lambda _module, _args, out: 1.1 * out)
        refused(UnsupportedModelError, r"_proj without hooks and with its own", run(IDS), alone)
        hook.remove()
        module.forward = partial(type(module).forward, module)
        refused(UnsupportedModelError, r"got hooks or another forward", run(IDS), alone)
        del module.forward
    for name in ("up_proj", "down_proj"):
        module = getattr(second, name)
        setattr(second, name, Doubled(1, 1, bias=False).eval())
        getattr(second, name).weight = module.weight
        refused(UnsupportedModelError, r"Doubled, which computes something else", run(IDS), alone)
        setattr(second, name, module)
        weight, module.weight = module.weight, getattr(first, name).weight
        path = rf"layers\.\d\.mlp\.{name}\.weight"
        refused(UnsupportedModelError, rf"got one at .*{path} and .*{path}", run(IDS), alone)
        module.weight = weight
    with torch.no_grad():
        model.get_parameter(NORM).zero_()
        refused(ControllabilityError, "layers.1: the input of mlp.down_proj is 0", run(IDS), alone)
        model.get_parameter(NORM).copy_(state[NORM])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with algorithm_1(model, blocks, run(IDS), alone) as found:
        changed = logits(model, IDS[:, -1:], 9)
    assert torch.equal(found, changed)
