"""Small random models of every causal language model type of transformers, and variants."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from icl_patch.evaluation.tiny_models import randomised, with_attention

SETTINGS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def jobs() -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Every type, then every variant: its name, and its changes of the type's settings."""
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        yield {"type": model_type, "variant": ""}, {}
    for variant, entry in SETTINGS["variants"].items():
        changes = {k: v for k, v in entry.items() if k != "types"}
        for model_type in entry["types"]:
            yield {"type": model_type, "variant": variant}, changes


def shrink(config_class: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a small configuration: sizes by the names of the fields, then changes."""
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        for pattern, size in SETTINGS["sizes"]:
            if re.fullmatch(pattern, field.name):
                default = field.default
                if isinstance(default, int) and not isinstance(default, bool):
                    settings[field.name] = min(default, size)
                elif re.fullmatch("num_(key_value|kv)_heads|.*_token_id", field.name):
                    settings[field.name] = size
                break
        if field.name == "is_decoder":
            settings[field.name] = True
    for name, part in parts_of(config_class).items():
        settings[name] = shrink(part, {})
    for name, value in changes.items():
        into = isinstance(value, dict) and "+" in value  # a part that is shrunk first
        settings[name] = {**settings[name], **value["+"]} if into else value
    return settings


def parts_of(config_class: Any) -> dict[str, Any]:
    """The configuration classes within one: of its language model, its vision tower and others."""
    parts = dict(getattr(config_class, "sub_configs", None) or {})
    for name, spec in getattr(config_class, "sub_configs_defaults", {}).items():
        model_type = getattr(spec, "model_type", "")
        known = model_type in CONFIG_MAPPING  # its `get` does not find what it loads late
        parts[name] = CONFIG_MAPPING[model_type] if known else spec
    return {name: part for name, part in parts.items() if dataclasses.is_dataclass(part)}


def build(model_type: str, changes: dict[str, Any]) -> PreTrainedModel:
    """A small random model of a type in fp32, in eval mode."""
    config_class: Any = CONFIG_MAPPING[model_type]
    settings = {**SETTINGS["types"].get(model_type, {}), **changes}
    attention = settings.pop("attn_implementation", "sdpa")
    part, late = settings.pop("part", None), settings.pop("late", {})
    config = config_class(**shrink(config_class, settings))
    for name, value in late.items():  # what its configuration's own checks do not let it have
        setattr(config.text_config, name, value)
    torch.manual_seed(0)
    if part is not None:  # transformers' own mapping does not build this class
        language_model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        model = language_model(getattr(config, part))
        return randomised(model, torch.float32)
    return randomised(with_attention(AutoModelForCausalLM, config, attention), torch.float32)
