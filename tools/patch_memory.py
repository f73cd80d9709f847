"""Measure how much memory the patch of one kept token takes, beside the KV cache of the context.

    build/python tools/patch_memory.py   # of the models of docs/data/patch-memory.json, again

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


def measure(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The bytes of one model's cache for one token, and of one token's patch by update."""
    config = AutoConfig.for_model(**settings, **_SHARED)
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
    record = json.loads(TARGET.read_text(encoding="utf-8"))
    rows = [measure(name, settings) for name, settings in record["configs"].items()]
    record |= {"dtype": "bfloat16", "torch": torch.__version__, "rows": rows}
    TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row, row["patch_bytes"]["exact"] / row["cache_bytes"])
