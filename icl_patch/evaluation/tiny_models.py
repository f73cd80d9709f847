"""Small random models of every block form, for the architecture suite and the tests.

Nothing is downloaded. Norms, biases and routers are far from their initial values.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}
IMAGE_TOKEN = 96
_WINDOWS: dict[str, Any] = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@dataclass(frozen=True)
class TinyModel:
    """A block form as a small model.

    Attributes:
        config: the name of its configuration class in transformers, without ``Config``.
        writer: the parameter that absorbs delta.
        lemmas: the statements of Goldwaser et al. (2025) that the form uses.
        settings: the configuration's arguments.
        note: the form's peculiarity, or the reason it is refused.
        images: the model takes images.
    """

    config: str
    writer: str
    lemmas: str
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    images: bool = False


SUPPORTED: dict[str, TinyModel] = {
    # m ⊙ Norm(W h)
    "gemma2": TinyModel(
        "Gemma2",
        "scale",
        "7, 10, B",
        {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOWS, "attn_implementation": "eager"},
    ),
    "gemma3": TinyModel(
        "Gemma3Text", "scale", "7, 10, B", {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOWS}
    ),
    "glm4": TinyModel("Glm4", "scale", "7, 10, B", {"head_dim": 8}),
    "olmo2": TinyModel("Olmo2", "scale", "6, 10, B", note="no norm before the MLP"),
    "olmo3": TinyModel("Olmo3", "scale", "6, 10, B", _WINDOWS, note="no norm before the MLP"),
    # W h
    "llama": TinyModel("Llama", "weight", "7, 9"),
    "mistral": TinyModel("Mistral", "weight", "7, 9", {"sliding_window": 6}),
    "qwen2": TinyModel("Qwen2", "weight", "7, 9"),
    "qwen3": TinyModel("Qwen3", "weight", "7, 9", {"head_dim": 8}),
    "phi3": TinyModel("Phi3", "weight", "7, 9", note="gate and up in one matrix"),
    "granite": TinyModel(
        "Granite",
        "weight",
        "7, 9",
        {"residual_multiplier": 0.22, "attention_multiplier": 0.3},
        "delta / residual_multiplier",
    ),
    "cohere": TinyModel("Cohere", "weight", "12, 9", {"logit_scale": 0.3}, "parallel"),
    "cohere2": TinyModel("Cohere2", "weight", "12, 9", _WINDOWS, "parallel"),
    "smollm3": TinyModel("SmolLM3", "weight", "7, 9"),
    "stablelm": TinyModel("StableLm", "weight", "7, 9"),
    "stablelm-parallel": TinyModel(
        "StableLm", "weight", "12, 9", {"use_parallel_residual": True}, "parallel"
    ),
    # W h + b
    "llama-bias": TinyModel(
        "Llama", "bias", "7, 8", {"mlp_bias": True, "tie_word_embeddings": True}
    ),
    "gpt2": TinyModel("GPT2", "bias", "7, 8", note="Conv1D"),
    "gpt_neox": TinyModel("GPTNeoX", "bias", "12, 8", note="parallel"),
    "gpt_neox-sequential": TinyModel("GPTNeoX", "bias", "7, 8", {"use_parallel_residual": False}),
    "gptj": TinyModel("GPTJ", "bias", "12, 8", {"rotary_dim": 4}, "parallel, one norm"),
    "codegen": TinyModel(
        "CodeGen",
        "bias",
        "12, 8",
        {"n_ctx": 128, "n_positions": 128, "rotary_dim": 4},
        "parallel, one norm",
    ),
    "phi": TinyModel("Phi", "bias", "12, 8", {"num_key_value_heads": 4}, "parallel, one norm"),
    "opt": TinyModel("OPT", "bias", "7, 8", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt-post-norm": TinyModel(
        "OPT",
        "bias",
        "6, 8",
        {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        "closed before the last norm",
    ),
    "bloom": TinyModel("Bloom", "bias", "7, 8", {"n_layer": 4, "n_head": 4}, "alibi"),
    "bloom-post-norm": TinyModel(
        "Bloom",
        "bias",
        "7, 8",
        {"n_layer": 4, "n_head": 4, "apply_residual_connection_post_layernorm": True},
        "the residual is the norm's",
    ),
    "falcon": TinyModel(
        "Falcon",
        "weight",
        "12, 9",
        {"num_kv_heads": 2, "new_decoder_architecture": True},
        "parallel, two norms",
    ),
    "falcon-7b": TinyModel(
        "Falcon", "bias", "12, 8", {"bias": True}, "parallel, one norm, one key head"
    ),
    "falcon-rw": TinyModel(
        "Falcon",
        "bias",
        "7, 8",
        {"bias": True, "alibi": True, "parallel_attn": False, "multi_query": False},
        "sequential, alibi",
    ),
    "starcoder2": TinyModel("Starcoder2", "bias", "7, 8", {"sliding_window": 6}),
    "gpt_bigcode": TinyModel(
        "GPTBigCode", "bias", "7, 8", {"n_embd": 32, "n_layer": 4, "n_head": 4}
    ),
    "xglm": TinyModel(
        "XGLM", "bias", "7, 8", {"num_layers": 4, "attention_heads": 4, "ffn_dim": 48}
    ),
    # Σ s_j W_j h_j
    "mixtral": TinyModel(
        "Mixtral", "experts", "7, 11", {"num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "qwen2_moe": TinyModel(
        "Qwen2Moe",
        "experts",
        "7, 11",
        {**_EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        "gated shared expert",
    ),
    "qwen3_moe": TinyModel(
        "Qwen3Moe",
        "experts",
        "7, 11",
        {**_EXPERTS, "head_dim": 8, "mlp_only_layers": [2]},
        "dense layers between",
    ),
    "deepseek_v3": TinyModel(
        "DeepseekV3",
        "weight",
        "7, 9",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        "the shared experts write",
    ),
    "gpt_oss": TinyModel(
        "GptOss",
        "experts",
        "7, 8, 11",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            **_WINDOWS,
            "attn_implementation": "eager",
        },
        "the active experts' biases write; sinks",
    ),
    "granitemoe": TinyModel(
        "GraniteMoe",
        "experts",
        "7, 11",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "residual_multiplier": 0.22},
        "delta / residual_multiplier",
    ),
    "cohere2_moe": TinyModel(
        "Cohere2Moe", "experts", "12, 11", {**_EXPERTS, "head_dim": 8, **_WINDOWS}, "parallel"
    ),
    "qwen3_next": TinyModel(
        "Qwen3Next",
        "experts",
        "7, 11",
        {
            **_EXPERTS,
            "head_dim": 8,
            "shared_expert_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "linear attention; gated shared expert",
    ),
    "olmoe": TinyModel("Olmoe", "experts", "7, 11", {"num_experts": 8, "num_experts_per_tok": 2}),
    # blocks that go on from their sum
    "gemma3n": TinyModel(
        "Gemma3nText",
        "scale",
        "7, 10, B",
        {
            "head_dim": 8,
            **_WINDOWS,
            "intermediate_size": [48] * 4,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 1,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        },
        "AltUp, Laurel: delta is that of (x + attn + laurel)/√2",
    ),
    "gemma4": TinyModel(
        "Gemma4Text",
        "scale",
        "7, 10, B",
        {
            "head_dim": 8,
            **_WINDOWS,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 1,
            "per_layer_config": {},
        },
        "per-layer inputs, layer scalar",
    ),
    "gemma4-moe": TinyModel(
        "Gemma4Text",
        "scale",
        "7, 10, 11, B",
        {
            "head_dim": 8,
            **_WINDOWS,
            "per_layer_config": {},
            "num_kv_shared_layers": 1,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
        "experts beside the MLP, three norms of the residual stream, norms inside a norm",
    ),
    "llama4": TinyModel(
        "Llama4Text",
        "weight",
        "7, 9",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 2, 3],
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 0, 1, 0],
        },
        "the scores multiply the experts' input; the shared expert writes; chunked attention",
    ),
    # recurrent context layers
    "recurrent_gemma": TinyModel(
        "RecurrentGemma",
        "bias",
        "7, 8",
        {
            "lru_width": 32,
            "attention_window_size": 16,
            "block_types": ["recurrent", "attention"],
            "head_dim": 8,
        },
        "RG-LRU and local attention",
    ),
    "mamba": TinyModel(
        "Mamba",
        "weight",
        "9",
        {"state_size": 4, "time_step_rank": 4},
        "no MLP: the mixer's output matrix",
    ),
    "falcon_h1": TinyModel(
        "FalconH1",
        "weight",
        "7, 9",
        {
            "head_dim": 8,
            "mamba_chunk_size": 32,  # of 256 by default, however few tokens there are
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
        },
        "attention and SSM side by side",
    ),
    "jamba": TinyModel(
        "Jamba",
        "weight",
        "7, 9, 11",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        "attention or SSM; dense and sparse layers",
    ),
    # images
    "gemma3-vision": TinyModel(
        "Gemma3",
        "scale",
        "7, 10, B",
        {
            "text_config": {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOWS},
            "vision_config": {**_VISION, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_id": IMAGE_TOKEN,
            "boi_token_index": 94,
            "eoi_token_index": 95,
        },
        "vision tower; image tokens attend both ways",
        images=True,
    ),
    "llava": TinyModel(
        "Llava",
        "weight",
        "7, 9",
        {
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
            "image_token_id": IMAGE_TOKEN,
            "vision_feature_select_strategy": "default",
            "image_seq_length": 16,
        },
        "vision tower before a Llama",
        images=True,
    ),
}


# Refused block forms; ``note`` is the reason.
REFUSED: dict[str, TinyModel] = {
    "deepseek_v4": TinyModel(
        "DeepseekV4",
        "none",
        "",
        {
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "q_lora_rank": 16,
            "num_experts_per_tok": 2,
            "n_routed_experts": 8,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
            "mlp_layer_types": ["moe"] * 4,
            "hc_mult": 2,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 8,
            "sliding_window": 8,
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 1,
        },
        "hyper-connections: attention and MLP write into several residual streams, each in its own"
        " proportions",
    ),
    "rwkv": TinyModel(
        "Rwkv",
        "none",
        "",
        {"attention_hidden_size": 32},
        "the channel mix reads the token before too: the context enters the MLP itself",
    ),
    "openai-gpt": TinyModel(
        "OpenAIGPT",
        "none",
        "",
        {"n_embd": 32, "n_layer": 4, "n_head": 4},
        "has no cache, and a patch starts from one",
    ),
}


def build(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A random model of :data:`SUPPORTED` or :data:`REFUSED`, in eval mode.

    Raises:
        KeyError: there is no model of this name.
    """
    tiny = SUPPORTED.get(name) or REFUSED[name]
    config_class = getattr(transformers, f"{tiny.config}Config")
    common = {
        name: value
        for name, value in _COMMON.items()
        if name != "num_key_value_heads" or hasattr(config_class, name)
    }
    settings = {**common, **tiny.settings, **changes}
    if tiny.images:
        settings = {
            **tiny.settings,
            "text_config": {**_COMMON, **tiny.settings["text_config"], **changes},
            "tie_word_embeddings": False,
        }
    attention = settings.pop("attn_implementation", "sdpa")
    config = config_class(**settings)
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if tiny.images else AutoModelForCausalLM
    return randomised(with_attention(auto, config, attention), dtype)


def with_attention(auto: Any, config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """A model of a configuration with this attention, or with ``"eager"`` if its class lacks it.

    auto: ``AutoModelForCausalLM`` or another of transformers' automatic classes.
    """
    model: PreTrainedModel
    try:
        model = auto.from_config(config, attn_implementation=attention)
    except ValueError:  # the class does not have it
        model = auto.from_config(config, attn_implementation="eager")
    return model


def randomised(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with :func:`randomise`'s parameters in a dtype, in eval mode."""
    randomise(model)
    untyped: Any = model  # transformers' `to` has another signature
    return untyped.to(dtype).eval()


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Draw every parameter: matrices at unit gain, norms and biases far from one and zero."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(0.4 * torch.randn_like(parameter))
        elif (
            id(parameter) in embeddings
            or parameter.dim() == 2
            or any(part in name for part in ("proj", "_linear"))
        ):
            nn.init.normal_(parameter, 0, _fan_in(parameter) ** -0.5)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(0.1 * torch.randn_like(buffer))
        if "layer_scalar" in name:
            buffer.copy_(0.5 + torch.rand_like(buffer))


def _fan_in(parameter: Tensor) -> int:
    return min(parameter.shape[-2:])
