"""Small random models of every block form, for the tests and the papers' Table 1; the forms are in
``tiny_models.json``.

Nothing is downloaded. Norms, biases and routers are far from their initial values.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
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
IMAGE_TOKEN = 96


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
    writer: str = "none"
    lemmas: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    images: bool = False


def _read(kind: str) -> dict[str, TinyModel]:
    entries = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))[kind]
    return {name: TinyModel(**entry) for name, entry in entries.items()}


SUPPORTED = _read("supported")
REFUSED = _read("refused")
"""Refused block forms; ``note`` is the reason."""


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
            nn.init.normal_(parameter, 0, min(parameter.shape[-2:]) ** -0.5)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(0.1 * torch.randn_like(buffer))
        if "layer_scalar" in name:
            buffer.copy_(0.5 + torch.rand_like(buffer))
