"""The measurements behind Figures 2 to 6 and Appendix E of Dherin et al., as numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from regression_models import (
    Attention,
    Block,
    Recurrence,
    Stack,
    Tasks,
    Training,
    half_squared,
    rank_one,
    sample,
    train,
)
from torch import Tensor, nn

from icl_patch.analysis.dynamics import Factorisation, Trajectory
from icl_patch.patch.low_rank import LowRank

# Seeds of the drawn tasks, apart from that of the weights and the training.
_VALIDATION, _TRIALS, _CHOICE = 1001, 1002, 1003
# The paper does not give the rate of its SGD: the one with the lowest test loss, averaged over the
# steps, on tasks of their own is taken.
RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Sizes:
    """How large the experiments are: full as in the paper, or quick."""

    attention: Training
    recurrence: Training
    stack: Training
    validation: int = 500
    stack_validation: int = 100
    trials: int = 100
    grid: int = 40


FULL = Sizes(
    attention=Training(steps=10_000, every=100),
    recurrence=Training(steps=10_000, every=100, length=200, rate=0.001),
    stack=Training(steps=500, every=25, batch=16, rate=0.001, warmup=50, decay=True),
)
QUICK = Sizes(
    attention=Training(steps=40, every=20, length=12),
    recurrence=Training(steps=20, every=10, length=12),
    stack=Training(steps=6, every=3, batch=4, length=6, rate=0.001),
    validation=8,
    stack_validation=8,
    trials=5,
    grid=6,
)


def _train(
    model: nn.Module,
    training: Training,
    validation: int,
    seed: int,
    predict: Callable[[Any, Tasks], tuple[Tensor, Tensor]],
) -> tuple[Any, dict[str, Any]]:
    """The trained model, and at every checkpoint its validation loss with the context and by the
    patch.
    """
    tasks = sample(validation, training.length, torch.Generator().manual_seed(_VALIDATION))
    names = ("step", "training_loss", "validation_loss_context", "validation_loss_patched")
    curves: dict[str, Any] = {name: [] for name in names} | {"largest_difference": 0.0}

    @torch.no_grad()
    def checkpoint(step: int, loss: float) -> None:
        predictions = predict(model, tasks)
        losses = [half_squared(x, tasks.target).mean().item() for x in predictions]
        for name, value in zip(names, (step, loss, *losses), strict=True):
            curves[name].append(value)
        apart = float((predictions[0] - predictions[1]).abs().max())
        curves["largest_difference"] = max(curves["largest_difference"], apart)

    with torch.enable_grad():
        train(model, training, seed, checkpoint)
    return model.eval(), curves


def _predict_block(block: Block, tasks: Tasks) -> tuple[Tensor, Tensor]:
    query = tasks.query[:, None]
    u, v, z = block.update(tasks.context, query)
    return block(tasks.context, query)[:, 0], block.without_context(z, u, v)[:, 0]


def _predict_stack(stack: Stack, tasks: Tasks) -> tuple[Tensor, Tensor]:
    query = tasks.query[:, None]
    without = stack.read(stack.outputs_without_context(tasks.context, query)[-1])
    return stack(tasks.context, query)[:, 0], without[:, 0, 0]


@lru_cache(maxsize=1)
def trained_attention(sizes: Sizes, seed: int) -> tuple[Block, dict[str, Any]]:
    """The transformer of §4.1, which Figures 2, 3, 4 and Appendix E share."""
    torch.manual_seed(seed)
    return _train(Block(Attention()), sizes.attention, sizes.validation, seed, _predict_block)


def mean_and_error(values: Tensor) -> dict[str, list[float]]:
    """The mean over the trials (the first dimension) and its standard error."""
    return {
        "mean": values.mean(0).tolist(),
        "standard_error": (values.std(0) / len(values) ** 0.5).tolist(),
    }


@torch.no_grad()
def figure_2(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Losses with the context and by ΔW at every checkpoint, and ``|Φ_W(C, x) - Φ_{W+ΔW}(x)|`` over
    the plane of x, averaged over tasks.
    """
    block, curves = trained_attention(sizes, seed)
    tasks = sample(sizes.trials, sizes.attention.length, torch.Generator().manual_seed(_TRIALS))
    # an even number: at the origin A(x) = 0, and there is no ΔW
    axis = torch.linspace(-4, 4, sizes.grid)
    points = torch.cartesian_prod(axis, axis, torch.zeros(1))[None]
    off = []
    for context in tasks.context.split(1):
        u, v, z = block.update(context, points)
        off.append((block(context, points) - block.without_context(z, u, v))[0].abs())
    mean = torch.stack(off).mean(0).reshape(sizes.grid, sizes.grid)
    plane = {
        "axis": axis.tolist(),
        "mean_absolute_difference": mean.tolist(),
        "average": float(mean.mean()),
        "largest": float(torch.stack(off).max()),
    }
    return {"curves": curves, "plane": plane}


def dynamics(block: Block, tasks: Tasks) -> Trajectory:
    """``W_0, …, W_N`` of the first layer as the context grows, equations 6 to 9; leading dimensions
    (N + 1, B).
    """
    z_ctx = block.layer.prefixes(tasks.context, tasks.query).transpose(0, 1)
    u, v = rank_one(block.first, z_ctx, z_ctx[:1])
    return Trajectory(LowRank(u.unsqueeze(-2), v.expand_as(z_ctx).unsqueeze(-2)))


@torch.no_grad()
def convergence(block: Block, sizes: Sizes, length: int) -> dict[str, Any]:
    """``‖ΔW_{i+1} - ΔW_i‖₂`` for i = 0 … N - 1: the steps have rank 1, so this is their Frobenius
    norm.
    """
    tasks = sample(sizes.trials, length, torch.Generator().manual_seed(_TRIALS))
    changes = dynamics(block, tasks).step_norms().T  # (trials, N)
    mean = changes.mean(0)
    tenth = max(1, (length - 3) // 10)
    return {
        "context_length": list(range(length)),
        "change": mean_and_error(changes),
        "first_tenth": float(mean[3 : 3 + tenth].mean()),
        "last_tenth": float(mean[-tenth:].mean()),
    }


def figure_3(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Convergence of ΔW as the context grows."""
    return convergence(trained_attention(sizes, seed)[0], sizes, sizes.attention.length)


@torch.no_grad()
def _finetune(block: Block, tasks: Tasks, rate: float) -> tuple[Tensor, Tensor]:
    """SGD on W alone, one example at a time, each task from the same start; the gradient of ``½ (ŷ
    - y)²`` written out.

    Returns the test loss after i = 0 … N steps (B, N + 1), and W's total change after each (B, N +
    1, inner, d + 1).
    """
    bias, read, read_bias = block.first.bias, block.second.weight[-1], block.second.bias[-1]
    examples = torch.cat([tasks.context[..., :-1], torch.zeros_like(tasks.context[..., -1:])], -1)
    z, z_test = (
        block.layer(tasks.context[:, :0], examples),
        block.layer(tasks.context[:, :0], tasks.query[:, None]),
    )
    weight = block.first.weight.repeat(len(tasks.query), 1, 1)
    losses, changes = [], []
    for i in range(examples.shape[1] + 1):
        test = torch.relu((weight @ z_test[:, 0, :, None])[..., 0] + bias) @ read + read_bias
        losses.append(half_squared(test, tasks.target))
        changes.append(weight - block.first.weight)
        if i < examples.shape[1]:
            inner = (weight @ z[:, i, :, None])[..., 0] + bias
            error = torch.relu(inner) @ read + read_bias - tasks.context[:, i, -1]
            weight = (
                weight - rate * (error[:, None] * read * (inner > 0))[..., None] * z[:, i, None]
            )
    return torch.stack(losses, 1), torch.stack(changes, 1)


def alignment(made: LowRank, change: Tensor) -> tuple[Tensor, Tensor]:
    """``<u vᵀ, M> / (‖u vᵀ‖ ‖M‖)`` in the Frobenius inner product, and ``‖M v‖ / (‖v‖ ‖M‖)``, the
    most that any u could reach.

    Changes of rank 1 and M (B, I, inner, d + 1), leading dimensions (I, B) -> (B, I) twice; NaN
    where a factor is 0.
    """
    change = change.transpose(0, 1).double()
    size, v = change.flatten(2).norm(dim=-1), nn.functional.normalize(made.v.double(), dim=-1)
    along = (change @ v.mT).norm(dim=(-2, -1))
    return (made.against(change) / (made.norm() * size)).T, (along / size).T


@torch.no_grad()
def figure_4(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Fine-tuning W by SGD against ΔW: test losses and the normalised Frobenius inner product of
    the two changes of W.
    """
    block, length = trained_attention(sizes, seed)[0], sizes.attention.length
    choice = sample(sizes.trials, length, torch.Generator().manual_seed(_CHOICE))
    sweep = {rate: float(_finetune(block, choice, rate)[0].mean()) for rate in RATES}
    rate = min(RATES, key=lambda candidate: sweep[candidate])
    tasks = sample(sizes.trials, length, torch.Generator().manual_seed(_TRIALS))
    gd_loss, gd_change = _finetune(block, tasks, rate)
    z_ctx = block.layer.prefixes(tasks.context, tasks.query)
    implicit = dynamics(block, tasks).changes
    u, v = (factor.squeeze(-2).transpose(0, 1) for factor in (implicit.u, implicit.v))
    implicit_loss = half_squared(
        block.without_context(z_ctx[:, :1].expand_as(z_ctx), u, v), tasks.target[:, None]
    )
    aligned, ceiling = alignment(implicit, gd_change)
    return {
        "rate": rate,
        "steps": list(range(length + 1)),
        "gd_test_loss": mean_and_error(gd_loss),
        "implicit_test_loss": mean_and_error(implicit_loss),
        "inner_product": mean_and_error(aligned[:, 1:]),
        "inner_product_ceiling": mean_and_error(ceiling[:, 1:]),
    }


@torch.no_grad()
def figure_5(sizes: Sizes, seed: int) -> dict[str, Any]:
    """The ten-layer post-LN stack, and the norm of the difference of every block's output with the
    context and without it.
    """
    torch.manual_seed(seed)
    stack, curves = _train(Stack(), sizes.stack, sizes.stack_validation, seed, _predict_stack)
    tasks = sample(sizes.trials, sizes.stack.length, torch.Generator().manual_seed(_TRIALS))
    inputs = tasks.context, tasks.query[:, None]
    full, without = stack.outputs(*inputs), stack.outputs_without_context(*inputs)
    off = torch.stack([(a - b).norm(dim=-1)[:, 0] for a, b in zip(full, without, strict=True)], 1)
    return {
        "curves": curves,
        "block": list(range(1, off.shape[1] + 1)),
        "difference": mean_and_error(off),
        "largest": float(off.max()),
        "output_norm": float(torch.stack(full).norm(dim=-1).mean()),
    }


def figure_6(sizes: Sizes, seed: int) -> dict[str, Any]:
    """An RNN as the contextual layer: losses by context and by ΔW, and the changes of ΔW as the
    context grows.
    """
    torch.manual_seed(seed)
    block, curves = _train(
        Block(Recurrence()), sizes.recurrence, sizes.validation, seed, _predict_block
    )
    return {"curves": curves, "convergence": convergence(block, sizes, sizes.recurrence.length)}


@torch.no_grad()
def appendix_e(sizes: Sizes, seed: int) -> dict[str, Any]:
    """The context absorbed from its first token on, ``W_n = W_0 Π(1 + h_i A_i)``: the largest
    ``|Φ_{W_i}(c_{i+1}, …, c_n, x) - Φ_{W_0}(c_1, …, c_n, x)|`` over all i and tasks, and the sizes
    of the steps beside those of Proposition 3.1.
    """
    block, length = trained_attention(sizes, seed)[0], sizes.attention.length
    tasks = sample(sizes.trials, length, torch.Generator().manual_seed(_TRIALS))
    inputs = block.layer.suffixes(tasks.context, tasks.query).transpose(0, 1)
    found, expected = Factorisation(inputs), block.mlp(inputs[0])
    weight, grown = block.first.weight, dynamics(block, tasks)
    steps, total, last = found.steps(weight), found.total(weight), grown.changes[-1]
    return {
        "token": list(range(1, length + 1)),
        "step": mean_and_error(steps.norm().T),
        "step_median": steps.norm().median(1).values.tolist(),
        "step_growing_median": grown.step_norms().median(1).values.tolist(),
        "largest_difference": max(
            float((block.mlp(found.on(z, i)) - expected).abs().max()) for i, z in enumerate(inputs)
        ),
        "total_norm_median": float(total.norm().median()),
        "total_norm_growing_median": float(last.norm().median()),
        "cosine": mean_and_error(total.cosine(last)[:, None]),
    }


FIGURES: dict[str, Callable[[Sizes, int], dict[str, Any]]] = {
    "dherin-figure-2": figure_2,
    "dherin-figure-3": figure_3,
    "dherin-figure-4": figure_4,
    "dherin-figure-5": figure_5,
    "dherin-figure-6": figure_6,
    "dherin-appendix-e": appendix_e,
}
