"""Norms folded into what follows: same function, same patches, everything put back; W_VO; what is
refused, by name.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.numeric import UNIT, noise_floor, within_roundings
from support.patchers import Snapshot
from support.random_models import build, tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, OlmoConfig, PreTrainedModel

from icl_patch import ContextPatcher, UnsupportedModelError
from icl_patch.analysis.norm_folding import UncentredLayerNorm, fold, norm_form
from icl_patch.analysis.ov_matrices import value_output
from icl_patch.evaluation import tiny_models


def gpt2(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny_models.build("gpt2", 0, dtype, num_hidden_layers=3)


def neox(dtype: torch.dtype = torch.float32, **changes: bool) -> PreTrainedModel:
    """With some scales of norms 0."""
    model = tiny_models.build("gpt_neox", 0, dtype, num_hidden_layers=3, **changes)
    for name, parameter in model.named_parameters():
        if "norm.weight" in name:
            parameter.data[:2] = 0
    return model


MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "gpt2": gpt2,
    "neox": neox,
    "neox-sequential": lambda dtype=torch.float32: neox(dtype, use_parallel_residual=False),
    "llama": lambda dtype=torch.float32: build("llama", 0, dtype),
    "gemma3": lambda dtype=torch.float32: build("gemma3", 0, dtype),
}
every_model = pytest.mark.parametrize("name", MODELS)
IDS = tokens(90, 2, 9)
READ = ("input", "pre_feedforward")  # the norms of a block of Gemma that matrices read


def fold_limit(model: PreTrainedModel, ids: Tensor = IDS, dtype: Any = None) -> float:
    """Of the logits: folding rounds each weight once more, by half a spacing; the noise floor moves
    it by a whole one.

    At most 0.9 floors were seen, on five models and qwen3_next with six seeds, on three kinds of
    processors.
    """
    return 3 * noise_floor(model, ids, dtype)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(IDS).logits


def off(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach(), expected.detach()
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@every_model
def test_function_is_preserved_and_everything_is_put_back(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name](dtype)
    before, expected = Snapshot(model), logits(model)
    # norms of Gemma's class compute in fp32
    wide = torch.float32 if name == "gemma3" and dtype == torch.float64 else dtype
    limit = fold_limit(model, dtype=wide)
    with fold(model) as folding:
        assert off(logits(model), expected) <= limit
        for norm in folding.folded:
            for reader in norm.readers:
                weight = model.get_submodule(reader).weight
                assert off(weight, before.state[f"{reader}.weight"]) > 0.1
            module = model.get_submodule(norm.path)
            if norm.form.centred:
                assert isinstance(module, UncentredLayerNorm)
            else:
                assert (module.weight + norm.form.offset == 1).all()
    before.check(model)


@every_model
def test_every_norm_is_folded_or_refused_with_its_reason(name: str) -> None:
    model = MODELS[name]()
    norms = "ln_" if name == "gpt2" else "norm"
    with fold(model) as folding:
        paths = [norm.path for norm in folding.folded]
        every = {path for path, _ in model.named_modules() if norms in path.rpartition(".")[2]}
        assert {*paths, *folding.refused} == every
        assert len(paths) == 7
        if name != "gemma3":
            assert not folding.refused
            return
        inputs = [f"model.layers.{i}.{x}_layernorm" for i in range(3) for x in READ]
        assert paths == [*inputs, "model.norm"]
        others = ("self_attn.q_norm", "self_attn.k_norm")
        others += ("post_attention_layernorm", "post_feedforward_layernorm")
        refused = {f"model.layers.{i}.{x}" for i in range(3) for x in others}
        assert folding.refused == dict.fromkeys(refused, "no linear map reads its output")


def same_sums(got: Tensor, expected: Tensor) -> bool:
    """In fp64: sums of 32 products of 32 each at most, whose terms are as large as the largest
    sum.
    """
    return within_roundings(got.detach(), expected.detach(), 32, expected.detach().abs().max())


def test_layer_norm_formula() -> None:
    """W' = (I - 11ᵀ/d) diag(γ) W and b' = β W + b, written out with rows as the source does, on
    GPT-2 and on an output without a bias.
    """
    model = gpt2(torch.float64)
    norm, reader = model.transformer.h[1].ln_2, model.transformer.h[1].mlp.c_fc
    parts = (norm.weight, norm.bias, reader.weight, reader.bias)
    gamma, beta, weight, bias = (x.detach().clone() for x in parts)
    with fold(model):
        centring = torch.eye(32, dtype=torch.float64) - torch.ones(32, 32, dtype=torch.float64) / 32
        assert same_sums(reader.weight, centring @ torch.diag(gamma) @ weight)
        assert same_sums(reader.bias, beta @ weight + bias)
        x = torch.randn(5, 32, dtype=torch.float64) + 3
        sigma = ((x - x.mean(1, keepdim=True)) ** 2).mean(1, keepdim=True).add(norm.eps).sqrt()
        assert same_sums(model.transformer.h[1].ln_2(x), x / sigma)
    model = neox(torch.float64)
    norm, weight = model.gpt_neox.final_layer_norm, model.lm_head.weight.detach().clone()
    beta = norm.bias.detach().clone()
    with fold(model):
        assert same_sums(model.lm_head.bias, weight @ beta)
        assert not same_sums(model.lm_head.bias, weight @ beta + 1e-12)
    assert model.lm_head.bias is None


@pytest.mark.parametrize("name", ["gemma3-vision", "llava"])
def test_the_language_model_beside_a_vision_tower(name: str) -> None:
    """Its norms are folded, and its W_VO are those of the language model alone; the tower's norms
    do not run in a pass over text.
    """
    model = tiny_models.build(name)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    alone = AutoModelForCausalLM.from_config(model.config.text_config).eval()
    alone.model, alone.lm_head = model.model.language_model, model.lm_head
    with torch.no_grad():
        expected, limit = alone(ids).logits, fold_limit(alone, ids)
        assert off(model(ids).logits, expected) <= limit
        with fold(model) as folding:
            assert folding.folded[-1].path == "model.language_model.norm"
            assert len(folding.folded) == 9
            reasons = {why for path, why in folding.refused.items() if "vision" in path}
            assert reasons == {"it does not run in a pass over tokens"}
            assert off(model(ids).logits, expected) <= limit
    for layer in (0, -1):
        mine, theirs = value_output(model, layer), value_output(alone, layer)
        assert torch.equal(mine.matrices(), theirs.matrices())
        assert torch.equal(mine.bias, theirs.bias)
    assert not torch.equal(value_output(model, 0).matrices(), value_output(model, -1).matrices())


def test_a_model_is_folded_twice_and_not_under_a_patcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong fold is noticed and undone."""
    model = build("llama")
    before, refusal = Snapshot(model), pytest.raises(ValueError, match="detach the patcher first")
    with fold(model), fold(model):
        assert (model.model.norm.weight == 1).all()
    before.check(model)
    with ContextPatcher(model), refusal, fold(model):
        pass
    with refusal, fold(model):
        patcher = ContextPatcher(model)
    patcher.detach()
    before.check(model)
    monkeypatch.setattr(UncentredLayerNorm, "forward", lambda self, x: 2 * x)
    model = neox()
    before = Snapshot(model)
    with pytest.raises(UnsupportedModelError, match="computes something else"), fold(model):
        pass
    before.check(model)


# -- W_VO


@pytest.mark.parametrize("folded", [False, True], ids=["plain", "folded"])
@every_model
def test_value_output_against_the_models_own_attention(name: str, folded: bool) -> None:
    """Σ_h Σ_j α_ijh x_j W_VO_h + b_VO with the model's own α is what its output matrix gives, on
    eight tokens.
    """
    model = MODELS[name](torch.float64)
    model.set_attn_implementation("eager")
    with fold(model) if folded else nullcontext():
        check_value_output(name, model)


def check_value_output(name: str, model: PreTrainedModel) -> None:
    made = value_output(model, 1)
    if name == "gpt2":
        block, output = model.transformer.h[1], "attn.c_proj"
    elif "neox" in name:
        block, output = model.gpt_neox.layers[1], "attention.dense"
    else:
        block, output = model.model.layers[1], "self_attn.o_proj"
    norm = block.ln_1 if name == "gpt2" else block.input_layernorm
    seen: dict[str, Tensor] = {}
    norm.register_forward_hook(lambda _m, _args, out: seen.update(x=out))
    block.get_submodule(output).register_forward_hook(lambda _m, _args, out: seen.update(y=out))
    with torch.no_grad():
        alpha = model(IDS, output_attentions=True).attentions[1]  # (B, H, T, T)
    x = seen["x"]
    want = sum(alpha[:, h] @ x @ made.head(h) for h in range(len(made))) + made.bias
    # the softmax of these models is in fp32: a sum of nine α is 1 to as many of its roundings
    assert off(seen["y"], want) <= 2 * IDS.shape[1] * UNIT[torch.float32]
    other = sum(alpha[:, h] @ x @ made.head(h - 1) for h in range(len(made))) + made.bias
    assert off(seen["y"], other) > 0.01
    assert torch.equal(made.matrices(), torch.stack([made.head(h) for h in range(len(made))]))


def test_folded_value_output_formula() -> None:
    """W_VO' = (I - 11ᵀ/d) diag(γ) W_V W_O and b_VO' = β W_V W_O + b_V W_O + b_O."""
    model = gpt2(torch.float64)
    plain, norm = value_output(model, -1), model.transformer.h[-1].ln_1
    with fold(model):
        folded = value_output(model, -1)
    scaled = torch.diag(norm.weight.detach()) @ plain.matrices()
    assert same_sums(folded.matrices(), scaled - scaled.mean(1, keepdim=True))
    assert same_sums(folded.bias, plain.bias + norm.bias.detach() @ plain.matrices().sum(0))
    attention = model.transformer.h[-1].attn
    value, start = attention.c_attn.weight[:, 64:], attention.c_attn.bias[64:]
    assert same_sums(plain.head(3), value[:, 24:] @ attention.c_proj.weight[24:])
    assert same_sums(plain.bias, start @ attention.c_proj.weight + attention.c_proj.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_that_is_no_weighted_mean_of_values_is_refused(dtype: torch.dtype) -> None:
    """Clipped values, which these weights do not reach; sinks, whose α sum to 0.993 or more where
    the scores are 0; a norm of values. In ordinary attention with α that differ it is not.
    """
    config = OlmoConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, clip_qkv=8.0, dtype=dtype,
    )  # fmt: skip
    clipping = AutoModelForCausalLM.from_config(config).eval()
    sinks = tiny_models.build("gpt_oss", 0, dtype)
    for layer in sinks.model.layers:
        layer.self_attn.sinks.data.fill_(-5)
    normed = tiny_models.build("gemma3n", 0, dtype)
    for model, layer in ((clipping, 0), (sinks, 0), (sinks, 1), (normed, 2)):
        with pytest.raises(UnsupportedModelError, match="with α that sum to 1, got another"):
            value_output(model, layer)
    assert len(value_output(tiny_models.build("bloom", 0, dtype), 1)) == 4  # with ALiBi
    assert len(value_output(tiny_models.build("bloom", 0, torch.float64), 1)) == 4


# -- refusals


def refused(model: PreTrainedModel, path: str) -> str:
    """Why a norm is left as it is; others are folded all the same."""
    before, expected, limit = Snapshot(model), logits(model), fold_limit(model)
    with fold(model) as folding:
        assert folding.folded and off(logits(model), expected) <= limit
    before.check(model)
    return folding.refused[path]


def test_a_tied_head_gets_a_weight_of_its_own_and_a_shared_module_is_refused() -> None:
    model = gpt2()
    embeddings = model.transformer.wte.weight
    before = embeddings.detach().clone()
    with fold(model):
        assert model.lm_head.weight is not embeddings and torch.equal(embeddings, before)
    assert model.lm_head.weight is model.transformer.wte.weight is embeddings
    model = build("llama")
    model.model.layers[0].mlp.up_proj = model.model.layers[2].mlp.up_proj
    assert "has other inputs too" in refused(model, "model.layers.0.post_attention_layernorm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_else_reads_a_norm_or_a_matrix_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    """Experts in the last block, a residual sum, a matrix that is read without a call, a class that
    normalises its weight. Some of them move the logits by less than bf16's √eps.
    """
    model = tiny_models.build("qwen2_moe", 2, dtype)
    assert "also read elsewhere" in refused(model, "model.layers.3.post_attention_layernorm")
    model = tiny_models.build("bloom-post-norm", 2, dtype)
    assert "also read elsewhere" in refused(model, "transformer.h.3.input_layernorm")
    model, path = build("llama", 0, dtype), "model.layers.2.post_attention_layernorm"
    model.model.layers[2].mlp = Peeking(model.model.layers[2].mlp).eval()
    assert "also read elsewhere" in refused(model, path)
    model = build("llama", 0, dtype)
    model.model.layers[2].mlp.up_proj.__class__ = Normalising
    assert "no function of W z + b alone" in refused(model, path)
    model = build("llama", 0, dtype)
    model.model.layers[2].mlp.up_proj.__class__ = WithMore
    assert "no function of W z + b alone" in refused(model, path)


class Peeking(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * (1 + 1e-3 * self.mlp.gate_proj.weight.mean())


class Normalising(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.normalize(self.weight, dim=1), self.bias)


class WithMore(nn.Linear):
    """Of three dimensions alone, as some classes of transformers."""

    def forward(self, x: Tensor) -> Tensor:
        batch, count, _ = x.shape
        return super().forward(x).view(batch, count, -1)


def test_a_norm_with_hooks_keeps_them_and_its_numbers() -> None:
    model, calls = gpt2(), []
    handle = model.transformer.h[0].ln_1.register_forward_hook(lambda *args: calls.append(args))
    before = model(IDS).logits
    with fold(model) as folding:
        calls.clear()
        after = model(IDS).logits
        assert len(calls) == 1
    assert folding.refused.keys() == {"transformer.h.0.ln_1"}
    assert "it has hooks" in folding.refused["transformer.h.0.ln_1"]
    handle.remove()
    assert off(after, before) <= fold_limit(model)
    model.transformer.h[0].attn.c_attn.register_forward_hook(lambda *args: None)
    reason = "transformer.h.0.attn.c_attn, which reads its output, has hooks"
    assert reason in refused(model, "transformer.h.0.ln_1")


class Shifted(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(-1, keepdim=True)


class InPlace(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.add_(1))


def test_refuses_norms_of_another_formula_and_outputs_that_are_read_elsewhere_or_changed() -> None:
    """Qwen3-Next's linear attention has a norm with a gate."""
    model = tiny_models.build("opt", do_layer_norm_before=False)
    path = "model.decoder.layers.1.self_attn_layer_norm"
    assert "is also read elsewhere" in refused(model, path)
    model = gpt2()
    model.transformer.h[0].ln_1 = Shifted(32).eval()
    model.transformer.h[0].mlp = InPlace(model.transformer.h[0].mlp).eval()
    assert "neither a LayerNorm nor an RMSNorm" in refused(model, "transformer.h.0.ln_1")
    assert "no linear map reads its output" in refused(model, "transformer.h.0.ln_2")
    model = tiny_models.build("qwen3_next")
    gated = "model.layers.0.linear_attn.norm"
    assert norm_form(Shifted(32)) is norm_form(model.get_submodule(gated)) is None
    assert refused(model, gated)
    with fold(model) as folding:
        inputs = {f"model.layers.{i}.input_layernorm" for i in range(4)}
        assert inputs < {norm.path for norm in folding.folded}


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * math.pi


def test_bad_arguments_and_attention_of_another_form() -> None:
    model = build("llama")
    model.model.layers[1].mlp.train()  # a part may also hold dropout
    training = "expected a model in eval mode"
    with pytest.raises(ValueError, match=training), fold(model):
        pass
    with pytest.raises(ValueError, match=training):
        value_output(model, 0)
    with pytest.raises(IndexError):
        value_output(model.eval(), 3)
    model.model.layers[1].self_attn.o_proj.__class__ = Scaled
    with pytest.raises(UnsupportedModelError, match=r"got .*Scaled, which computes something else"):
        value_output(model, 1)
    model.model.layers[0].self_attn.v_proj = nn.Identity().eval()
    with pytest.raises(UnsupportedModelError, match="expected value and output matrices"):
        value_output(model, 0)
