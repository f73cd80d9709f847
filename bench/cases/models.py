"""The models that benchmarks run on: random ones with the shapes of real ones, or saved ones."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from icl_patch.models.language_model import vocabulary


@dataclass(frozen=True)
class RandomModel:
    """A model's name and shape; embedding and head share one matrix.

    Attributes:
        window: of sliding attention, in five layers of six.
        experts: of a mixture's layer; each token takes ``chosen`` of them, ``inner`` wide.
    """

    name: str
    kind: type[PreTrainedConfig]
    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    head: int
    vocabulary: int
    window: int | None = None
    experts: int = 0
    chosen: int = 0

    def config(self) -> PreTrainedConfig:
        """The configuration of transformers."""
        settings = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head,
            "max_position_embeddings": 16384,
            "tie_word_embeddings": True,
        }
        if self.kind is Gemma3TextConfig:
            settings["query_pre_attn_scalar"] = self.head
        if self.window is not None:
            settings["sliding_window"] = self.window
        if self.experts:
            settings["moe_intermediate_size"] = self.inner
            settings["num_experts"] = self.experts
            settings["num_experts_per_tok"] = self.chosen
        return self.kind.from_dict(settings)

    def build(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """The model with seeded weights, as large as trained ones: a context changes the logits."""
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(self.config(), dtype=dtype)
            for path, parameter in model.named_parameters():
                if "norm" in path:
                    nn.init.normal_(parameter, 0.0 if self.kind is Gemma3TextConfig else 1.0, 0.1)
                elif "embed" not in path:
                    nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
        return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class SavedModel:
    """A model in a folder, or on the hub."""

    folder: str

    def __post_init__(self) -> None:
        AutoConfig.from_pretrained(self.folder)  # where there is none, nothing is measured

    @property
    def name(self) -> str:
        """The folder's."""
        return Path(self.folder).resolve().name

    def build(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """The model, with its weights in ``dtype``."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype)
        built: PreTrainedModel = model.to(device).eval().requires_grad_(False)
        return built


def random_ids(model: PreTrainedModel, rows: int, tokens: int) -> Tensor:
    """Seeded ids (rows, tokens), below 1,000 or the size of the vocabulary."""
    rng, most = torch.Generator().manual_seed(tokens), min(1000, vocabulary(model))
    return torch.randint(0, most, (rows, tokens), generator=rng).to(model.device)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Another model on the same weights, for another patcher."""
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, weights)


CPU_SHAPE = RandomModel("0.22B", Qwen3Config, 1024, 3072, 12, 16, 8, 128, 32000)
CPU_MIXTURE = RandomModel(
    "0.25B-mixture", Qwen3MoeConfig, 768, 512, 6, 12, 4, 64, 8192, experts=32, chosen=4
)
GPU_SHAPES = (
    RandomModel("SmolLM2-135M", LlamaConfig, 576, 1536, 30, 9, 3, 64, 49152),
    RandomModel("Qwen3-0.6B", Qwen3Config, 1024, 3072, 28, 16, 8, 128, 151936),
    RandomModel("Gemma-3-1B", Gemma3TextConfig, 1152, 6912, 26, 4, 1, 256, 262144, 512),
    RandomModel("Llama-3-8B", LlamaConfig, 4096, 14336, 32, 32, 8, 128, 128256),
    RandomModel("Llama-3.2-1B", LlamaConfig, 2048, 8192, 16, 32, 8, 64, 128256),
    RandomModel("Gemma-3-4B", Gemma3TextConfig, 2560, 10240, 34, 8, 4, 256, 262208, 1024),
)
GPU_MIXTURE = RandomModel(
    "OLMoE-1B-7B", Qwen3MoeConfig, 2048, 1024, 16, 16, 16, 128, 50304, experts=64, chosen=8
)
