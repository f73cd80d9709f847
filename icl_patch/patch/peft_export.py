"""Low-rank changes of weights as a LoRA folder of PEFT, which vLLM loads too."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from icl_patch.patch.atomic_file import write_atomically

_PREFIX = "base_model.model."
# The values that vLLM allows for max_lora_rank.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def write_peft(
    folder: str | os.PathLike[str],
    factors: Mapping[str, tuple[Tensor, Tensor]],
    model: str,
    transposed: Collection[bool],
) -> int:
    """Write changes ``ΔW = Σ_r u_r v_rᵀ`` as ``lora_B = uᵀ`` and ``lora_A = v``, padded to one rank
    r, with ``lora_alpha = r``; each of the two files appears whole or not at all.

    Args:
        folder: is made.
        factors: path of the module in the model -> u (R, N) and v (R, K).
        model: the name of the base model.
        transposed: whether the modules store their weights as (in, out), as Conv1D does: one value
            if all agree.

    Returns:
        r.

    Raises:
        ValueError: a rank is too large, or some modules are transposed and others are not.
    """
    if len(set(transposed)) != 1:
        raise ValueError(
            "expected modules that all store their weights as (in, out), or none of them, got both:"
            " a LoRA has one fan_in_fan_out"
        )
    own = max(len(u) for u, _ in factors.values())
    rank = next((allowed for allowed in _RANKS if own <= allowed), None)
    if rank is None:
        raise ValueError(
            f"expected a rank of at most {_RANKS[-1]}, the most that vLLM loads, got {own}:"
            " truncate the patch first"
        )
    tensors = {}
    for path, (u, v) in factors.items():
        u, v = (torch.nn.functional.pad(x.float().cpu(), (0, 0, 0, rank - len(x))) for x in (u, v))
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
        "target_modules": sorted(factors),
    }
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    content = safetensors.torch.save(tensors, {"format": "pt"})
    write_atomically(target / "adapter_model.safetensors", [content])
    write_atomically(target / "adapter_config.json", [json.dumps(config, indent=2).encode()])
    return rank
