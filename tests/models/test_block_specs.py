"""How forms are recognised, what is refused and why, and what else is covered: images, quantised
weights, generation.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.generation import generated_logits, prefilled
from support.numeric import noise_limit
from support.patchers import refuses, works
from support.quantised import Int8Linear
from support.random_models import Stock, build, case, ragged, shallow, tokens
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from icl_patch import ContextPatch, ContextPatcher, metrics
from icl_patch.evaluation import tiny_models
from icl_patch.generation.decode_mode import DecodeMode
from icl_patch.generation.decoding import decode_one_token
from icl_patch.generation.reusable_step import use_reusable_step
from icl_patch.models import model_checks
from icl_patch.models.block_detection import blocks_of
from icl_patch.models.block_spec import Writer
from icl_patch.models.forward import cache_in, cache_name

REPOSITORY = Path(__file__).parents[2]

# -- what is read from a model


def form_of(family: str, layer: int = 0, **changes: Any) -> Any:
    return blocks_of(tiny_models.build(family, 0, **changes))[layer].spec


def test_every_entry_of_the_zoo_has_the_writer_it_names() -> None:
    for family, entry in tiny_models.SUPPORTED.items():
        writers = {block.spec.writer.value for block in blocks_of(shallow(family))}
        assert entry.writer in writers, family


def test_one_walk_reads_the_known_forms() -> None:
    gpt2, granite, opt = form_of("gpt2"), form_of("granite"), form_of("opt-post-norm")
    assert (gpt2.readers, gpt2.down) == (("mlp.c_fc",), "mlp.c_proj")
    assert gpt2.transposed == ("mlp.c_fc", "mlp.c_proj")
    assert granite.residual_multiplier == 0.22
    assert (opt.residual, opt.final_norm) == (("input of fc1",), "final_layer_norm")
    phi, olmo = form_of("phi"), form_of("olmo2")
    assert phi.parallel
    assert not phi.reads
    assert olmo.residual == ("input of mlp.gate_proj",)
    qwen, sparse = form_of("qwen2_moe", 1), form_of("qwen2_moe", 0)
    assert (qwen.writer, sparse.writer) == (Writer.WEIGHT, Writer.EXPERTS)
    assert "mlp.shared_expert_gate" in sparse.readers
    assert sparse.routers == ("mlp.gate",)
    assert form_of("gemma3n").continues_after_sum
    assert form_of("mamba").mixer


def test_a_factor_that_the_mlp_applies_itself() -> None:
    spec = form_of("falcon_h1", mlp_multipliers=[1.5, 0.7])
    assert spec.residual_multiplier == 0.7
    model = tiny_models.build("falcon_h1", 0, mlp_multipliers=[1.5, 0.7])
    with ContextPatcher(model, "direct") as patcher:
        works(patcher)


def zeroed(module: nn.Module) -> None:
    """A matrix whose output is 0, or a norm with a scale of 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        if isinstance(module, Gemma3RMSNorm):
            module.weight.fill_(-1)


# What gives 0 in one block: attention, as in blocks that are put between those of a trained model,
# the norm behind it, the MLP, or both.
ZEROS = {
    "gemma3": [["post_attention_layernorm"], ["mlp.down_proj"], ["self_attn.o_proj"]],
    "olmo2": [["post_attention_layernorm"], ["post_feedforward_layernorm"]],
    "gemma4-moe": [["post_attention_layernorm"]],
    "llama": [["self_attn.o_proj"], ["self_attn.o_proj", "mlp.down_proj"], ["input_layernorm"]],
    "mixtral": [["self_attn.o_proj"], ["mlp.experts"]],
    "gpt2": [["attn.c_proj"], ["attn.c_proj", "mlp.c_proj"], ["ln_2"]],
    "gptj": [["attn.out_proj"], ["ln_1"]],
    "bloom-post-norm": [["mlp.dense_4h_to_h"]],
    "opt-post-norm": [["self_attn.out_proj"]],
}


@pytest.mark.parametrize("family", ZEROS)
def test_a_block_in_which_something_gives_zero_has_its_form(family: str) -> None:
    """The numbers of one small forward do not show what such a block is: two tensors are equal that
    are not the same.
    """
    for names in ZEROS[family]:
        model = shallow(family)
        expected = [block.spec for block in blocks_of(model)]
        block = model.get_submodule(blocks_of(model)[1].path)
        for name in names:
            zeroed(block.get_submodule(name))
        assert [block.spec for block in blocks_of(model)] == expected, names
        if names == ZEROS[family][0]:
            arguments = case("prefix")
            with ContextPatcher(model) as patcher:
                patch = patcher.compute(**arguments)
                replayed = patcher.forward(arguments["kept_ids"], patch)
            mask = patch.kept_mask
            assert torch.equal(replayed[mask], patch.logits[mask])
            stock = Stock(model).logits(arguments)
            assert metrics.linf(patch.logits, stock)[mask].max() <= noise_limit(model)


# -- what is refused

REASONS = {
    "deepseek_v4": r"model\.layers\.0 \(DeepseekV4DecoderLayer\): it carries 2 residual streams",
    "rwkv": r"rwkv\.blocks\.0 \(RwkvBlock\): no module in it takes an attention mask or a cache",
    "openai-gpt": "expected a model with a cache, OpenAIGPTLMHeadModel has none",
}


@pytest.mark.parametrize("family", tiny_models.REFUSED)
def test_refused_by_name_and_reason(family: str) -> None:
    model = tiny_models.build(family)
    modules = dict(model.named_modules())
    refuses(model, REASONS[family])
    assert dict(model.named_modules()) == modules and "forward" not in vars(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Broken(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("not today")


class OwnCache(LlamaForCausalLM):
    """Returns a state that is no cache of transformers."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        if cache_in(kwargs) is not None:
            raise TypeError("my own, please")
        output = super().forward(input_ids, **kwargs)
        output[cache_name(self)] = {"mine": cache_in(output)}
        return output


FAILING = {
    Broken: r"Broken fails on the tokens that attaching tries, .* over a DynamicCache: not today"
    r" \(it fails on token ids alone",
    OwnCache: "OwnCache keeps its state in a class of its own, dict, ",
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_model_that_fails_is_refused_with_its_own_words(kind: type[LlamaForCausalLM]) -> None:
    model = build("llama", 0, num_hidden_layers=1)
    model.__class__ = kind
    refuses(model, FAILING[kind])


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Broken, shallow("llama").config),
        (transformers.DistilBertForMaskedLM, transformers.DistilBertConfig(dim=24, n_layers=1)),
    ],
)
def test_a_refusal_names_a_version_of_transformers_that_no_test_knows(
    kind: Any, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class may have changed there, as when 5.24 renamed the cache."""
    model = kind(config).eval()
    monkeypatch.setattr(transformers, "__version__", "5.100.0.dev0")
    refuses(model, r"transformers 5\.100\.0\.dev0 is installed, .*install transformers 5\.24")
    monkeypatch.setattr(transformers, "__version__", model_checks.TESTED[1] + ".3")
    refuses(model, r"^((?!installed).)*$")


def test_the_versions_of_transformers_that_are_tested() -> None:
    """A refusal names the bounds that pyproject.toml and requirements.txt have."""
    oldest, newest = model_checks.TESTED
    assert f'"transformers>={oldest}",' in (REPOSITORY / "pyproject.toml").read_text()
    assert f"\ntransformers=={newest}." in (REPOSITORY / "requirements.txt").read_text()


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertLMHeadModel"])
def test_a_model_that_reads_in_both_directions(kind: str) -> None:
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = getattr(transformers, kind)(config).eval()
    refuses(model, rf"in {kind} a token's logits depend on .*is_decoder=True")


@pytest.mark.parametrize("kind", ["packed", "float8"])
def test_quantised_experts_are_refused_with_a_cure(kind: str) -> None:
    """In four bits, packed into a buffer of another name, or in eight."""
    model = shallow("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.forward = copy.deepcopy(experts).forward
    wide = experts._parameters.pop("gate_up_proj")
    if kind == "packed":
        experts.register_buffer("gate_up_proj_blocks", torch.zeros(2, 3, 4, dtype=torch.uint8))
    else:
        narrow = wide.data.to(torch.float8_e4m3fn)
        experts.gate_up_proj = nn.Parameter(narrow, requires_grad=False)
    cure = "load the model without quantisation"
    refuses(model, rf"mlp\.experts\.gate_up_proj.* is quantised .*{cure}")


def test_a_window_that_only_the_cache_keeps_is_refused() -> None:
    model = build("llama", 0, num_hidden_layers=2)
    model.config.sliding_window = 6
    model.config.layer_types = ["sliding_attention"] * 2
    refuses(model, "keeps its window by dropping tokens from its cache")


@pytest.mark.parametrize(
    ("family", "update"), [("olmo2", "direct"), ("olmo2", "exact"), ("glm4", "stable")]
)
def test_norms_that_end_a_block_in_fp64(family: str, update: str) -> None:
    """Their scale is fp64 too; the model itself normalises in fp32."""
    model, context, kept = shallow(family, 0, torch.float64), tokens(0, 2, 11), tokens(1, 2, 3)
    expected = model(torch.cat([context, kept], 1)).logits[:, context.shape[1] :]
    with ContextPatcher(model, update) as patcher:
        patch = patcher.compute(context, kept)
        replayed = patcher.forward(kept, patch)
    assert patch.logits.dtype == replayed.dtype == torch.float64
    assert metrics.linf(replayed, expected).max() <= 1e-6


# -- images

IMAGES = {"gemma3-vision": 4, "llava": 16}


def with_image(
    family: str, dtype: torch.dtype
) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    count, model = IMAGES[family], shallow(family, 0, dtype)
    context, kept = tokens(0, 2, count + 6) % 90 + 1, tokens(1, 2, 4) % 90 + 1
    context[:, 2 : 2 + count] = tiny_models.IMAGE_TOKEN
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    inputs = {"pixel_values": pixels}
    if family == "gemma3-vision":
        inputs["token_type_ids"] = (context == tiny_models.IMAGE_TOKEN).long()
    return model, context, kept, inputs


@torch.no_grad()
def image_logits(
    model: nn.Module, context: Tensor, kept: Tensor, inputs: dict[str, Tensor]
) -> Tensor:
    cached: Any = {cache_name(model): DynamicCache(config=model.config), "use_cache": True}
    model(input_ids=context, **cached, **inputs)
    positions = (context.shape[1] + torch.arange(kept.shape[1])).expand_as(kept)
    return model(input_ids=kept, position_ids=positions, **cached).logits


@pytest.mark.parametrize("family", IMAGES)
@pytest.mark.parametrize(
    ("update", "dtype"),
    [("direct", torch.float32), ("stable", torch.float32), ("exact", torch.bfloat16)],
)
def test_an_image_in_the_context_and_text_in_the_replay(
    family: str, update: str, dtype: torch.dtype
) -> None:
    model, context, kept, inputs = with_image(family, dtype)
    reference = image_logits(model, context, kept, inputs)
    other = image_logits(model, context, kept, inputs | {"pixel_values": -inputs["pixel_values"]})
    assert metrics.linf(other, reference).max() > 0.1  # it matters what is in the image
    with ContextPatcher(model, update) as patcher:
        patch = patcher.compute(context, kept, **inputs)
        error = metrics.linf(patcher.forward(kept, patch), reference).max()
    assert error <= (0 if update == "exact" else noise_limit(model))


def test_an_image_in_the_prefix_is_refused() -> None:
    """A replay runs the prefix alone: without the image it is another one."""
    model, context, kept, inputs = with_image("gemma3-vision", torch.float32)
    types = {"token_type_ids": F.pad(inputs["token_type_ids"], (0, 4))}
    with ContextPatcher(model, "stable") as patcher:
        whole = torch.cat([context, kept], 1)
        for arguments in (
            {"context_ids": whole, "keep_first": context.shape[1]},
            {"context_ids": whole, "absorbed": [(9, 12)]},
        ):
            message = "expected keep_first=0 with pixel_values, token_type_ids"
            with pytest.raises(ValueError, match=message):
                patcher.compute(kept_ids=kept, **arguments, **inputs | types)
        text = {"context_ids": kept, "keep_first": 1, "kept_ids": kept}
        works(patcher, text | {"pixel_values": None})
        works(patcher, {"context_ids": context, "kept_ids": kept, "keep_first": 0, **inputs})


# -- quantised weights


def quantise(model: nn.Module, kind: str) -> None:
    if kind == "packed":
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and child is not model.lm_head:
                    setattr(module, name, Int8Linear(child))
        return
    sys.path.append(str(REPOSITORY / "build" / "torchao"))  # where make test puts it
    torchao = pytest.importorskip("torchao.quantization", reason="needs torchao")
    if kind == "int8":
        config = torchao.Int8WeightOnlyConfig()
    else:
        config = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4)
    torchao.quantize_(model.model, config)


FP32, BF16 = torch.float32, torch.bfloat16
# any two of kind, family and dtype together
QUANTISED = [("packed", "llama", FP32), ("packed", "gemma3", BF16), ("int8", "gemma3", FP32)]
QUANTISED += [("int8", "llama", BF16), ("int4", "llama", FP32), ("int4", "gemma3", BF16)]


@pytest.mark.parametrize(("kind", "family", "dtype"), QUANTISED)
def test_quantised_readers_and_writers(
    kind: str, family: str, dtype: torch.dtype, tmp_path: Any
) -> None:
    """The patch lies on top, in fp32 (exact: fp64); the base is left as it is."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    if family == "gemma3":
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    model = tiny_models.build(family, 0, dtype, tie_word_embeddings=False, **sizes)
    quantise(model, kind)
    arguments = case("prefix")
    reference, limit = Stock(model).logits(arguments), noise_limit(model)
    for update in ("direct", "stable", "exact"):
        with ContextPatcher(model, update) as patcher:
            patch = patcher.compute(**arguments)
            patch.save(tmp_path / "patch.safetensors")
            loaded = ContextPatch.load(tmp_path / "patch.safetensors", model)
            logits = patcher.forward(patch.kept_ids, loaded)
        error = metrics.linf(logits, reference)[patch.kept_mask].max()
        if update == "exact":
            assert error == 0
        elif dtype == FP32:
            assert error <= limit


# -- generation

GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}


@pytest.mark.parametrize(
    ("family", "update"),
    [("qwen3_next", "stable"), ("jamba", "exact"), ("falcon_h1", "stable"), ("mamba", "exact")],
)
def test_padding_in_a_head_of_one_column_is_no_token(family: str, update: str) -> None:
    """Recurrent classes leave padding out in calls of several tokens only: a row that begins later
    has no state before it does.
    """
    model, ids = shallow(family), torch.tensor([[5, 6], [33, 7]])
    mask = torch.tensor([[True, True], [False, True]])
    with ContextPatcher(model, update) as patcher:
        limit = noise_limit(model)
        steps = patcher.generate(ids, context_mask=mask, **GREEDY)
        for step, logits in zip(steps, generated_logits(model, ids, mask, **GREEDY), strict=True):
            assert metrics.linf(step.logits, logits).max() <= limit
        context, kept = tokens(0, 2, 3), tokens(1, 2, 2)
        behind = {"context_mask": F.pad(mask[:, :1], (0, 3), value=True), "absorbed": [(1, 4)]}
        both = patcher.compute(torch.cat([ids[:, :1], context], 1), kept, **behind)
        alone = patcher.compute(context[1:], kept[1:])
    for layer, single in zip(both.layers, alone.layers, strict=True):
        for name, factor in single.items():
            assert metrics.linf(layer[name][1:].float(), factor.float()).max() <= limit, name


@pytest.mark.parametrize("family", ["gemma3n", "gemma4", "bloom", "falcon-rw"])
def test_fixed_caches_of_layers_that_share_keys_and_of_alibi(family: str) -> None:
    """Padded rows; a context of one token, for which no layer has keys yet; unused columns."""
    model, ids, mask = shallow(family), tokens(4, 2, 5), ragged(2, 5, side="left")
    limit = noise_limit(model)
    with ContextPatcher(model, "stable") as patcher:
        for part in (slice(0, 5), slice(4, 5)):
            mode = DecodeMode.TWO_STREAM
            state = prefilled(patcher, ids[:, part], mask[:, part], 12, mode, reserve=False)
            use_reusable_step(patcher.plans, state, compiled=False)
            token_ids = ids[:, -1]
            for logits in generated_logits(model, ids[:, part], mask[:, part], **GREEDY):
                step = decode_one_token(state, token_ids)
                assert metrics.linf(step.logits, logits).max() <= limit
                token_ids = step.logits.argmax(-1)
