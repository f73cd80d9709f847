"""The memory and time of a fit, estimated before it starts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from icl_patch.models.language_model import text_config, vocabulary
from icl_patch.static.block_runner import CHUNK_TOKENS
from icl_patch.static.examples import Row
from icl_patch.static.report import LOGITS
from icl_patch.static.ridge import LAMBDAS

AUTO_RANKS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Plan:
    """The memory and time of a fit, estimated before it starts.

    questions, tokens: of the examples and the preserved texts; blocks: of the model; rank: of the
    changes, None for no limit; nbytes: of memory beside the model; hidden_nbytes: of the hidden
    states, masks and targets that a ridge fit keeps between the blocks, in ``nbytes`` unless they
    are on a disk; seconds: roughly, from the time of a matrix product on this machine.
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
    path, its blocks, the rank, the folds, the rows, bytes of their masks and position embeddings,
    and whether what is kept between the blocks is on a disk.
    """

    model: PreTrainedModel
    shapes: dict[str, tuple[int, int]]
    blocks: int
    rank: int | None
    folds: int
    rows: Sequence[Row]
    masks: int
    on_disk: bool

    @property
    def hidden(self) -> int:
        """d, the width of the residual stream."""
        return int(getattr(text_config(self.model), "hidden_size"))  # noqa: B009 (no common class)

    @property
    def width(self) -> int:
        """The most inputs of a matrix."""
        return max(k for _, k in self.shapes.values())

    @property
    def with_context(self) -> int:
        """Tokens of the run with the context."""
        return sum(len(row.with_context) for row in self.rows)

    @property
    def without(self) -> int:
        """Tokens of the run without the context."""
        return sum(len(row.without) for row in self.rows)

    @property
    def measured(self) -> int:
        """Tokens whose logits are compared: of answers and of preserved texts."""
        return sum(len(row.without) if row.preserve else len(row.labels) for row in self.rows)

    @property
    def weights(self) -> int:
        """Parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def factors(self) -> int:
        """Elements of the patch."""
        rank = self.hidden if self.rank is None else self.rank
        return sum(rank * (n + k) for n, k in self.shapes.values())

    def a_pass(self, tokens: int) -> int:
        """Bytes of what a block computes for some tokens: six vectors as wide as the residual
        stream, four as wide as the MLP, and eager attention's scores.
        """
        width, config = 6 * self.hidden + 4 * self.width, text_config(self.model)
        if getattr(config, "_attn_implementation", "") == "eager":
            longest = max(len(row.with_context) for row in self.rows)
            width += 3 * longest * int(getattr(config, "num_attention_heads"))  # noqa: B009
        return self.model.dtype.itemsize * tokens * width

    def compared(self, tokens: int) -> int:
        """Bytes of logits and of what is computed from them, for some tokens at a time."""
        return 8 * 4 * tokens * vocabulary(self.model)

    def plan(self, operations: float, nbytes: int, hidden_nbytes: int = 0) -> Plan:
        """The plan for a number of operations and bytes."""
        seconds, tokens = operations / _speed(self.model), self.with_context + self.without
        return Plan(len(self.rows), tokens, self.blocks, self.rank, nbytes, hidden_nbytes, seconds)


def plan_ridge(size: Size, parts: int, fits: int) -> Plan:
    """The plan of ``fits`` ridge fits of ``parts`` regressions a block.

    Memory: hidden states of all tokens before and behind a block, two targets of the tokens without
    the context, and the masks; a pass of one batch of one fold, and its rows in fp64; for one
    matrix at a time S, C and T of every fold, without every fold and of all (or the rows, if these
    are fewer), and a system; the patches of all folds; the logits that are compared at a time.
    Operations: 2 a weight and token for each of ``parts + 3`` passes; n K² for a moment, K³/3 for a
    factorisation, one a fold and λ, and one a fold, and 2 N K² for its error.
    """
    hidden, width, without = size.hidden, size.width, size.without
    tokens = size.with_context + without
    system, folds = min(width, without), size.folds + 1
    solves = folds + (size.folds * len(LAMBDAS) if size.folds > 1 else 0)
    hidden_nbytes = 2 * size.model.dtype.itemsize * (tokens + without) * hidden + size.masks
    batch = min(CHUNK_TOKENS, size.with_context // size.folds)
    rows = min(batch, without // size.folds)
    nbytes = 0 if size.on_disk else hidden_nbytes
    nbytes += max(size.a_pass(batch), size.a_pass(rows) + 2 * 8 * rows * (width + hidden))
    moments = (2 * size.folds + 1 if size.folds > 1 else 1) + 3
    nbytes += 8 * moments * (system * (width + hidden) + hidden**2) + 4 * folds * size.factors
    nbytes += size.compared(min(LOGITS // vocabulary(size.model), size.measured // size.folds))
    operations = 2.0 * size.weights * tokens * (parts + 3)
    a_regression = without * system**2 + folds * 9.0 * hidden**3
    a_regression += solves * (system**3 / 3 + 2 * hidden * system * width)
    operations += size.blocks * parts * a_regression
    return size.plan(fits * operations, nbytes, hidden_nbytes)


def plan_distillation(size: Size, steps: int, batch_size: int) -> Plan:
    """The plan of a distillation with ``batch_size`` questions and texts a step: factors,
    gradients, two moments and the best factors; the last hidden states; a step's activations in all
    blocks and its logits, or a pass with the context. Forward twice and backward once a step.
    """
    share = min(1.0, batch_size / max(len(size.rows), 1))
    step = round(share * size.without)
    activations = size.blocks * size.a_pass(step) + size.compared(round(share * size.measured))
    activations = max(activations, size.a_pass(min(CHUNK_TOKENS, size.with_context)))
    kept = 2 * size.model.dtype.itemsize * size.without * size.hidden
    operations = 2.0 * size.weights * (size.with_context + size.without + 3 * steps * step)
    return size.plan(operations, 4 * 5 * size.factors + kept + activations)


def _speed(model: PreTrainedModel) -> float:
    """Operations a second of a product of fp32 matrices on the model's device."""
    x = torch.randn(512, 512, device=model.device)
    float((x @ x).sum())  # waits for the device
    began = time.perf_counter()
    for _ in range(3):
        y = x @ x
    float(y.sum())
    return 3 * 2 * 512**3 / (time.perf_counter() - began)
