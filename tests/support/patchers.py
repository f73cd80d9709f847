"""What the tests of the patcher share: the parametrizations, and the question whether a patcher
still works.
"""

import copy
from typing import Any

import pytest
import torch
from support.models import case, tokens
from support.numeric import is_noise
from torch import Tensor, nn

from icl_patch import ContextPatcher, metrics

UPDATES = ("direct", "stable", "exact")

families = pytest.mark.parametrize("family", ("gemma3", "llama"))
updates = pytest.mark.parametrize("update", UPDATES)


def plain_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(tokens(90, 2, 9)).logits


def works(patcher: ContextPatcher, inputs: dict | None = None) -> None:
    """The patcher still computes patches, and they still replay: bit for bit if exact, else but for
    the model's noise.
    """
    patch = patcher.compute(**inputs or case("prefix"))
    logits = patcher.forward(patch.kept_ids, patch)
    off = metrics.linf(logits, patch.logits)[patch.kept_mask].max()
    assert off == 0 if patcher.update == "exact" else is_noise(off, patcher, patch)
