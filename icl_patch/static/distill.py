"""Distilling a context into low-rank changes: gradient descent on the KL divergence to the model
with its context.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from icl_patch.layers.swap import restore, swap
from icl_patch.patch.atomic_file import write_atomically
from icl_patch.patch.fingerprints import weight_fingerprint
from icl_patch.patch.serialization import file_parts, read_file
from icl_patch.static.block_parts import weight_of
from icl_patch.static.block_runner import BlockRunner, make_batches
from icl_patch.static.examples import Row, question_numbers
from icl_patch.static.report import StaticReport, Tally, ends_with_context, measure
from icl_patch.static.ridge import LowRank
from icl_patch.static.sequential import Progress
from icl_patch.static.static_linear import StaticLinear

_KIND = "static_distillation"
_HELD_OUT_OF = 5  # one question in five is held out for early stopping,
_MOST_HELD_OUT = 32  # of many questions no more than these
_FINAL_RATE = 0.02  # of the learning rate
_MEASURED_TEXTS = 32  # preserved texts that are measured between the steps; at the end all are


@dataclass(frozen=True)
class Distillation:
    """How a patch is distilled.

    Attributes:
        steps: of AdamW; learning_rate: after a warm-up over ``warmup`` steps it falls by a cosine
            to 2 %.
        batch_size: questions a step; preserve_batch_size: preserved texts a step.
        check_every: steps between two measurements of the held-out KL; patience: how many of them
            without a new best until it stops early.
        clip: the largest norm of the gradient.
        seed: of the first factors and the order of the questions.
    """

    steps: int = 50
    learning_rate: float = 1e-2
    warmup: int = 10
    batch_size: int = 16
    preserve_batch_size: int = 4
    check_every: int = 10
    patience: int = 3
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.steps, self.warmup, self.batch_size, self.preserve_batch_size)
        least = min(*counts, self.check_every, self.patience)
        if least < 1 or not min(self.learning_rate, self.clip) > 0:
            raise ValueError(f"expected positive settings of a distillation, got {self}")

    def rate(self, step: int) -> float:
        """The share of the learning rate at a step."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return min(1.0, (step + 1) / self.warmup) * (_FINAL_RATE + (1 - _FINAL_RATE) * cosine)


def distill(
    runner: BlockRunner,
    paths: Sequence[str],
    rank: int,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    preserve: Sequence[Row],
    kappa: float,
    options: Distillation,
    start: dict[str, LowRank] | None = None,
    state: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, LowRank], StaticReport]:
    """The changes of the matrices at ``paths`` with the smallest KL divergence on held-out
    questions.

    The loss of a step is the mean KL(with context ‖ patched) over the answers' tokens of its
    questions, plus κ times that of the unpatched model over the tokens of its preserved texts.
    Without ``held_out`` every fifth question is held out, at most 32; with fewer than five
    questions none is, and the last step counts.
    """
    numbers = question_numbers(row.question for row in rows)
    count = len(numbers)
    if not held_out and count >= _HELD_OUT_OF:
        every = max(_HELD_OUT_OF, math.ceil(count / _MOST_HELD_OUT))
        held_out = [row for row in rows if numbers[row.question] % every == 0]
        rows = [row for row in rows if numbers[row.question] % every]
    changes = _first(runner, paths, rank, options.seed, start)
    training = _Training(runner, changes, rows, preserve, kappa, options)
    return training.run(held_out, state, progress)


def _first(
    runner: BlockRunner,
    paths: Sequence[str],
    rank: int,
    seed: int,
    start: dict[str, LowRank] | None,
) -> dict[str, LowRank]:
    """u = 0 and random v, as a LoRA starts; or a patch, its factors brought to one size."""
    generator, device = torch.Generator().manual_seed(seed), runner.model.device
    changes = {}
    for path in paths:
        out_features, in_features = weight_of(runner.model.get_submodule(path)).shape
        v = torch.randn(rank, in_features, generator=generator, dtype=torch.float32)
        v, u = v / in_features**0.5, torch.zeros(rank, out_features, dtype=torch.float32)
        known = None if start is None else start.get(path)
        if known is not None:
            given = known.truncated(rank)
            u[: given.rank], v[: given.rank] = given.u, given.v
        changes[path] = LowRank(u.to(device).requires_grad_(), v.to(device).requires_grad_())
    return changes


class _Training:
    """The factors, their optimiser, and the best factors so far."""

    def __init__(
        self,
        runner: BlockRunner,
        changes: dict[str, LowRank],
        rows: Sequence[Row],
        preserve: Sequence[Row],
        kappa: float,
        options: Distillation,
    ) -> None:
        self.runner, self.changes, self.options = runner, changes, options
        self.rows, self.preserve, self.kappa = list(rows), list(preserve), kappa
        self.parameters = [x for change in changes.values() for x in (change.u, change.v)]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=options.learning_rate, weight_decay=0.0
        )
        self.step = 0
        self.best = (math.inf, 0, self._copy())

    def _copy(self) -> dict[str, LowRank]:
        return {
            path: LowRank(change.u.detach().clone(), change.v.detach().clone())
            for path, change in self.changes.items()
        }

    @contextmanager
    def _patched(self) -> Iterator[dict[str, StaticLinear]]:
        """Within this context the matrices are :class:`StaticLinear`, by path."""
        modules = {path: swap(self.runner.model, path, StaticLinear) for path in self.changes}
        try:
            yield modules
        finally:
            for module in modules.values():
                restore((self.runner.model,), module)

    # -- the loop

    def run(
        self, held_out: Sequence[Row], state: Any, progress: Progress | None
    ) -> tuple[dict[str, LowRank], StaticReport]:
        """All steps, or until the held-out KL has not fallen for ``patience`` measurements."""
        checkpoint = _Checkpoint.of(state, self, held_out)
        checkpoint.read(self)
        rows = (
            [*held_out, *self.preserve[:_MEASURED_TEXTS]],
            self.preserve[_MEASURED_TEXTS:],
        )
        tests, rest = (make_batches(self.runner, x, [0] * len(x), 0.0) for x in rows)
        every = tests + rest
        wanted = ends_with_context(self.runner, every)
        plain = measure(self.runner, every, wanted)
        with torch.no_grad():
            questions, texts = (targets(self.runner, x) for x in (self.rows, self.preserve))
        with self._patched() as modules:
            while not self._ended():
                with torch.enable_grad():
                    _set(modules, self.changes)
                    self._descend(questions, texts)
                self.step += 1
                if self.step % self.options.check_every == 0 or self.step == self.options.steps:
                    self._note(measure(self.runner, tests, wanted[: len(tests)]))
                    checkpoint.write(self)
                if progress is not None:
                    progress(self.step, self.options.steps)
            changes = self.best[2]
            _set(modules, changes)
            tally = measure(self.runner, every, wanted)
        return changes, StaticReport(
            held_out=tally.quality(),
            without=plain.quality(),
            cross_fitted=False,
            preserve_kl=tally.preserved_kl(),
            residual=(),
            ridges=(),
            explained=(),
            steps=self.best[1],
            seconds=0.0,
            nbytes=0,
        )

    def _ended(self) -> bool:
        since_best = self.step - self.best[1]
        patience = self.options.patience * self.options.check_every
        return self.step >= self.options.steps or since_best >= patience

    def _note(self, tally: Tally) -> None:
        """Keep the factors if the held-out loss is the smallest so far; the last ones if nothing is
        held out.
        """
        quality = tally.quality()
        loss = -float(self.step)
        if quality is not None:
            loss = quality.kl + self.kappa * (tally.preserved_kl() or 0.0)
        if not math.isfinite(loss):
            raise ValueError(
                f"expected a finite KL divergence, got {loss} at step {self.step}: lower the"
                " learning rate"
            )
        if loss < self.best[0]:
            self.best = (loss, self.step, self._copy())

    def _descend(self, questions: "list[Target]", texts: "list[Target]") -> None:
        """One step of the optimiser."""
        options = self.options
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + self.step)
        loss = self._loss(_draw(questions, options.batch_size, generator))
        if texts and self.kappa:
            kept = self._loss(_draw(texts, options.preserve_batch_size, generator))
            loss = loss + self.kappa * kept
        gradients = torch.autograd.grad(loss, self.parameters)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(self.parameters, options.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * options.rate(self.step)
        self.optimizer.step()

    def _loss(self, drawn: "list[Target]") -> Tensor:
        """Mean KL(with context ‖ patched) over the tokens that are asked."""
        width = max(len(target.ids) for target in drawn)
        ids = torch.stack([F.pad(x.ids, (0, width - len(x.ids))) for x in drawn])
        asked = torch.stack([F.pad(x.asked, (0, width - len(x.ids))) for x in drawn])
        with torch.no_grad():
            hidden = torch.cat([x.hidden for x in drawn])
            wanted = self.runner.logits(hidden).log_softmax(-1)
        got = self.runner.logits(self.runner.final(ids)[asked]).log_softmax(-1)
        return (wanted.exp() * (wanted - got)).sum(-1).mean()


@dataclass(frozen=True, eq=False)
class Target:
    """A row without its context: ids (T,); the tokens (T,) bool at which the loss is taken, n of
    them; and there the last hidden states (n, d) of the run with the context.
    """

    ids: Tensor
    asked: Tensor
    hidden: Tensor


def targets(runner: BlockRunner, rows: Sequence[Row]) -> list[Target]:
    """The targets of rows: at the answers' tokens, or at all tokens of a preserved text."""
    found = []
    batches = make_batches(runner, rows, [0] * len(rows), 0.0)
    for batch, hidden in zip(batches, ends_with_context(runner, batches), strict=True):
        for at, row in enumerate(batch.rows):
            kept = batch.valid[at]
            asked = kept if row.preserve else batch.answer[at]
            found.append(Target(batch.student.ids[at][kept], asked[kept], hidden[at][asked]))
    return found


def _set(modules: dict[str, StaticLinear], changes: dict[str, LowRank]) -> None:
    for path, module in modules.items():
        module.set_pool(changes[path].u.unsqueeze(0), changes[path].v.unsqueeze(0))


def _draw(targets: list[Target], count: int, generator: torch.Generator) -> list[Target]:
    order = torch.randperm(len(targets), generator=generator)[:count]
    return [targets[i] for i in order.tolist()]


@dataclass(frozen=True)
class _Checkpoint:
    """The file from which a stopped distillation continues; None: no file is written."""

    file: Path | None
    header: dict[str, Any]

    @classmethod
    def of(cls, state: Any, training: _Training, held_out: Sequence[Row]) -> "_Checkpoint":
        if state is None:
            return cls(None, {})
        rows = [asdict(row) for row in (*training.rows, *training.preserve, *held_out)]
        first = hashlib.sha256()  # of the factors from which it starts
        for parameter in training.parameters:
            first.update(parameter.detach().cpu().numpy().data)
        settings = {
            "kind": _KIND,
            "fingerprint": weight_fingerprint(training.runner.model),
            "options": asdict(training.options),
            "shapes": [list(parameter.shape) for parameter in training.parameters],
            "start": first.hexdigest(),
            "data": hashlib.sha256(json.dumps([rows, training.kappa]).encode()).hexdigest(),
        }
        return cls(Path(state) / "distillation.safetensors", settings)

    def write(self, training: _Training) -> None:
        """Write factors, moments of the optimiser and the best factors."""
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for i, parameter in enumerate(training.parameters):
            moments = training.optimizer.state[parameter]
            tensors[f"{i}.value"] = parameter.detach()
            tensors |= {f"{i}.{name}": moments[name] for name in ("exp_avg", "exp_avg_sq")}
        for i, change in enumerate(training.best[2].values()):
            tensors |= {f"best.{i}.u": change.u, f"best.{i}.v": change.v}
        entries = {"step": training.step, "best": list(training.best[:2])}
        content = {name: x.contiguous().cpu() for name, x in tensors.items()}
        write_atomically(self.file, file_parts({**self.header, **entries}, content))

    def read(self, training: _Training) -> None:
        """Continue from the file, if there is one.

        Raises:
            ValueError: it is of another model or distillation.
        """
        if self.file is None or not self.file.exists():
            return
        header, tensors = read_file(self.file)
        for name, value in self.header.items():
            if header.get(name) != value:
                raise ValueError(
                    f"expected a checkpoint of this model and these settings in {self.file}, got"
                    f" one with another {name}: take another folder, or remove it"
                )
        training.step = header["step"]
        with torch.no_grad():
            for i, parameter in enumerate(training.parameters):
                parameter.copy_(tensors[f"{i}.value"])
                moments = {n: tensors[f"{i}.{n}"] for n in ("exp_avg", "exp_avg_sq")}
                training.optimizer.state[parameter] = {
                    "step": torch.tensor(float(training.step)),
                    **{n: x.to(parameter.device) for n, x in moments.items()},
                }
        best = {
            path: LowRank(tensors[f"best.{i}.u"], tensors[f"best.{i}.v"]).to(
                training.runner.model.device
            )
            for i, path in enumerate(training.changes)
        }
        training.best = (header["best"][0], header["best"][1], best)
