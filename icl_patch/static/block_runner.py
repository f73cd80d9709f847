"""Running a model block by block on batches of rows, with the context and without it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from icl_patch.models.forward_override import Overrides
from icl_patch.static.block_parts import BlockParts
from icl_patch.static.examples import Row
from icl_patch.static.processes import Processes

CHUNK_TOKENS = 8192  # of one batch: bounds the memory of a pass


Inputs = list[tuple[tuple[Any, ...], dict[str, Any]]]


class Stream:
    """Rows of ids (B, T) on their way through the blocks; they start when they are first needed."""

    def __init__(self, runner: "BlockRunner", ids: Tensor) -> None:
        self.runner, self.ids = runner, ids
        self._inputs: Inputs | None = None
        self._hidden: Tensor | None = None

    def _start(self) -> None:
        if self._inputs is None:
            self._hidden, self._inputs = self.runner.entered(self.ids, keep=True)

    @property
    def inputs(self) -> Inputs:
        """The further inputs that the model gives each block."""
        self._start()
        assert self._inputs is not None
        return self._inputs

    @property
    def hidden(self) -> Tensor:
        """The hidden states (B, T, d) before the next block."""
        self._start()
        assert self._hidden is not None
        return self._hidden

    @hidden.setter
    def hidden(self, hidden: Tensor) -> None:
        self._start()
        self._hidden = hidden


class _LastBlock(Exception):
    """Ends a pass at the last block: the logits behind it are not needed."""


class BlockRunner:
    """The blocks of a model, one at a time. Right-padded rows: causal blocks do not see padding.

    processes: those that share a fit, each with rows of its own; None: this one alone.
    folder: for the hidden states between the blocks and the masks; None: they stay in memory.
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

        Raises:
            OSError: there is no room for the file.
        """
        if self.folder is None or not hidden.numel():
            return hidden
        with NamedTemporaryFile(dir=self.folder) as file:
            content = hidden.detach().cpu().contiguous().flatten()
            # by a write: a full disk is an error here, and a fatal signal in mapped memory
            file.write(content.view(torch.uint8).numpy().data)
            file.flush()
            size = hidden.numel()
            mapped = torch.from_file(file.name, shared=True, size=size, dtype=hidden.dtype)
        return mapped.view(hidden.shape)

    def entered(self, ids: Tensor, keep: bool = False) -> tuple[Tensor, Inputs]:
        """The hidden states (B, T, d) of ids (B, T) before the first block, and the further inputs
        of each block; with ``keep`` in the folder, if there is one.
        """
        inputs: Inputs = []
        first: list[Tensor] = []

        def note(block: BlockParts) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                kwargs = dict(kwargs)
                hidden = args[0] if args else kwargs.pop("hidden_states")
                first.append(hidden)
                inputs.append((args[1:], kwargs))
                if len(inputs) == len(self.blocks):
                    raise _LastBlock
                return (hidden,) if block.returns_tuple else hidden

            return forward

        with suppress(_LastBlock):
            self._forward(ids, [note(block) for block in self.blocks])
        if not keep or self.folder is None:
            return first[0], inputs
        files: dict[int, Tensor] = {}  # the blocks share their masks

        def kept(x: Tensor) -> Tensor:
            if x.dim() > 2 and id(x) not in files:
                files[id(x)] = self.kept(x)
            return files.get(id(x), x)

        return self.kept(first[0]), tree_map_only(Tensor, kept, inputs)

    def run(self, index: int, stream: Stream, hidden: Tensor | None = None) -> Tensor:
        """The hidden states after block ``index``."""
        device = stream.ids.device
        args, kwargs = stream.inputs[index]
        if self.folder is not None:
            args, kwargs = tree_map_only(Tensor, lambda x: x.to(device), (args, kwargs))
        return self._block(
            index, (stream.hidden if hidden is None else hidden).to(device), args, kwargs
        )

    def _block(self, index: int, hidden: Tensor, args: Any, kwargs: Any) -> Tensor:
        out = self.layers[index](hidden, *args, **kwargs)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def final(self, ids: Tensor) -> Tensor:
        """The hidden states (B, T, d) behind the last block, of ids (B, T)."""
        hidden, inputs = self.entered(ids)
        for index, (args, kwargs) in enumerate(inputs):
            hidden = self._block(index, hidden.to(ids.device), args, kwargs)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, V) fp32, from hidden states (n, d) of single tokens after the last block."""

        def give(block: BlockParts) -> Any:
            return lambda *_, **__: (x,) if block.returns_tuple else x

        x = hidden.unsqueeze(1)
        ids = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
        return self._forward(ids, [give(block) for block in self.blocks])[:, 0].float()

    def _forward(self, ids: Tensor, forwards: list[Any]) -> Tensor:
        with Overrides(zip(self.layers, forwards, strict=True)):
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

    @property
    def measured(self) -> Tensor:
        """(B, T) bool: the answers' tokens, and all of preserved texts."""
        texts = self.valid & ~self.answer.any(1, keepdim=True)
        return self.answer | texts

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
        full = groups and (len(groups[-1]) + 1) * len(rows[i].with_context) > CHUNK_TOKENS
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
        teacher=Stream(runner, pad([row.with_context for row in rows]).to(device)),
        student=Stream(runner, student),
        valid=valid,
        place=torch.where(valid, place, 0),
        answer=valid & (column >= start),
        labels=labels,
        weight=torch.where(preserve.bool(), preserve_weight, 1.0).double().expand(valid.shape),
    )
