"""The measurements behind Figures 2 to 6 and Appendix E of Dherin et al., as numbers."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import linear_regression
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


@dataclass(frozen=True, eq=False)
class Trained:
    """A model after its training, and its curves."""

    model: Any
    curves: dict[str, Any]


Predict = Callable[[Any, Tasks], dict[str, Tensor]]


def _train(
    model: nn.Module, training: Training, sizes: Sizes, seed: int, predict: Predict
) -> Trained:
    """Train, and at every checkpoint compute the validation loss with the context and without
    it.
    """
    count = sizes.stack_validation if training is sizes.stack else sizes.validation
    tasks = sample(count, training.length, torch.Generator().manual_seed(_VALIDATION))
    curves: dict[str, Any] = {"step": [], "training_loss": [], "largest_difference": 0.0}

    @torch.no_grad()
    def checkpoint(step: int, loss: float) -> None:
        curves["step"].append(step)
        curves["training_loss"].append(loss)
        predictions = predict(model, tasks)
        for name, prediction in predictions.items():
            curves.setdefault(f"validation_loss_{name}", []).append(
                half_squared(prediction, tasks.target).mean().item()
            )
        apart = max(
            float((prediction - predictions["context"]).abs().max())
            for prediction in predictions.values()
        )
        curves["largest_difference"] = max(curves["largest_difference"], apart)

    with torch.enable_grad():
        train(model, training, seed, checkpoint)
    return Trained(model.eval(), curves)


def _predict_block(block: Block, tasks: Tasks) -> dict[str, Tensor]:
    """With the context; with ``W + ΔW`` applied as two vectors; with ``W + ΔW`` written out, task
    by task.
    """
    query = tasks.query[:, None]
    u, v, z = block.update(tasks.context, query)
    # (B, inner, d + 1): the matrices, for once
    weight = block.first.weight + u[:, 0, :, None] * v[:, 0, None]
    inner = (weight @ z[:, 0, :, None])[..., 0] + block.first.bias
    return {
        "context": block(tasks.context, query)[:, 0],
        "patched": block.without_context(z, u, v)[:, 0],
        "written_out": block.second(torch.relu(inner))[..., -1],
    }


def _predict_stack(stack: Stack, tasks: Tasks) -> dict[str, Tensor]:
    query = tasks.query[:, None]
    without = stack.read(stack.outputs_without_context(tasks.context, query)[-1])
    return {"context": stack(tasks.context, query)[:, 0], "patched": without[:, 0, 0]}


@lru_cache(maxsize=1)
def trained_attention(sizes: Sizes, seed: int) -> Trained:
    """The transformer of §4.1, which Figures 2, 3 and 4 share."""
    torch.manual_seed(seed)
    return _train(Block(Attention()), sizes.attention, sizes, seed, _predict_block)


def mean_and_error(values: Tensor) -> dict[str, list[float]]:
    """The mean over the trials (the first dimension) and its standard error."""
    return {
        "mean": values.mean(0).tolist(),
        "standard_error": (values.std(0) / len(values) ** 0.5).tolist(),
    }


def _plane(block: Block, sizes: Sizes, length: int) -> dict[str, Any]:
    """``|Φ_W(C, x) - Φ_{W+ΔW}(x)|`` over the plane of x, averaged over tasks, in the precision of
    the model.
    """
    tasks = sample(sizes.trials, length, torch.Generator().manual_seed(_TRIALS))
    # an even number: at the origin A(x) = 0, and there is no ΔW
    axis = torch.linspace(-4, 4, sizes.grid)
    points = torch.cartesian_prod(axis, axis, torch.zeros(1)).to(block.first.weight.dtype)
    total, largest = torch.zeros(len(points)), 0.0
    for context in tasks.context.to(points.dtype):
        u, v, z = block.update(context[None], points[None])
        off = (block(context[None], points[None]) - block.without_context(z, u, v))[0]
        total, largest = total + off.abs(), max(largest, float(off.abs().max()))
    mean = (total / sizes.trials).reshape(sizes.grid, sizes.grid)
    return {
        "axis": axis.tolist(),
        "mean_absolute_difference": mean.tolist(),
        "average": float(mean.mean()),
        "largest_mean": float(mean.max()),
        "largest": largest,
    }


@torch.no_grad()
def figure_2(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Losses with the context and by ΔW at every checkpoint, and their difference over the
    plane.
    """
    trained = trained_attention(sizes, seed)
    plane = _plane(trained.model, sizes, sizes.attention.length)
    in_double = _plane(copy.deepcopy(trained.model).double(), sizes, sizes.attention.length)
    return {"curves": trained.curves, "plane": plane, "largest_in_fp64": in_double["largest"]}


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
    i = torch.arange(3, length, dtype=torch.float64)
    line = linear_regression(i.log().tolist(), mean[3:].double().log().tolist())
    return {
        "context_length": list(range(length)),
        "change": mean_and_error(changes),
        "median": changes.median(0).values.tolist(),
        "first_tenth": float(mean[3 : 3 + tenth].mean()),
        "last_tenth": float(mean[-tenth:].mean()),
        "slope_log_log": line.slope,
        "weight_norm": float(torch.linalg.matrix_norm(block.first.weight, 2)),
    }


def figure_3(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Convergence of ΔW as the context grows."""
    return convergence(trained_attention(sizes, seed).model, sizes, sizes.attention.length)


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
    block, length = trained_attention(sizes, seed).model, sizes.attention.length
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
        "sweep_average_loss": {str(key): value for key, value in sweep.items()},
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
    trained = _train(Stack(), sizes.stack, sizes, seed, _predict_stack)
    tasks = sample(sizes.trials, sizes.stack.length, torch.Generator().manual_seed(_TRIALS))
    query = tasks.query[:, None]
    full, without = (
        trained.model.outputs(tasks.context, query),
        trained.model.outputs_without_context(tasks.context, query),
    )
    off = torch.stack([(a - b).norm(dim=-1)[:, 0] for a, b in zip(full, without, strict=True)], 1)
    double = copy.deepcopy(trained.model).double()
    inputs = tasks.context.double(), query.double()
    wide = [
        (a - b).norm(dim=-1).max()
        for a, b in zip(
            double.outputs(*inputs), double.outputs_without_context(*inputs), strict=True
        )
    ]
    return {
        "curves": trained.curves,
        "block": list(range(1, off.shape[1] + 1)),
        "difference": mean_and_error(off),
        "largest": float(off.max()),
        "largest_in_fp64": float(torch.stack(wide).max()),
        "output_norm": float(torch.stack(full).norm(dim=-1).mean()),
    }


def figure_6(sizes: Sizes, seed: int) -> dict[str, Any]:
    """An RNN as the contextual layer: losses by context and by ΔW, and the changes of ΔW as the
    context grows.
    """
    torch.manual_seed(seed)
    trained = _train(Block(Recurrence()), sizes.recurrence, sizes, seed, _predict_block)
    return {
        "curves": trained.curves,
        "convergence": convergence(trained.model, sizes, sizes.recurrence.length),
    }


def _factorised(block: Block, tasks: Tasks) -> tuple[Factorisation, float]:
    """The factors of Appendix E, and the largest ``|Φ_{W_i}(c_{i+1}, …, c_n, x) - Φ_{W_0}(c_1, …,
    c_n, x)|`` over all i and tasks.
    """
    inputs = block.layer.suffixes(tasks.context, tasks.query).transpose(0, 1)
    found = Factorisation(inputs)
    expected = block.mlp(inputs[0])
    return found, max(
        float((block.mlp(found.on(z, i)) - expected).abs().max()) for i, z in enumerate(inputs)
    )


def _sizes_so_far(steps: LowRank) -> Tensor:
    """``‖W_i - W_0‖`` for i = 1 … n, from the inner products of the steps: (n, B) -> (B, n)."""
    table = steps[:, None].inner(steps[None]).permute(2, 0, 1)
    return table.cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()


@torch.no_grad()
def appendix_e(sizes: Sizes, seed: int) -> dict[str, Any]:
    """The context absorbed from its first token on, ``W_n = W_0 Π(1 + h_i A_i)``, beside the
    dynamics of Proposition 3.1.
    """
    block, length = trained_attention(sizes, seed).model, sizes.attention.length
    tasks = sample(sizes.trials, length, torch.Generator().manual_seed(_TRIALS))
    found, apart = _factorised(block, tasks)
    double, weight = copy.deepcopy(block).double(), block.first.weight
    wide = Tasks(
        *(getattr(tasks, name).double() for name in ("context", "query", "target", "omega"))
    )
    steps, total, grown = found.steps(weight), found.total(weight), dynamics(block, tasks)
    last, determinants = grown.changes[-1], found.determinants()
    bare, w_0_z = found.inputs[-1], weight @ found.inputs[0].mT
    return {
        "token": list(range(1, length + 1)),
        "step": mean_and_error(steps.norm().T),
        "step_median": steps.norm().median(1).values.tolist(),
        "step_growing_median": grown.step_norms().median(1).values.tolist(),
        "size_median": _sizes_so_far(steps).median(0).values.tolist(),
        "size_growing_median": grown.norms()[1:].median(1).values.tolist(),
        "largest_difference": apart,
        "largest_difference_in_fp64": _factorised(double, wide)[1],
        "largest_difference_on_the_query": float(
            (total.on(bare) - last.on(bare)).abs().max() / w_0_z.abs().max()
        ),
        "total_norm_median": float(total.norm().median()),
        "total_norm_growing_median": float(last.norm().median()),
        "cosine": mean_and_error(total.cosine(last)[:, None]),
        "determinant_nearest_0": float(determinants.flatten()[determinants.abs().argmin()]),
        "share_of_factors_that_reverse": float((determinants < 0).float().mean()),
    }


FIGURES: dict[int | str, Callable[[Sizes, int], dict[str, Any]]] = {
    2: figure_2,
    3: figure_3,
    4: figure_4,
    5: figure_5,
    6: figure_6,
    "E": appendix_e,
}
