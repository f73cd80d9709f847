"""Running a model block by block on batches of rows, with the context and without it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.models.forward_override import overriding
from icl_patch.static.block_parts import BlockParts
from icl_patch.static.examples import Row
from icl_patch.static.processes import Processes

_CHUNK_TOKENS = 8192  # of one batch: bounds the memory of a pass


@dataclass(eq=False)
class Stream:
    """Rows of ids on their way through the blocks: the hidden states (B, T, d) before the next
    block, and the further inputs that the model gives each block.
    """

    ids: Tensor
    hidden: Tensor
    inputs: list[tuple[tuple[Any, ...], dict[str, Any]]]


class BlockRunner:
    """The blocks of a model, one at a time. Right-padded rows: causal blocks do not see padding.

    processes: those that share a fit, each with rows of its own; None: this one alone.
    folder: for the hidden states between the blocks; None: they stay in memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: Sequence[BlockParts],
        processes: Processes | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.model, self.blocks, self.folder = model, blocks, folder
        self.processes = processes or Processes(None, model.device)
        self.layers = [model.get_submodule(block.path) for block in blocks]

    def kept(self, hidden: Tensor) -> Tensor:
        """The hidden states, in a file of the folder if there is one. The file has lost its name
        already, so it goes with the tensor.
        """
        if self.folder is None:
            return hidden
        with NamedTemporaryFile(dir=self.folder) as file:
            size = hidden.numel()
            mapped = torch.from_file(file.name, shared=True, size=size, dtype=hidden.dtype)
        return mapped.view(hidden.shape).copy_(hidden)

    def start(self, ids: Tensor) -> Stream:
        """The stream of ids (B, T) before the first block."""
        inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        first: list[Tensor] = []

        def note(block: BlockParts) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                kwargs = dict(kwargs)
                hidden = args[0] if args else kwargs.pop("hidden_states")
                first.append(hidden)
                inputs.append((args[1:], kwargs))
                return (hidden,) if block.returns_tuple else hidden

            return forward

        self._forward(ids, [note(block) for block in self.blocks])
        return Stream(ids, self.kept(first[0]), inputs)

    def run(self, index: int, stream: Stream, hidden: Tensor | None = None) -> Tensor:
        """The hidden states after block ``index``."""
        args, kwargs = stream.inputs[index]
        hidden = (stream.hidden if hidden is None else hidden).to(stream.ids.device)
        out = self.layers[index](hidden, *args, **kwargs)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """(B, T, V) fp32, from the hidden states after the last block."""

        def give(block: BlockParts) -> Any:
            return lambda *_, **__: (hidden,) if block.returns_tuple else hidden

        return self._forward(ids, [give(block) for block in self.blocks]).float()

    def _forward(self, ids: Tensor, forwards: list[Any]) -> Tensor:
        with overriding(zip(self.layers, forwards, strict=True)):
            out: Tensor = self.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
            ).logits
        return out

    @contextmanager
    def taps(self, index: int, paths: dict[str, str]) -> Iterator[dict[str, Tensor]]:
        """Within this context, the inputs (B, T, n) of modules of a block, by the names given."""
        found: dict[str, Tensor] = {}

        def note(name: str) -> Any:
            def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                found[name] = args[0] if args else next(iter(kwargs.values()))

            return hook

        with ExitStack() as hooks:
            for name, path in paths.items():
                module = self.layers[index].get_submodule(path)
                hooks.callback(
                    module.register_forward_pre_hook(note(name), with_kwargs=True).remove
                )
            yield found


@dataclass(eq=False)
class Batch:
    """Rows of one fold, with the context and without it, and where their tokens meet.

    Attributes:
        rows: the rows; fold: theirs.
        teacher, student: the streams with the context and without it.
        valid: (B, T) bool, the student's tokens.
        place: (B, T) int64, the columns of these tokens in the teacher.
        answer: (B, T) bool, the tokens that predict an answer's token; labels (B, T): this token.
        weight: (B, T) fp64 of each token in the fit.
    """

    rows: list[Row]
    fold: int
    teacher: Stream
    student: Stream
    valid: Tensor
    place: Tensor
    answer: Tensor
    labels: Tensor
    weight: Tensor

    def weights(self, preserve_factor: float) -> Tensor:
        """The weight of each of the student's tokens (tokens,), those of preserved texts times a
        factor.
        """
        factors = [preserve_factor if row.preserve else 1.0 for row in self.rows]
        return (self.weight * self.weight.new_tensor(factors).unsqueeze(1))[self.valid]

    def aligned(self, x: Tensor) -> Tensor:
        """The teacher's values (B, T', n), or flat, at the student's tokens, (tokens, n)."""
        row = torch.arange(len(self.rows), device=self.place.device).unsqueeze(1)
        values: Tensor = x.to(row.device).reshape(len(self.rows), -1, x.shape[-1])[row, self.place][
            self.valid
        ]
        return values

    def own(self, x: Tensor) -> Tensor:
        """The student's values (B, T, n) at its tokens, (tokens, n)."""
        values: Tensor = x.to(self.valid.device).reshape(*self.valid.shape, -1)[self.valid]
        return values


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Right-padded ids (B, T)."""
    width = max(map(len, rows))
    return torch.tensor([list(row) + [0] * (width - len(row)) for row in rows])


def make_batches(
    runner: BlockRunner, rows: Sequence[Row], folds: Sequence[int], kappa: float
) -> list[Batch]:
    """The rows in batches of one fold each, at the first block. The tokens of the preserved rows
    together weigh ``kappa`` times those of the others.
    """
    counts = [
        sum(len(row.without) for row in rows if row.preserve is kept) for kept in (True, False)
    ]
    totals = runner.processes.summed(torch.tensor(counts, device=runner.model.device))
    preserved, others = totals.tolist()
    preserve_weight = kappa * others / preserved if preserved else 0.0
    order = sorted(range(len(rows)), key=lambda i: (folds[i], len(rows[i].with_context)))
    groups: list[list[int]] = []
    for i in order:
        full = groups and (len(groups[-1]) + 1) * len(rows[i].with_context) > _CHUNK_TOKENS
        if not groups or full or folds[groups[-1][0]] != folds[i]:
            groups.append([])
        groups[-1].append(i)
    return [
        _batch(runner, [rows[i] for i in group], folds[group[0]], preserve_weight)
        for group in groups
    ]


def _batch(runner: BlockRunner, rows: list[Row], fold: int, preserve_weight: float) -> Batch:
    device = runner.model.device
    student = pad([row.without for row in rows]).to(device)
    column = torch.arange(student.shape[1], device=device).unsqueeze(0)

    def of_row(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device).unsqueeze(1)

    length = of_row([len(row.without) for row in rows])
    shift = of_row([row.shift for row in rows])
    place = torch.where(column < of_row([row.prefix for row in rows]), column, column + shift)
    start = of_row([row.answer if row.labels else len(row.without) for row in rows])
    labels = pad([(0,) * row.answer + row.labels for row in rows]).to(device)
    labels = F.pad(labels, (0, student.shape[1] - labels.shape[1]))
    preserve = of_row([int(row.preserve) for row in rows])
    valid = column < length
    return Batch(
        rows=rows,
        fold=fold,
        teacher=runner.start(pad([row.with_context for row in rows]).to(device)),
        student=runner.start(student),
        valid=valid,
        place=torch.where(valid, place, 0),
        answer=valid & (column >= start),
        labels=labels,
        weight=torch.where(preserve.bool(), preserve_weight, 1.0).double().expand(valid.shape),
    )
