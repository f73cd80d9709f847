"""Low-rank changes of weights as a LoRA folder of PEFT, which vLLM loads too."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch.nn.functional as F

from icl_patch.atomic_file import write_atomically
from icl_patch.patch.low_rank import LowRank

_PREFIX = "base_model.model."
# The values that vLLM allows for max_lora_rank.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def write_peft(
    folder: str | os.PathLike[str],
    changes: Mapping[str, LowRank],
    model: str,
    transposed: set[bool],
) -> int:
    """Write changes ``ΔW = Σ_r u_r v_rᵀ`` as ``lora_B = uᵀ`` and ``lora_A = v``, padded to one rank
    r, with ``lora_alpha = r``; each of the two files appears whole or not at all.

    Args:
        folder: created if it does not exist.
        changes: path of the module in the model -> its change.
        model: the name of the base model.
        transposed: whether the modules store their weights as (in, out), as Conv1D does: one value
            if all agree.

    Returns:
        r.

    Raises:
        ValueError: a rank is too large, or some modules are transposed and others are not.
    """
    if len(transposed) != 1:
        raise ValueError(
            "expected modules that all store their weights as (in, out), or none of them, got both:"
            " a LoRA has one fan_in_fan_out"
        )
    own = max(change.rank for change in changes.values())
    rank = next((allowed for allowed in _RANKS if own <= allowed), None)
    if rank is None:
        raise ValueError(
            f"expected a rank of at most {_RANKS[-1]}, the most that vLLM loads, got {own}:"
            " truncate the patch first"
        )
    tensors = {}
    for path, change in changes.items():
        padding = (0, 0, 0, rank - change.rank)
        u, v = (F.pad(x.float().cpu(), padding) for x in (change.u, change.v))
        tensors[f"{_PREFIX}{path}.lora_A.weight"] = v.contiguous()
        tensors[f"{_PREFIX}{path}.lora_B.weight"] = u.T.contiguous()
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": next(iter(transposed)),
        "inference_mode": True,
        "target_modules": sorted(changes),
    }
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    content = safetensors.torch.save(tensors, {"format": "pt"})
    write_atomically(target / "adapter_model.safetensors", [content])
    write_atomically(target / "adapter_config.json", [json.dumps(config, indent=2).encode()])
    return rank
