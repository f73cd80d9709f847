"""The implicit dynamics, from vectors alone, against matrices written out; and of attached models
at every length of the context.
"""

from itertools import pairwise

import pytest
import torch
from support.numeric import ULP, UNIT, noise_limit, normal, seeded
from support.random_models import build, tokens
from torch import Tensor, nn

from icl_patch import ContextPatcher, metrics
from icl_patch.analysis.dynamics import Factorisation, Trajectory, factorise
from icl_patch.evaluation import tiny_models
from icl_patch.patch.low_rank import LowRank

STEPS, N, K, EXPERTS = 5, 7, 3, 6


# In fp64: the longest sum has one product for every element of every expert; four times that where
# it cancels.
ROUNDING = 4 * EXPERTS * N * K * ULP


def close(got: Tensor, expected: Tensor, off: float = ROUNDING) -> bool:
    assert got.shape == expected.shape and got.isfinite().all()
    error = (got.double() - expected.double()).abs().max()
    return bool(error <= off * expected.double().abs().max())


def written_out(low: LowRank) -> Tensor:
    """(..., N, K), of experts (..., E, N, K)."""
    slots = low.u.double().unsqueeze(-1) * low.v.double().unsqueeze(-2)  # (..., R, N, K)
    if low.index is None:
        return slots.sum(-3)
    mine = low.index.unsqueeze(-1) == torch.arange(EXPERTS)  # (..., R, E)
    return torch.einsum("...re,...rnk->...enk", mine.double(), slots)


def frobenius(matrices: Tensor, leading: int) -> Tensor:
    return matrices.flatten(leading).norm(dim=-1)


def trajectory(kind: str) -> Trajectory:
    """Of two rows; "fixed" shares v, "moving" does not, "experts" chooses two of six at every step,
    "bias" has no v.
    """
    generator, index = seeded(4), None
    shape = (STEPS + 1, 2, 2 if kind == "experts" else 1)
    u, v = normal(generator, *shape, N), normal(generator, *shape, K)
    u[0] = 0
    if kind == "experts":
        index = torch.rand(STEPS + 1, 2, EXPERTS, generator=generator).argsort(-1)[..., :2]
        # some stay, some go
        assert 0 < (index[1:].unsqueeze(-1) == index[:-1].unsqueeze(-2)).any(-1).float().mean() < 1
    if kind == "bias":
        v = torch.ones_like(u[..., :1])
    return Trajectory(LowRank(u, v[:1].expand_as(v) if kind == "fixed" else v, index))


@pytest.mark.parametrize("kind", ["fixed", "moving", "experts", "bias"])
def test_trajectory_against_matrices(kind: str) -> None:
    made = trajectory(kind)
    changes = written_out(made.changes)  # (n + 1, 2, ...)
    steps = changes[1:] - changes[:-1]
    assert close(made.norms(), frobenius(changes, 2))
    assert close(written_out(made.steps()), steps)
    assert close(made.step_norms(), frobenius(steps, 2))
    weight = normal(seeded(5), *([EXPERTS] if kind == "experts" else []), N, changes.shape[-1])
    gradients, rates = written_out(made.gradients()), made.rates()
    # Proposition 3.1: W_{i+1} = W_i - h_i ∇L_i(W_i), L_i(W) = trace(Δ_iᵀ W)
    by = rates.reshape(*rates.shape, *[1] * (changes.dim() - 2))
    assert close(weight + changes[:-1] - by * gradients, weight + changes[1:])
    at = (weight + changes[:-1]).requires_grad_()
    losses = (gradients * at).flatten(2).sum(-1)
    assert close(torch.autograd.grad(losses.sum(), at)[0], gradients)
    every, other = made.changes[:, None], made.changes[None]
    flat = changes.flatten(2)
    assert close(every.inner(other), torch.einsum("i...x,j...x->ij...", flat, flat))
    expected = nn.functional.cosine_similarity(flat[1:], flat[-1:], -1)
    assert close(made.changes[1:].cosine(made.changes[-1:]), expected)
    if kind == "fixed":
        z = made.changes.v[0, :, 0] / made.changes.v[0, :, 0].square().sum(-1, keepdim=True)
        assert close(rates[2], 1 / z.square().sum(-1))
        paper = (made.changes.u[1, :, 0] - made.changes.u[2, :, 0]).unsqueeze(-1) * z.unsqueeze(-2)
        assert close(gradients[1], paper)
    if kind == "experts":
        with pytest.raises(ValueError, match="one matrix, got those of several experts"):
            made.changes.on(torch.ones(2, K))
    else:
        z = normal(seeded(6), 2, changes.shape[-1])
        assert close(made.steps().on(z), (steps @ z.unsqueeze(-1)).squeeze(-1))
        assert close(made.changes.against(steps[0]), (changes * steps[0]).flatten(2).sum(-1))


# -- attached models

CONTEXT, KEPT = tokens(3, 2, 5), tokens(4, 2, 1)
WIDEST = 128  # no factor of the models here has more elements: the terms of a squared norm in fp32


def family_model(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    make = build if family in ("gemma3", "llama") else tiny_models.build
    return make(family, 0, dtype)


def noise(model: nn.Module, family: str) -> float:
    """Of a model in fp64; Gemma's updates go through norms of its class, which compute in fp32."""
    dtype = torch.float32 if family == "gemma3" else torch.float64
    return noise_limit(model, torch.cat([CONTEXT, KEPT], 1), dtype)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_first_layer_is_the_papers_formula(family: str) -> None:
    """``W_i - W_0 = W_0 (A(c_1…c_i, x) - A(x)) A(x)ᵀ / ‖A(x)‖²`` from the untouched model's own
    activations.
    """
    model = family_model(family)
    path = "model.layers.0.mlp.gate_proj" if family == "llama" else "transformer.h.0.mlp.c_fc"
    reader, seen = model.get_submodule(path), []
    handle = reader.register_forward_hook(lambda _m, args, _out: seen.append(args[0][0, -1]))
    with torch.no_grad():
        for length in range(1, 6):
            model(torch.cat([CONTEXT[:1, :length], KEPT[:1]], 1))
            model(KEPT[:1], position_ids=torch.tensor([[length]]))
    handle.remove()
    weight = reader.weight.detach().mT if family == "gpt2" else reader.weight.detach()
    pairs = zip(seen[::2], seen[1::2], strict=True)
    outer = [torch.outer(weight @ (z_ctx - z), z) / z.square().sum() for z_ctx, z in pairs]
    expected = torch.stack(outer)
    off = noise(model, family)
    with ContextPatcher(model, "direct") as patcher:
        found = patcher.dynamics(CONTEXT, KEPT, layers=slice(0, 1)).trajectory(f"{path}.weight")
    assert close(written_out(found.changes[1:, 0, 0]), expected, off)
    assert not close(written_out(found.changes[:-1, 0, 0]), expected, off)
    # without learned positions x alone is the same at every length, and all steps share v
    if family == "llama":
        steps = [weight @ (seen[2 * i - 2] - seen[2 * i]) for i in range(1, 5)]
        gradients = torch.stack([torch.outer(step, seen[1]) for step in steps])
        assert close(written_out(found.gradients()[1:, 0, 0]), gradients, off)
        assert close(found.rates()[:, 0, 0], (1 / seen[1].square().sum()).expand(5), off)


@pytest.mark.parametrize(
    ("family", "update"),
    [
        *(("gemma3", "stable"), ("gemma3", "exact"), ("gpt2", "exact")),
        *(("mixtral", "stable"), ("recurrent_gemma", "exact")),
    ],
)
def test_every_step_replays_to_the_context_so_far(family: str, update: str) -> None:
    """With a prefix that stays, several kept tokens, sliding windows, experts and recurrent
    states.
    """
    model = family_model(family, torch.float32)
    prefix, kept = tokens(8, 2, 3), tokens(9, 2, 2)

    def alone(*parts: Tensor) -> Tensor:
        return model(torch.cat(parts)[None]).logits[:, -2:]

    with torch.no_grad():
        expected = [
            torch.cat([alone(prefix[row], CONTEXT[row, :i], kept[row]) for row in range(2)])
            for i in range(6)
        ]
    limit = noise_limit(model)
    with ContextPatcher(model, update) as patcher:
        dynamics = patcher.dynamics(torch.cat([prefix, CONTEXT], 1), kept, keep_first=3)
        for patch, logits in zip(dynamics.patches, expected, strict=True):
            assert metrics.linf(patcher.forward(kept, patch), logits).max() <= limit
    assert metrics.linf(expected[0], expected[-1]).max() > 0.05
    norms = dynamics.patches[-1].norms()
    for name in dynamics.parameters:
        sizes = dynamics.trajectory(name).norms()
        assert not sizes[0].any()  # although the patch of nothing may correct some rounding
        module = name.removesuffix(".weight").removesuffix(".bias").split(".", 3)[3]
        layer = int(name.split(".")[2])
        assert close(sizes[-1], norms[module][layer], WIDEST * UNIT[torch.float32]), name


def test_layers_and_names(llama_patcher: ContextPatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    one = llama_patcher.dynamics(CONTEXT, KEPT, layers=slice(1, 2))
    assert one.parameters == tuple(
        f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    )
    message = r"parameters model\.layers\.1\.mlp\.gate_proj\.weight, .*, got 'lm_head\.weight'"
    with pytest.raises(ValueError, match=message):
        one.trajectory("lm_head.weight")
    with pytest.raises(ValueError, match="expected ids from 0 to"):
        llama_patcher.dynamics(CONTEXT + 1000, KEPT)
    monkeypatch.setattr(llama_patcher.attached_model, "compute", None)  # refused before any work
    for layers in (slice(3, 3), slice(7, 9), slice(None, None, -1)):
        with pytest.raises(ValueError, match="at least one of 3 layers, in increasing order"):
            llama_patcher.dynamics(CONTEXT, KEPT, layers=layers)
    with pytest.raises(TypeError, match=r"expected layers as a slice, .* got 2"):
        llama_patcher.dynamics(CONTEXT, KEPT, layers=2)
    for layer in (3, -4):
        with pytest.raises(ValueError, match=rf"expected a layer from -3 to 2, got {layer}"):
            factorise(llama_patcher, CONTEXT, KEPT, layer)


# -- Appendix E


def products(inputs: Tensor) -> list[Tensor]:
    """``Π_{j ≤ i} (1 + h_j A_j)`` written out, i = 0 … n."""
    made = [torch.eye(inputs.shape[-1], dtype=inputs.dtype)]
    for before, z in pairwise(inputs):
        factor = torch.eye(len(z), dtype=z.dtype) + torch.outer(before - z, z) / (z @ z)
        made.append(made[-1] @ factor)
    return made


def test_factorisation_against_matrices() -> None:
    inputs, weight = normal(seeded(2), 7, 2, K), normal(seeded(3), N, K)
    found = Factorisation(inputs)
    assert len(found) == 6
    steps, total = found.steps(weight), found.total(weight)
    for row in range(2):
        written = products(inputs[:, row])
        weights = torch.stack([weight @ product for product in written])
        assert close(written_out(steps)[:, row], weights.diff(dim=0))
        assert close(written_out(total)[row], weights[-1] - weight)
        assert close(total.norm()[row], (weights[-1] - weight).norm())
        factors = torch.stack([torch.linalg.solve(a, b) for a, b in pairwise(written)])
        solved = max(float(torch.linalg.cond(before)) for before in written) * ROUNDING
        assert close(found.determinants()[:, row], torch.linalg.det(factors), solved)
        for i in range(7):
            assert close(found.on(inputs[0], i)[row], written[i] @ inputs[0, row])
            assert close(weights[i] @ inputs[i, row], weight @ inputs[0, row])  # equation 28


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_factorisation_of_a_model(family: str) -> None:
    """A reader of the second block, times n factors, gives on the bare token what it gives with the
    context.
    """
    model = family_model(family)
    path = "model.layers.1.mlp.up_proj" if family != "gpt2" else "transformer.h.1.mlp.c_fc"
    reader, seen = model.get_submodule(path), {}
    handle = reader.register_forward_hook(lambda _m, args, _out: seen.update(z=args[0][:, -1]))
    with torch.no_grad():
        model(torch.cat([CONTEXT, KEPT], 1))
    handle.remove()
    with ContextPatcher(model, "direct" if family != "gemma3" else "stable") as patcher:
        found = factorise(patcher, CONTEXT, KEPT, 1)
        behind = factorise(patcher, CONTEXT, KEPT, 1, keep_first=2)
        own = patcher.compute(CONTEXT, KEPT, keep_first=2).layers[1]["readers.v"][:, 0]
        grown = patcher.dynamics(CONTEXT, KEPT).trajectory(f"{path}.weight")
    weight = reader.weight.detach().mT if family == "gpt2" else reader.weight.detach()
    off = noise(model, family)
    assert close(found.inputs[0], seen["z"], off)
    bare = found.inputs[-1]
    assert close(found.on(bare) @ weight.mT, seen["z"] @ weight.mT, off)
    v = grown.changes.v[-1, :, 0, 0]
    assert close(bare, v / v.square().sum(-1, keepdim=True), off)  # both end with the token alone
    assert close(found.total(weight).on(bare), grown.changes[-1, :, 0].on(bare), off)
    assert not close(found.inputs[2], found.inputs[0], 0.01)
    assert len(behind) == len(found) - 2 and close(behind.inputs[0], seen["z"], off)
    assert close(behind.inputs[-1], own / own.square().sum(-1, keepdim=True), off)


def test_factorisation_needs_readers_one_token_and_no_applied_patch() -> None:
    refusal = pytest.raises(ValueError, match=r"gpt_neox\.layers\.0, which has none")
    with ContextPatcher(family_model("gpt_neox", torch.float32)) as patcher, refusal:
        factorise(patcher, CONTEXT, KEPT, 0)
    with ContextPatcher(build("llama"), "direct") as patcher:
        with pytest.raises(ValueError, match=r"kept_ids \(B, 1\), got \(2, 5\)"):
            factorise(patcher, CONTEXT, CONTEXT, 0)
        applied = patcher.applied(patcher.compute(CONTEXT, KEPT))
        with applied, pytest.raises(ValueError, match="without an applied patch"):
            factorise(patcher, CONTEXT, KEPT, 1)
