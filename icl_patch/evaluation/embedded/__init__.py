"""A small Gemma 3 that ships with the package, and the tasks it was trained on.

The tasks cannot be solved without the context, so the answers show whether a patch carries it.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from icl_patch.evaluation.embedded.tasks import CHANCE, KINDS, Prompt, held_out_prompts

__all__ = ["CHANCE", "KINDS", "MODEL_DIR", "Prompt", "held_out_prompts", "load"]

MODEL_DIR = Path(__file__).parent / "model"


def load(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded model, in eval mode, and its tokenizer (one token a byte)."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype)
    model.config.name_or_path = "embedded"  # instead of the installed path
    return model.to(device).eval(), AutoTokenizer.from_pretrained(MODEL_DIR)
