"""What the tests of static patches share: small examples and random patches."""

from typing import Any

import torch
from support.random_models import tokens
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icl_patch.static import Example, LowRank, StaticInfo, StaticPatch

IDS = tokens(11, 3, 6)
# fp32: the low-rank term is rounded where the merged weights are not, over some ten modules
CLOSE = 100 * torch.finfo(torch.float32).eps


def random_patch(model: Any, seed: int, rank: int = 3) -> StaticPatch:
    """Random changes of every matrix of the MLPs, a third of the weights' size."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for path, module in model.named_modules():
        if ".mlp." in path and isinstance(module, nn.Linear | Conv1D):
            shape = module.weight.shape
            n, k = shape if isinstance(module, nn.Linear) else shape[::-1]
            u, v = (torch.randn(rank, size, generator=generator) for size in (n, k))
            changes[path] = LowRank(u, v * 0.3 / (rank * k) ** 0.5 * n**-0.5)
    return StaticPatch(StaticInfo.of(model, None, "random"), changes)


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits


def random_examples(seed: int = 0, count: int = 8, answer: int = 3) -> list[Example]:
    """Random ids with given answers, behind one token and one context."""
    ids = tokens(seed, 2 * count + 1, 5).tolist()
    context, front = ids[-1], 1
    return [
        Example((front, *context, *question[:4]), (front, *question[:4]), tuple(given[:answer]))
        for question, given in zip(ids[:count], ids[count : 2 * count], strict=True)
    ]
