"""A LoRA folder of PEFT as a static patch."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from icl_patch.errors import PatchFormatError
from icl_patch.models.language_model import family_of
from icl_patch.patch.peft_export import CONFIG, PREFIX, WEIGHTS
from icl_patch.patch.serialization import check_finite
from icl_patch.static.low_rank import LowRank
from icl_patch.static.static_patch import StaticInfo, StaticPatch

# Settings of a LoRA under which it is more than a low-rank change of matrices.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    # the others, as PiSSA, change the weights of the model too when they are loaded
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}


def from_peft(folder: str | os.PathLike[str], model: PreTrainedModel) -> StaticPatch:
    """The static patch that a LoRA stands for: ``ΔW = (lora_alpha / r) lora_B lora_A``.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        model: the model that the LoRA is for. The folder does not name its weights, so only the
            shapes are checked.

    Raises:
        PatchFormatError: a file is no LoRA, or not finite; it changes more than matrices (DoRA,
            biases, whole modules; PiSSA and its like, which change the model when they are loaded,
            unless PEFT has converted them); or it fits no matrix of the model.
        OSError: a file cannot be read.
    """
    config = _read_config(Path(folder) / CONFIG)
    try:
        tensors = safetensors.torch.load((Path(folder) / WEIGHTS).read_bytes())
    except SafetensorError as error:
        raise PatchFormatError(f"expected a safetensors file in {folder}: {error}") from error
    check_finite(tensors)
    changes = {}
    pattern = re.compile(re.escape(PREFIX) + r"(.+)\.lora_A\.weight")
    for name in list(tensors):
        found = pattern.fullmatch(name)
        if found is None:
            continue
        path = found[1]
        v, b = tensors.pop(name), tensors.pop(f"{PREFIX}{path}.lora_B.weight", None)
        if b is None or b.dim() != 2 or v.dim() != 2 or b.shape[1] != len(v):
            raise PatchFormatError(f"expected lora_A (r, K) and lora_B (N, r) of {path}")
        factor = _scale(config, path, len(v))
        changes[path] = LowRank(factor * b.T.float().contiguous(), v.float())
    if tensors or not changes:
        raise PatchFormatError(
            f"expected only lora_A and lora_B of linear modules in {folder}, got"
            f" {sorted(tensors)!s:.80}"
        )
    info = StaticInfo(
        str(config.get("base_model_name_or_path")), None, None, family_of(model), "peft"
    )
    patch = StaticPatch(info, changes)
    patch.check_model(model)
    return patch


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PatchFormatError(f"expected JSON in {file}: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise PatchFormatError(f"expected a LoRA's configuration in {file}")
    numbers = [config.get(name) for name in ("r", "lora_alpha")]
    patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(pattern, dict) for pattern in patterns) or not all(
        isinstance(x, (int, float)) and 0 < x < math.inf
        for x in (*numbers, *(x for pattern in patterns for x in pattern.values()))
    ):
        raise PatchFormatError(
            f"expected positive numbers r and lora_alpha, and patterns of them, in {file}, got"
            f" {numbers} and {patterns!s:.80}"
        )
    for name, allowed in _REFUSED.items():
        if config.get(name) not in allowed:
            raise PatchFormatError(
                f"expected a LoRA with {name}={allowed[0]!r}, got {config[name]!r:.80}: a static"
                " patch is a low-rank change of matrices and nothing else"
            )
    return config


def _scale(config: dict[str, Any], path: str, rank: int) -> float:
    """lora_alpha / r, or / √r for rank-stabilised LoRA."""

    def pattern(name: str, default: float) -> float:
        for key, value in (config.get(name) or {}).items():
            if re.match(rf"(.*\.)?({key})$", path):
                return float(value)
        return default

    alpha = pattern("alpha_pattern", float(config["lora_alpha"]))
    r = pattern("rank_pattern", float(config["r"]))
    if r != rank:
        raise PatchFormatError(f"expected lora_A of rank {r:.0f} for {path}, got {rank}")
    return alpha / (r**0.5 if config.get("use_rslora") else r)
