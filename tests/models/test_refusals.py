"""What a patcher refuses, and that everything still works afterwards."""

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.numeric import noise_limit, normal, seeded
from support.patchers import IDS, KEPT, Snapshot, families, plain_logits, refuses, updates, works
from support.random_models import build, ragged, shallow, tokens
from torch import Tensor, nn
from transformers import BatchEncoding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from icl_patch import (
    ContextPatch,
    ContextPatcher,
    ControllabilityError,
    PatchedLinear,
    UnsupportedModelError,
    detach,
    metrics,
)
from icl_patch.evaluation import tiny_models
from tools import model_types


@pytest.mark.parametrize("pad_token_id", [None, 0])
@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_llama_without_a_language_model_head_is_refused(
    kind: str, pad_token_id: int | None
) -> None:
    config = build("llama", pad_token_id=pad_token_id).config
    refuses(getattr(transformers, kind)(config).eval(), kind)


def test_models_that_are_no_causal_language_models_are_refused() -> None:
    small = {"d_model": 32, "vocab_size": 97, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    bart = transformers.BartConfig(**small, **heads, encoder_layers=2, decoder_layers=2)
    refuses(
        transformers.BartForConditionalGeneration(bart).eval(),
        r"\(decoder only, as Llama or Gemma\), got BartForConditionalGeneration of type 'bart'",
    )
    for name, value, message in (
        ("vocab_size", 90, r"LlamaForCausalLM .* and \d+ logits, not 90: set config\.vocab_size"),
        (
            "return_dict",
            False,
            "LlamaForCausalLM with config.return_dict = True, got False: set it",
        ),
    ):
        model = build("llama")
        setattr(model.config, name, value)
        refuses(model, message)


def test_one_module_in_two_places_of_a_block_is_refused() -> None:
    model = build("llama")
    mlp = model.model.layers[1].mlp
    mlp.up_proj = mlp.gate_proj
    refuses(model, r"layers\.1\.mlp\.gate_proj is one module in two places .*put a copy in one")
    mlp.up_proj = copy.deepcopy(mlp.gate_proj)
    ContextPatcher(model).detach()


def test_attention_without_a_mask_is_refused() -> None:
    model = build("llama")
    for implementation in ("flash_attention_2", "flex_attention", "paged|sdpa"):
        model.config._attn_implementation = implementation
        found = f"LlamaForCausalLM has '{re.escape(implementation)}"
        refuses(model, rf"'sdpa' or 'eager'.*{found}.*set_attn_implementation\('sdpa'\)")
    assert not any(isinstance(module, PatchedLinear) for module in model.modules())


def test_wrapped_and_compiled_models_are_refused_with_a_cure() -> None:
    model = build("llama")
    refuses(torch.compile(model), r"expected .* model\._orig_mod; got Optimized")
    adapted: Any = nn.Sequential(model)
    adapted.peft_config, adapted.get_base_model = {}, lambda: model  # as peft wraps a model
    refuses(adapted, r"get_base_model\(\), in which adapters stay in effect; got Sequential$")
    adapted.merge_and_unload = lambda: model
    refuses(adapted, r"merge_and_unload\(\); got Sequential$")
    prompt = SimpleNamespace(is_prompt_learning=True, peft_type=SimpleNamespace(value="PREFIX"))
    adapted.peft_config["default"] = prompt
    refuses(adapted, "without a learned prompt, got Sequential with PREFIX: ")
    refuses(nn.DataParallel(model), "expected the model within DataParallel, its attribute module")
    part = build("llama")
    part.model.layers[1].mlp.compile()
    refuses(part, r"LlamaForCausalLM with model\.layers\.1\.mlp compiled")
    part = build("llama")
    part.model = torch.compile(part.model)
    refuses(part, "LlamaForCausalLM with model compiled")
    message = r"a model that is not compiled, .* got LlamaForCausalLM after model\.compile\(\)"
    with ContextPatcher(model) as patcher:
        model.compile()
        with pytest.raises(UnsupportedModelError, match=message):
            patcher.compute(IDS, KEPT)
    refuses(model, message)


def test_weights_that_a_state_dict_spoils_are_refused() -> None:
    """bitsandbytes marks them so where the CPU multiplies in bf16; elsewhere they are served."""
    model = build("llama")
    model.model.layers[1].mlp.up_proj.support_avx512bf16_for_cpu = True
    refuses(model, r"layers\.1\.mlp\.up_proj .*8 bits")
    model.model.layers[1].mlp.up_proj.support_avx512bf16_for_cpu = False
    ContextPatcher(model).detach()


def test_weights_without_values_are_refused() -> None:
    refuses(build("llama").to("meta"), "weights of LlamaForCausalLM in memory, ")
    model = build("llama")
    with torch.device("meta"):
        refuses(model, "default device")


TOO_LARGE = r"layers\.0.* has .*float16 cannot hold: .*above .* 6.6e\+04.* torch.bfloat16"
TOO_SMALL = r"layers\.\d.*outputs that are too small for torch.float16: torch.bfloat16"


@pytest.mark.parametrize(
    ("family", "factor", "message"),
    [("gemma2", 2.0**-20, TOO_SMALL), ("llama", 2.0**16, TOO_LARGE)],
)
def test_an_mlp_beyond_the_range_of_fp16_is_refused_with_a_cure(
    family: str, factor: float, message: str
) -> None:
    model = tiny_models.build(family, 0, torch.float16)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data *= factor
    refuses(model, message)
    ContextPatcher(model.bfloat16()).detach()


def test_a_patcher_in_place_of_its_model_is_refused(tmp_path: Path) -> None:
    with ContextPatcher(build("llama")) as patcher:
        patcher.compute(IDS, KEPT).save(tmp_path / "patch.safetensors")
        with pytest.raises(TypeError, match="expected a model of transformers, got ContextPatcher"):
            ContextPatch.load(tmp_path / "patch.safetensors", patcher)
        with pytest.raises(TypeError, match="expected a model, got ContextPatcher"):
            detach(patcher)


def begun(patcher: ContextPatcher) -> Callable[[], Any]:
    steps = patcher.generate(IDS, max_new_tokens=3, eos_token_id=None)
    next(steps)
    return lambda: next(steps)


def test_training_is_refused() -> None:
    """When attaching, and when it begins later, in the model or in one block; once it is over
    everything works.
    """
    model = build("llama")
    refuses(model.train(), r"training: call model\.eval", ValueError)
    with ContextPatcher(model.eval(), "stable") as patcher:
        patch = patcher.compute(IDS, KEPT)
        calls = (
            begun(patcher),
            begun(patcher),
            lambda: patcher.compute(IDS, KEPT),
            lambda: patcher.forward(KEPT, patch),
            lambda: patcher.generate(IDS),
            lambda: patcher.dynamics(IDS, KEPT),
        )
        for call, part in zip(calls, itertools.cycle((model, model.model.layers[1])), strict=False):
            part.train()
            with pytest.raises(ValueError, match=r"training: call model\.eval"):
                call()
            model.eval()
        works(patcher)
    gpt2 = shallow("gpt2")
    gpt2.transformer.h.train()
    for dropout in (part for part in gpt2.modules() if isinstance(part, nn.Dropout)):
        dropout.train().p = 0.5
    refuses(gpt2, r"in eval mode, got GPT2LMHeadModel with transformer\.\S+ in training")
    ContextPatcher(gpt2.eval()).detach()


class Bent(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs).tanh()


class Weighed(LlamaDecoderLayer):
    """Multiplies its MLP's output by a number that is no attribute."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden = hidden_states + attended
        return hidden + self.numbers[0] * self.mlp(self.post_attention_layernorm(hidden))


class LooksTwice(LlamaDecoderLayer):
    """What it makes of its sum has the attention's output in it once more, which the sum's right
    change cannot give it.
    """

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return self.last_norm(hidden_states) + attended / 2


class OwnProduct(LlamaMLP):
    """The output matrix is used, the module is not."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.down_proj.weight)


class ThirdReader(LlamaMLP):
    """Something else reads the MLP's input: patching two readers cannot make ``h`` what it is with
    the context.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(
            self.act_fn(self.gate_proj(x)) * self.up_proj(x) * (1 + x.mean(-1, keepdim=True))
        )


def disguised(kind: type[nn.Module]) -> nn.Module:
    model = build("llama")
    for layer in model.model.layers:
        (layer.mlp if issubclass(kind, LlamaMLP) else layer).__class__ = kind
    return model


@pytest.mark.parametrize("kind", [Bent, OwnProduct, ThirdReader])
def test_a_block_that_does_something_else_is_refused(kind: type[nn.Module]) -> None:
    model = disguised(kind)
    with Snapshot(model):
        refuses(model, None)


def test_a_block_that_hands_on_more_than_its_sum() -> None:
    """Its exact patch needs no correction: only a replay shows it."""
    model = disguised(LooksTwice)
    for layer in model.model.layers:
        layer.last_norm = nn.LayerNorm(model.config.hidden_size)
    refuses(model, "LlamaForCausalLM has blocks that hand on more of their context than their sum")


PADDED = torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0)


def refuses_padding(patcher: ContextPatcher) -> None:
    refusal = f"expected rows of one length for {type(patcher.model).__name__}"
    with pytest.raises(ValueError, match=refusal):
        patcher.compute(IDS, KEPT, context_mask=PADDED)
    with pytest.raises(ValueError, match=refusal):
        patcher.generate(IDS, context_mask=PADDED, max_new_tokens=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_positions_that_are_counted_in_the_cache(dtype: torch.dtype) -> None:
    """Also where they do less than bf16's rounding may in other models."""
    model = model_types.build("bart", {}).to(dtype)
    with torch.no_grad():
        model.model.decoder.embed_positions.weight.mul_(0.1)
    with ContextPatcher(model) as patcher:
        works(patcher, {"context_ids": IDS, "kept_ids": KEPT, "keep_first": 2})
        refuses_padding(patcher)
        with pytest.raises(ValueError, match="expected one absorbed span for BartForCausalLM"):
            patcher.compute(IDS, KEPT, absorbed=[(0, 1), (2, 3)])


def test_padding_that_shifts_the_mask_of_a_cache() -> None:
    """GIT takes a padded row in one call, but not token by token."""
    with ContextPatcher(model_types.build("git", {})) as patcher:
        refuses_padding(patcher)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_padding_that_a_recurrent_state_sees(dtype: torch.dtype) -> None:
    """RecurrentGemma's convolution reads it; Mamba's states do not."""
    with ContextPatcher(shallow("recurrent_gemma", 0, dtype)) as patcher:
        refuses_padding(patcher)
        patcher.compute(IDS, KEPT)
    with ContextPatcher(shallow("mamba", 0, dtype)) as patcher:
        alone = patcher.compute(IDS[:, 1:], KEPT).logits
        assert torch.equal(patcher.compute(IDS, KEPT, context_mask=PADDED).logits, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [0.999, 1 / 3])
def test_a_multiplier_needs_a_name_unless_rounding_hides_it(
    number: float, dtype: torch.dtype
) -> None:
    """bf16 hides a number near 1, which is measured then."""
    model = disguised(Weighed).to(dtype)
    for layer in model.model.layers:
        layer.numbers = [number]  # a list: no name to find it by
    if (number, dtype) != (0.999, torch.bfloat16):
        refuses(model, "each times 1 or an attribute with a name that ends")
        for layer in model.model.layers:
            layer.mlp_factor = number
    with ContextPatcher(model) as patcher:
        for block in patcher.attached_model.block_specs:
            assert block.spec.residual_multiplier == pytest.approx(number, rel=1e-12)
            assert block.spec.down == "mlp.down_proj"
        works(patcher)


def test_an_mlp_that_two_blocks_share_is_refused() -> None:
    model = build("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    refuses(model, r"model\.layers\.1")


HOLE = torch.tensor([[True, False, True, True, True], [True] * 5])
SPANS = r"spans .* within 5 columns, not empty and apart, got "
BAD_ARGUMENTS = {
    r"at least one row and one token in context_ids, got \(0, 5\)": {
        "context_ids": IDS[:0],
        "kept_ids": KEPT[:0],
    },
    r"at least one kept token, got kept_ids \(2, 0\)": {"kept_ids": KEPT[:, :0]},
    r"context_ids \(B, T\) of integers, got \(5,\)": {"context_ids": IDS[0]},
    r"kept_ids \(B, T\) of integers, got \(2, 3\) torch\.float32": {"kept_ids": KEPT.float()},
    "kept_ids with 2 rows on cpu, got 1": {"kept_ids": KEPT[:1]},
    r"context_mask \(2, 5\) on cpu, got \(2, 4\)": {"context_mask": HOLE[:, 1:]},
    "context_mask of True and False": {"context_mask": 2 * HOLE.long()},
    "context_mask with padding on the left only": {"context_mask": HOLE},
    "kept_mask with padding on the right only": {"kept_mask": ragged(2, 3, side="left")},
    "every row of kept_ids, row 1 has none": {"kept_mask": KEPT[:1] == KEPT},
    "keep_first ≥ 0, got -1": {"keep_first": -1},
    "row 0 has only the first 5, which stay": {"keep_first": 5},
    "row 0 has only the first 2, which stay": {"keep_first": 2, "absorbed": [(0, 2), (3, 4)]},
    "at least one absorbed span": {"absorbed": []},
    SPANS + r"\[\(3, 6\)\]": {"absorbed": [(3, 6)]},
    SPANS + r"\[\(-1, 2\)\]": {"absorbed": [(-1, 2)]},
    SPANS + r"\[\(2, 2\)\]": {"absorbed": [(2, 2)]},
    SPANS + r"\[\(3, 1\)\]": {"absorbed": [(3, 1)]},
    SPANS + r"\[\(0, 3\), \(2, 4\)\]": {"absorbed": [(0, 3), (2, 4)]},
    "row 1 has only padding there": {
        "context_mask": ragged(2, 5, side="left"),
        "absorbed": [(0, 2), (3, 4)],
    },
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_bad_arguments_of_compute(message: str, llama_patcher: ContextPatcher) -> None:
    arguments = {"context_ids": IDS, "kept_ids": KEPT} | BAD_ARGUMENTS[message]
    with pytest.raises(ValueError, match=message):
        llama_patcher.compute(**arguments)


def test_bad_arguments_of_generate_and_bad_ids(llama_patcher: ContextPatcher) -> None:
    """When it is called, not at the first step."""
    for ids, mask, message in (
        (IDS, HOLE, "padding on the left"),
        (IDS[:, :0], None, "at least one row and one token"),
        (torch.where(IDS[0, 0] == IDS, -1, IDS), None, "expected ids from 0 to 96, got -1 to"),
    ):
        with pytest.raises(ValueError, match=message):
            llama_patcher.generate(ids, context_mask=mask)
    with pytest.raises(ValueError, match=r"expected ids from 0 to 96, got \d+ to 97"):
        llama_patcher.compute(torch.full_like(IDS, 97), KEPT)
    with pytest.raises(TypeError, match="expected context_ids as a tensor, got list"):
        llama_patcher.compute([[1, 2]], KEPT)
    with pytest.raises(TypeError, match=r"got BatchEncoding: pass \*\*encoding"):
        llama_patcher.generate(BatchEncoding({"input_ids": IDS}))
    for call in (
        lambda: llama_patcher.compute(IDS, KEPT, keep_first=1.5),
        lambda: llama_patcher.generate(IDS, keep_first=1.5),
    ):
        with pytest.raises(TypeError, match=r"expected keep_first as an integer, got 1\.5"):
            call()


def test_bad_arguments_of_forward(llama_patcher: ContextPatcher) -> None:
    kept_mask = ragged(2, 3, side="right")
    patch = llama_patcher.compute(IDS, KEPT, kept_mask=kept_mask)
    other = KEPT.clone()
    other[0, 1] += 1
    every, one_row = ({"kept_mask": torch.ones(n, 3, dtype=torch.bool)} for n in (2, 1))
    for ids, options, message in (
        (other, {}, rf"got 1 of 4 that differ: .* \[0, 1\], is {other[0, 1]} in .* {KEPT[0, 1]}$"),
        (KEPT[:, :2], {}, r"got others, \(2, 2\)"),
        (KEPT[:1], {}, r"got others, \(1, 3\)"),
        (KEPT, every, r"kept_mask .* 2 of 6 that differ: .* \[1, 1\], is True in place of False$"),
        (KEPT, one_row, r"kept_mask .*\(2, 3\), got others, \(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            llama_patcher.forward(ids, patch, **options)
    other = KEPT.clone()
    other[1, 1:] = 0  # padding may be anything
    expected = llama_patcher.forward(KEPT, patch)
    assert torch.equal(llama_patcher.forward(other, patch, kept_mask=kept_mask.long()), expected)


def test_a_patch_of_another_update_is_replayed(llama_patcher: ContextPatcher) -> None:
    """Computed on these weights, by another update: it is a change of weights like any other."""
    patch = llama_patcher.compute(IDS, KEPT)
    with ContextPatcher(build("llama"), "direct") as direct:
        off = metrics.linf(direct.forward(KEPT, patch), patch.logits).max()
        assert off <= noise_limit(direct.model)


def refused(patcher: ContextPatcher, arguments: dict, message: str) -> None:
    """The error names layer, row, token and condition; the model is as it was, and the patcher can
    go on.
    """
    before = plain_logits(patcher.model)
    with pytest.raises(ControllabilityError, match=message):
        patcher.compute(**arguments)
    assert torch.equal(plain_logits(patcher.model), before)
    for module in patcher.model.modules():
        assert "mode=off" in repr(module) or "mode=" not in module.extra_repr()


@families
@updates
def test_z_is_zero(family: str, update: str) -> None:
    """A token with an embedding of 0, alone: its residual stream is 0 without the context and is
    not with it.
    """
    model = build(family)
    model.get_input_embeddings().weight.data[5] = 0
    kept = KEPT.clone()
    kept[1, 0] = 5
    with ContextPatcher(model, update) as patcher:
        message = r"^model\.layers\.0, row 1, kept token 0: the input z of mlp\.gate_proj is 0$"
        refused(patcher, {"context_ids": IDS, "kept_ids": kept}, message)
        works(patcher)
        # now it attends to something
        behind = torch.cat([tokens(4, 2, 2), IDS[:, :3]], 1)
        works(patcher, {"context_ids": behind, "kept_ids": kept, "keep_first": 2})


@updates
def test_h_is_zero_for_some_tokens(update: str) -> None:
    """A gate of ReLU that one direction of z closes: the first kept token in which it is closed is
    named.
    """
    model = build("llama", hidden_act="relu")
    ids = torch.cat([IDS, KEPT], 1)
    seen: list[Tensor] = []
    gate = model.model.layers[1].mlp.gate_proj
    gate.weight.data.copy_(normal(seeded(4), 1, 48))
    hook = gate.register_forward_hook(lambda _module, _args, out: seen.append(out[:, 5:, 0]))
    with torch.no_grad(), hook:
        model(ids)
    row, token = (seen[0] < 0).nonzero()[0].tolist()
    assert (row, token) > (0, 0)
    with ContextPatcher(model, update) as patcher:
        place = rf"model\.layers\.1, row {row}, kept token {token}"
        message = rf"^{place}: the input h of mlp\.down_proj is 0: give it a bias of zeros before"
        refused(patcher, {"context_ids": IDS, "kept_ids": KEPT}, message)
    down = model.model.layers[1].mlp.down_proj
    down.bias = nn.Parameter(torch.zeros(48))
    with ContextPatcher(model, update) as patcher:
        works(patcher)


def test_a_block_that_leaves_its_readers_out_over_a_cache() -> None:
    """Detection sees one call without a cache, where they run."""
    model: Any = build("llama")
    mlp, own = model.model.layers[1].mlp, model.model.layers[1].mlp.forward
    mlp.forward = lambda x: own(x) if x.shape[1] > 2 else torch.zeros_like(x)
    refuses(model, r"layers\.1 does not call its readers mlp\.gate_proj, mlp\.up_proj")


def test_inputs_that_the_model_does_not_have(llama_patcher: ContextPatcher) -> None:
    """Its class would take most of them, and not look at them."""
    names = ("prefix_id", "pixel_value", "position_ids", "labels", "inputs_embeds", "kwargs")
    for name in names:
        refusal = rf"further inputs of LlamaForCausalLM but its own \(none\), got {name}"
        with pytest.raises(TypeError, match=refusal):
            llama_patcher.compute(IDS, KEPT, **{name: IDS})
    with ContextPatcher(shallow("gemma3-vision"), "stable") as patcher:
        for name in names:
            message = rf"its own \(.*pixel_values, token_type_ids\), got {name}"
            with pytest.raises(TypeError, match=message):
                patcher.compute(IDS, KEPT, **{name: IDS, "token_type_ids": torch.zeros_like(IDS)})
        patch = patcher.compute(IDS, KEPT, token_type_ids=torch.zeros_like(IDS))
        with pytest.raises(TypeError, match="got token_type_ids too: leave it out"):
            patcher.forward(KEPT, patch, token_type_ids=torch.zeros_like(KEPT))
