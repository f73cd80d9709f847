"""Measure how much memory the patch of one kept token takes, beside the KV cache of the context.

    build/python tools/patch_memory.py      # writes docs/data/patch-memory.json, in a minute

One block of each model is built with its true widths and random bf16 weights, a patch of one token
is computed, and its bytes are counted: every block of a model has factors of the same sizes.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from icl_patch import ContextPatcher

TARGET = Path(__file__).parents[1] / "docs" / "data" / "patch-memory.json"
UPDATES = ("stable", "exact")
_SHARED = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT-2": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12},
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "Gemma-3-1B": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 26,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
    },
}
"""Widths of published models, by the names of their classes' configurations."""


def measure(name: str) -> dict[str, Any]:
    """The bytes of one model's cache for one token, and of one token's patch by update."""
    config = AutoConfig.for_model(**CONFIGS[name], **_SHARED)
    layers = config.num_hidden_layers
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = model(torch.tensor([[5]]), use_cache=True).past_key_values.layers[0]
    patches = {}
    for update in UPDATES:
        with ContextPatcher(model, update) as patcher:
            patch = patcher.compute(torch.tensor([[5, 6, 7]]), torch.tensor([[8]]))
        shared = sum(x.nbytes for layer in patch.layers for x in layer.values() if x.dim() == 1)
        patches[update] = layers * (patch.nbytes - shared)  # a norm's own scale is the model's
    cached = layers * (cache.keys.nbytes + cache.values.nbytes)
    return {"model": name, "layers": layers, "cache_bytes": cached, "patch_bytes": patches}


if __name__ == "__main__":
    rows = [measure(name) for name in CONFIGS]
    TARGET.parent.mkdir(exist_ok=True)
    record = {"dtype": "bfloat16", "torch": torch.__version__, "rows": rows, "configs": CONFIGS}
    TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row, row["patch_bytes"]["exact"] / row["cache_bytes"])
