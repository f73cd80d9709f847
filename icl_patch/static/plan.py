"""The memory and time of a fit, estimated before it starts."""

import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from icl_patch.static.ridge import LAMBDAS

AUTO_RANKS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Plan:
    """The memory and time of a fit, estimated before it starts.

    questions, tokens: of the examples and the preserved texts; blocks: of the model; rank: of the
    changes, None for no limit; nbytes: of memory beside the model; hidden_nbytes: of the hidden
    states between the blocks of a ridge fit, in ``nbytes`` unless they are on a disk; seconds:
    roughly, from the time of a matrix product on this machine.
    """

    questions: int
    tokens: int
    blocks: int
    rank: int | None
    nbytes: int
    hidden_nbytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.questions} questions, {self.tokens} tokens, {self.blocks} blocks: about"
            f" {self.seconds:.0f} s and {self.nbytes / 1e6:,.0f} MB beside the model; hidden states"
            f" {self.hidden_nbytes / 1e6:,.0f} MB"
        )


@dataclass(frozen=True)
class Size:
    """The sizes on which the cost of a fit depends: the model, the shapes (N, K) of the matrices by
    path, its blocks, the rank, the folds, the rows, the tokens of both runs, and whether their
    hidden states are on a disk.
    """

    model: PreTrainedModel
    shapes: dict[str, tuple[int, int]]
    blocks: int
    rank: int | None
    folds: int
    rows: int
    tokens: int
    on_disk: bool

    @property
    def hidden(self) -> int:
        """d, the width of the residual stream."""
        return min(min(shape) for shape in self.shapes.values())

    @property
    def weights(self) -> int:
        """Parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def factors(self) -> int:
        """Elements of the patch."""
        rank = self.hidden if self.rank is None else self.rank
        return sum(rank * (n + k) for n, k in self.shapes.values())

    def plan(self, operations: float, nbytes: int, hidden_nbytes: int = 0) -> Plan:
        """The plan for a number of operations and bytes."""
        seconds = operations / _speed(self.model)
        return Plan(self.rows, self.tokens, self.blocks, self.rank, nbytes, hidden_nbytes, seconds)


def plan_ridge(size: Size, parts: int, fits: int) -> Plan:
    """The plan of ``fits`` ridge fits of ``parts`` regressions a block.

    Memory: hidden states before and behind a block and the values read from it, for all tokens; for
    one matrix at a time its rows in fp64, and S, C and T of every fold, without every fold and of
    all (or their rows, if these are fewer); and the patches of all folds. Operations: 2 a weight
    and token for each of ``parts + 3`` passes; n K² for a moment, K³/3 for a factorisation, one a
    fold and λ, and one a fold, and 2 N K² for its error.
    """
    hidden, tokens = size.hidden, size.tokens
    width = max(k for _, k in size.shapes.values())
    system, folds = min(width, tokens), size.folds + 1
    solves = folds + (size.folds * len(LAMBDAS) if size.folds > 1 else 0)
    hidden_nbytes = 8 * tokens * hidden
    nbytes = 8 * tokens * (hidden + width) + 8 * tokens * (width + hidden)
    nbytes += 0 if size.on_disk else hidden_nbytes
    moments = 2 * size.folds + 1 if size.folds > 1 else 1
    nbytes += 8 * moments * (system * (width + hidden) + hidden**2) + 4 * folds * size.factors
    operations = 2.0 * size.weights * tokens * (parts + 3)
    a_regression = tokens * system**2 + folds * 9.0 * hidden**3
    a_regression += solves * (system**3 / 3 + 2 * hidden * system * width)
    operations += size.blocks * parts * a_regression
    return size.plan(fits * operations, nbytes, hidden_nbytes)


def plan_distillation(size: Size, steps: int, batch_size: int) -> Plan:
    """The plan of a distillation: factors, gradients, two moments and the best factors; forward
    twice and backward once a step.
    """
    batch = size.tokens * min(1.0, batch_size / max(size.rows, 1))
    operations = 2.0 * size.weights * (size.tokens + 3 * steps * batch)
    return size.plan(operations, 4 * (5 * size.factors + size.tokens * size.hidden))


def _speed(model: PreTrainedModel) -> float:
    """Operations a second of a product of fp32 matrices on the model's device."""
    x = torch.randn(512, 512, device=model.device)
    float((x @ x).sum())  # waits for the device
    began = time.perf_counter()
    for _ in range(3):
        y = x @ x
    float(y.sum())
    return 3 * 2 * 512**3 / (time.perf_counter() - began)
