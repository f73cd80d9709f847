"""Static patches on the linear regression of Dherin et al.: a block that reads pairs (x, ω·x) as
its context and predicts ω·x for a query.

The patch is one change of W for all queries. A static patch is fitted on N queries of one context
and measured on 200 others. The error is the mean of (prediction − prediction with the context)²,
divided by the mean square of the prediction with the context.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icl_patch.static.block_parts import weight_of
from icl_patch.static.ridge import choose_ridge, moments_of, sums

sys.path.append(str(Path(__file__).parents[1] / "papers"))
from regression_models import Attention, Block, Training, sample, train

METHODS = ("no context", "mean of u vᵀ (Dherin)", "ridge", "patch for each token")
CONTEXTS, LENGTH, UNSEEN, FOLDS = 20, 50, 200, 4


@cache
def trained(steps: int = 3000) -> Block:
    """The transformer of their §4.1 (seconds)."""
    torch.manual_seed(0)
    block = Block(Attention())
    with torch.enable_grad():
        train(block, Training(steps=steps, every=steps, length=LENGTH), 0, lambda *_: None)
    return block.eval()


def change(block: Block, method: str, z: Tensor, z_ctx: Tensor, rank: int | None) -> Tensor:
    """ΔW (inner, d + 1) from the inputs of W without the context and with it, (N, d + 1)."""
    weight = weight_of(block.first)
    if method == "no context":
        return torch.zeros_like(weight)
    z, difference = z.double(), (z_ctx - z).double()
    if method == "mean of u vᵀ (Dherin)":
        return weight @ (difference.T @ (z / z.square().sum(-1, keepdim=True))) / len(z)
    folds = min(FOLDS, len(z))
    fold = torch.arange(len(z)) % folds
    by_fold = moments_of(z, difference, torch.ones(len(z)), fold, folds)
    moments = sums(by_fold)
    ridge = choose_ridge(by_fold, moments[:-1], left=weight)[0] if folds > 1 else 1e-2
    return moments[-1].solve(ridge).low_rank(rank, weight).dense()


@torch.no_grad()
def measure(method: str, n: int, rank: int | None, seed: int) -> dict[str, Any]:
    """The relative error: mean and largest over contexts."""
    block, errors = trained(), []
    tasks = sample(CONTEXTS, LENGTH, torch.Generator().manual_seed(1000 + seed))
    generator = torch.Generator().manual_seed(seed)
    for context in tasks.context:
        x = torch.randn(n + UNSEEN, context.shape[1] - 1, generator=generator)
        query = torch.cat([x, torch.zeros(len(x), 1)], -1)[None]
        z, z_ctx = (block.layer(c, query)[0] for c in (context[None, :0], context[None]))
        wanted = block.mlp(z_ctx)[n:]
        if method == "patch for each token":
            u, v, unpatched = block.update(context[None], query)
            got = block.without_context(unpatched, u, v)[0, n:]
        else:
            delta = change(block, method, z[:n], z_ctx[:n], rank)
            inner = z[n:].double() @ (weight_of(block.first) + delta).T
            first = (inner + block.first.bias).to(z.dtype)
            got = block.second(first.relu())[..., -1]
        errors.append(float((got - wanted).square().mean() / wanted.square().mean()))
    return {"error": sum(errors) / len(errors), "largest": max(errors), "contexts": len(errors)}
