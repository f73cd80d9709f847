"""Small random models for the tests: non-trivial norms, several window patterns, no pretrained
weights anywhere.
"""

import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from icl_patch.evaluation import tiny_models
from icl_patch.models.forward import cache_name
from icl_patch.models.kv_cache import holds_states_alone
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.recording.sequences import assemble

VOCABULARY = tiny_models.VOCABULARY

_SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# First and last with a window of 6; head_dim ≠ hidden/heads.
_GEMMA3: dict[str, Any] = {
    "head_dim": 20,
    "query_pre_attn_scalar": 20,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "pad_token_id": 0,
}
# Each with the configuration's class, around what its norms are, and settings of its own.
FAMILIES: dict[str, tuple[Any, float, dict[str, Any]]] = {
    "gemma3": (Gemma3TextConfig, 0, _GEMMA3),
    "llama": (LlamaConfig, 1, {"tie_word_embeddings": False}),
    "llama-tied": (LlamaConfig, 1, {"tie_word_embeddings": True, "mlp_bias": True}),
}


def build(
    name: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    attention: str = "sdpa",
    **changes: object,
) -> PreTrainedModel:
    """A random model of a family of :data:`FAMILIES`, of three layers with grouped heads; its norms
    have scales far apart, some of Gemma's exactly 0.
    """
    config_class, norms_around, own = FAMILIES[name]
    torch.manual_seed(seed)
    config = config_class(**_SETTINGS | own | {"attn_implementation": attention} | changes)
    model: Any = LlamaForCausalLM(config) if norms_around else Gemma3ForCausalLM(config)
    for path, parameter in model.named_parameters():
        if "norm" in path:
            nn.init.normal_(parameter, norms_around, 0.5)
            if "post_feedforward" in path:
                parameter.data[torch.randperm(len(parameter))[:3]] = -1  # m = 1 + w = 0
        else:
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()


def two_layers(
    family: str, dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    """A Llama or a Gemma 3, whose two layers are one of each kind."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
    return build(family, 0, dtype, num_hidden_layers=2, **kinds, **changes)


# Of models whose first two layers are not of each kind that they have, or that say the kind of each
# layer in a setting of their own.
_SHARED_CACHE = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
_SHALLOW: dict[str, dict] = {
    "bloom": {"n_layer": 2},
    "bloom-post-norm": {"n_layer": 2},
    "gpt_bigcode": {"n_layer": 2},
    "xglm": {"num_layers": 2},
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "gemma3n": {
        **_SHARED_CACHE,
        "intermediate_size": [48] * 3,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0],
        "altup_num_inputs": 3,  # a list of two matrices, shorter than that of the blocks
    },
    "gemma4": _SHARED_CACHE,
    "gemma4-moe": _SHARED_CACHE,
    "llama4": {"moe_layers": [0], "no_rope_layers": [1, 0]},
}


def shallow(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of the zoo with two layers; with three where the first two are not of each kind that
    the model has.
    """
    settings = tiny_models.SUPPORTED[name].settings
    types = settings.get("text_config", settings).get("layer_types", ())
    changes: dict = {"layer_types": types[:2]} if types else {}
    assert set(types[:2]) == set(types)
    changes |= {"num_hidden_layers": 2} | _SHALLOW.get(name, {})
    return tiny_models.build(name, seed, dtype, **changes)


def randomised(
    kind: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0
) -> PreTrainedModel:
    """A model of a class that the zoo does not have, with the zoo's random weights."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        tiny_models.randomise(model)
    return model


def tokens(seed: int, rows: int, columns: int) -> torch.Tensor:
    """Random ids, never the padding id 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, columns), generator=generator)


def ragged(rows: int, columns: int, *, side: str) -> torch.Tensor:
    """A mask whose rows have ever fewer tokens, at least one: left- or right-padded."""
    lengths = torch.tensor([max(1, columns - 2 * row) for row in range(rows)]).unsqueeze(1)
    place = torch.arange(columns).flip(0) if side == "left" else torch.arange(columns)
    return place.unsqueeze(0) < lengths


def case(name: str, seed: int = 0) -> dict:
    """Arguments of ``ContextPatcher.compute`` for three ragged rows: single tokens, spans,
    prefixes, several absorbed spans.
    """
    rows, context_ids = 3, tokens(seed, 3, 11)
    arguments = {"context_ids": context_ids, "context_mask": ragged(rows, 11, side="left")}
    if name == "single":
        return arguments | {"kept_ids": tokens(seed + 1, rows, 1)}
    arguments["kept_ids"] = tokens(seed + 1, rows, 7)
    arguments["kept_mask"] = ragged(rows, 7, side="right")
    if name == "span":
        return arguments
    if name == "prefix":
        behind = {"context_ids": torch.cat([tokens(seed + 2, rows, 5), context_ids], 1)}
        behind["context_mask"] = ragged(rows, 16, side="left")
        return arguments | behind | {"keep_first": 5}
    if name == "spans":
        mask = torch.ones(rows, 11, dtype=torch.bool)
        mask[1, :2] = False
        return arguments | {"context_mask": mask, "absorbed": [(2, 5), (8, 10)]}
    raise ValueError(name)


CASES = ("single", "span", "prefix", "spans")


def case_of(family: str, name: str, seed: int = 0) -> dict:
    """:func:`case`, without padding on the left for RecurrentGemma, whose states see it."""
    made = case(name, seed)
    if family == "recurrent_gemma":
        made.pop("context_mask")
    return made


EXPERTS = [
    name
    for name, entry in tiny_models.SUPPORTED.items()
    if "num_experts" in str(entry.settings) or "_experts" in str(entry.settings)
]


# Each has a form of block that another family has too: they run with the stress tests.
SAME_FORM = ("glm4", "olmo3", "mistral", "qwen2", "qwen3", "smollm3", "stablelm", "llama-bias")
SAME_FORM += ("cohere", "codegen", "phi", "falcon-7b", "starcoder2", "xglm", "gpt_bigcode")
SAME_FORM += ("mixtral", "olmoe", "cohere2_moe", "llava")


def of_the_zoo(names: Iterable[str], stress: Sequence[str] = SAME_FORM) -> list[Any]:
    """Families as pytest's parameters, some of them marked."""
    marks = [pytest.mark.stress]
    return [pytest.param(name, marks=marks if name in stress else []) for name in names]


class Stock:
    """The model with its context and without this package's help: called as its class says, the
    context first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)  # some classes keep a state in their modules
        self.recurrent = is_recurrent(model)
        self.names = inspect.signature(type(model).forward).parameters

    def call(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        if holds_states_alone(cache):
            mask = mask[:, -ids.shape[1] :]
        inputs = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": True}
        if "position_ids" in self.names:
            inputs["position_ids"] = positions
        return self.model(**inputs, **{cache_name(self.model): cache}).logits

    @torch.no_grad()
    def logits(self, arguments: dict) -> Tensor:
        """Of the kept tokens; a recurrent model takes the tokens after its context one by one."""
        sequences, cache = assemble(**arguments), DynamicCache(config=self.model.config)
        width, total = sequences.head, sequences.mask.shape[1]
        ids, positions = sequences.ids, sequences.positions
        ends = [width, *(range(width + 1, total + 1) if self.recurrent else [total])]
        made = []
        for start, end in zip([0, *ends], ends, strict=False):
            part = (ids[:, start:end], sequences.mask[:, :end], positions[:, start:end])
            made.append(self.call(*part, cache))
        return torch.cat(made[1:], 1)[:, sequences.kept_columns]


def longrope(length: int) -> dict[str, Any]:
    """Rotary parameters with other factors beyond ``length`` tokens, for heads of width 8."""
    return {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 4.0, 7.0, 10.0],
        "factor": 8.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": length,
    }
