"""Steering vectors, ROME's form of a patch, patches on other weights and sums of patches, against
their formulas on matrices.
"""

import re
from dataclasses import replace

import pytest
import torch
from support.numeric import noise_limit, normal, seeded
from support.random_models import build, tokens
from torch import Tensor

from icl_patch import ContextPatcher, UnsupportedModelError, metrics
from icl_patch.analysis.composition import additivity
from icl_patch.analysis.steering import in_rome_form, input_covariances, steered, steering_vectors
from icl_patch.analysis.transfer import on_other_weights
from icl_patch.errors import FingerprintMismatch, PatchFormatError
from icl_patch.evaluation import tiny_models

CONTEXT, KEPT = tokens(0, 2, 7), tokens(1, 2, 3)


@torch.no_grad()
def with_context(model: torch.nn.Module, *contexts: Tensor) -> Tensor:
    return model(torch.cat([*contexts, KEPT], 1)).logits[:, -KEPT.shape[1] :]


# a weight, a bias, the attention beside the MLP, a multiplied MLP
@pytest.mark.parametrize("family", ["llama", "gpt2", "cohere", "granite"])
@torch.no_grad()
def test_steering_has_the_effect_of_the_context(family: str) -> None:
    model = tiny_models.build(family, 0)
    expected = with_context(model, CONTEXT)
    with ContextPatcher(model, "direct") as patcher:
        patch = patcher.compute(CONTEXT, KEPT)
    before = model(KEPT, position_ids=patch.position_ids).logits
    with steered(model, patch.blocks, steering_vectors(patch)):
        got = model(KEPT, position_ids=patch.position_ids).logits
        for ids in (KEPT[:, :2], KEPT.T, KEPT.reshape(1, 6), KEPT.reshape(6, 1)):
            message = f"(rows, tokens) (2, 3), as the vectors have, got {tuple(ids.shape)}"
            with pytest.raises(ValueError, match=re.escape(message)):
                model(ids)
    training = pytest.raises(ValueError, match="in eval mode, got one that is training")
    model.train()
    with training, steered(model, patch.blocks, steering_vectors(patch)):
        pass
    with training:
        input_covariances(model, patch.blocks, KEPT)
    model.eval()
    limit = noise_limit(model, torch.cat([CONTEXT, KEPT], 1))
    assert metrics.linf(got, expected).max() <= limit < metrics.linf(before, expected).min()
    assert torch.equal(model(KEPT, position_ids=patch.position_ids).logits, before)


@pytest.mark.parametrize("family", ["gemma3", "mixtral", "mamba"])
def test_blocks_without_the_vector_are_refused(family: str) -> None:
    model = tiny_models.build(family, 0)
    with ContextPatcher(model, "direct") as patcher:
        patch = patcher.compute(CONTEXT, KEPT)
    with pytest.raises(UnsupportedModelError, match=r"expected blocks with an MLP that ends in"):
        steering_vectors(patch)


@torch.no_grad()
def test_rome_form_is_the_least_edit_of_other_inputs() -> None:
    model, text = build("llama"), tokens(3, 1, 400)
    with ContextPatcher(model, "direct") as patcher:
        patch = patcher.compute(CONTEXT, KEPT)
    covariances = input_covariances(model, patch.blocks, text)
    inputs: dict[str, Tensor] = {}
    layer = model.get_submodule(patch.blocks[1].path)
    for name, path in (("readers.v", "mlp.gate_proj"), ("mlp.down_proj.v", "mlp.down_proj")):
        layer.get_submodule(path).register_forward_pre_hook(
            lambda _module, args, name=name: inputs.__setitem__(name, args[0][0].double())
        )
    model(text)
    edited = in_rome_form(patch, covariances)
    for name, z in inputs.items():
        c = z.T @ z / len(z)
        ridge = 1e-4 * c.diagonal().mean() * torch.eye(len(c))
        assert torch.allclose(covariances[1][name], c + ridge)
        old, new = (p.layers[1][name][0, 0].double() for p in (patch, edited))
        key = old / old.square().sum()
        solved = torch.linalg.inv(covariances[1][name]) @ key
        assert torch.allclose(new, solved / (key @ solved), rtol=1e-4, atol=1e-6)
        # of all k with k·z = 1, this one is read least in the text
        random = normal(seeded(0), 9, len(c))
        others = [old, *(new + 0.01 * x - 0.01 * (x @ key) * old for x in random)]
        assert all((z @ new).square().mean() < (z @ other).square().mean() for other in others)
    with ContextPatcher(model, "direct") as patcher:
        replayed = patcher.forward(KEPT, edited)
    limit = noise_limit(model, torch.cat([CONTEXT, KEPT], 1))
    assert metrics.linf(replayed, with_context(model, CONTEXT)).max() <= 4 * limit


@torch.no_grad()
def test_a_patch_on_other_weights_is_asked_for() -> None:
    base, tuned = build("llama", 0), build("llama", 0)
    parameter = tuned.get_submodule("model.layers.1.mlp.down_proj").weight
    parameter += 1e-3 * normal(seeded(1), *parameter.shape).to(parameter)
    with ContextPatcher(base, "direct") as patcher:
        patch = patcher.compute(CONTEXT, KEPT)
    with ContextPatcher(tuned, "direct") as patcher:
        with pytest.raises(FingerprintMismatch):
            patcher.forward(KEPT, patch)
        moved = on_other_weights(patch, patcher)
        got = patcher.forward(KEPT, moved)
        block = patch.blocks[0]
        other = replace(block, spec=replace(block.spec, residual_multiplier=2.0))
        with pytest.raises(PatchFormatError, match="expected a patch of blocks"):
            on_other_weights(replace(patch, blocks=(other, *patch.blocks[1:])), patcher)
    assert patch.info.fingerprint[:12] in moved.info.model
    for name, change in patch.weight_changes(0, 0):
        assert any(n == name and torch.equal(x, change) for n, x in moved.weight_changes(0, 0))
    # nearly the effect of the context, and not that of a patch of these weights
    error = metrics.linf(got, with_context(tuned, CONTEXT)).max()
    assert noise_limit(tuned, torch.cat([CONTEXT, KEPT], 1)) < error < 0.1
    with (
        ContextPatcher(build("llama", 0, torch.bfloat16), "direct") as patcher,
        pytest.raises(FingerprintMismatch, match=r"expected a patch of a model in torch\.bfloat16"),
    ):
        on_other_weights(patch, patcher)


@torch.no_grad()
def test_on_other_weights_a_scale_has_the_same_change() -> None:
    """The replay is the tuned model plus the materialised changes, which are those of the patch."""
    base, tuned = (build("gemma3", 0, torch.float64) for _ in range(2))
    for layer in tuned.model.layers:
        scale = layer.post_feedforward_layernorm.weight
        scale += 0.05 * normal(seeded(2), *scale.shape).to(scale)
    last = KEPT[:1, -1:]
    with ContextPatcher(base, "stable") as patcher:
        patch = patcher.compute(CONTEXT[:1], last)
        same = on_other_weights(patch, patcher)
    for layer, own in zip(same.layers, patch.layers, strict=True):
        assert all(torch.equal(layer[name], own[name]) for name in own)
    with ContextPatcher(tuned, "stable") as patcher:
        moved = on_other_weights(patch, patcher)
        got = patcher.forward(last, moved)
    limit = noise_limit(tuned, torch.cat([CONTEXT, KEPT], 1), torch.float32)
    changes = dict(moved.weight_changes(0, 0))
    for name, change in patch.weight_changes(0, 0):
        torch.testing.assert_close(changes[name], change, rtol=0, atol=1e-6)
        tuned.get_parameter(name).add_(change)
    expected = tuned(last, position_ids=patch.position_ids).logits
    assert metrics.linf(got, expected).max() <= limit


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mixtral"])
@torch.no_grad()
def test_additivity_is_that_of_matrices(family: str) -> None:
    model, other = tiny_models.build(family, 0), tokens(5, 2, 4)
    with ContextPatcher(model, "stable" if family == "gemma3" else "direct") as patcher:
        contexts = (torch.cat([CONTEXT, other], 1), CONTEXT, other)
        patches = [patcher.compute(context, KEPT) for context in contexts]
    found = additivity(patches[0], patches[1:])
    whole, *parts = (
        {name: x.double() for name, x in patch.weight_changes(1, 2)} for patch in patches
    )
    squares: dict[str, list[float]] = {}
    for name in {*whole, *parts[0], *parts[1]}:
        a, b, c = (p.get(name, torch.zeros(())) for p in (whole, *parts))
        sums = squares.setdefault(name.partition("[")[0], [0.0, 0.0])
        sums[0] += float((a - b - c).square().sum())
        sums[1] += float(a.square().sum())
    assert found.keys() == squares.keys()
    for name, (rest, size) in squares.items():
        assert float(found[name][1, 2]) == pytest.approx((rest / size) ** 0.5, rel=1e-5)
    unchanged = {name: torch.zeros_like(x) for name, x in patches[0].layers[0].items()}
    unchanged |= {
        x: patches[0].layers[0][x] for x in unchanged if not x.endswith((".u", "_change"))
    }
    nothing = replace(patches[0], layers=(unchanged, *patches[0].layers[1:]))
    shares = additivity(nothing, patches[1:])
    none = [name for name, x in shares.items() if x.isnan().all()]
    assert none and all(name.startswith(patches[0].blocks[0].path) for name in none)
    assert not any(x.isinf().any() for x in shares.values())
    with pytest.raises(ValueError, match="at least one part"):
        additivity(patches[0], [])
    bare = torch.zeros(2, 1, dtype=torch.int64)
    for part, names in (
        (patches[1].select(layers=slice(1)), "blocks"),
        (replace(patches[1], kept_ids=KEPT.flip(1)), "kept tokens"),  # of as many tokens
        (replace(patches[1], kept_mask=KEPT < 0), "kept tokens"),
        (replace(patches[1], prefix_ids=bare, prefix_mask=bare == 0), "prefixes"),
        (replace(patches[1], layers=tuple({"other.u": KEPT} for _ in patches[1].layers)), "blocks"),
        (replace(patches[1], info=replace(patches[1].info, fingerprint="0" * 64)), "weights"),
    ):
        with pytest.raises(ValueError, match=rf"of one model with .* got other {names}: "):
            additivity(patches[0], [part])
