"""Training low-rank changes by gradient descent on a KL divergence."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from icl_patch.layers.device_hooks import input_device, is_aligned
from icl_patch.models.forward_override import Forward, Overrides
from icl_patch.patch.atomic_file import write_atomically
from icl_patch.patch.low_rank import LowRank
from icl_patch.patch.serialization import file_parts, read_file
from icl_patch.static.examples import batches, pad
from icl_patch.static.matrices import Matrix
from icl_patch.static.student import Student
from icl_patch.static.targets import Target, length_of, measure

Progress = Callable[[int, int], None]

_KIND = "static_distillation"
_FINAL_RATE = 0.02  # of the learning rate
_TIMED_STEPS = 3  # before the number of steps that a budget holds is chosen
HARMFUL_KL = 0.2  # nats a token, by which preserved texts may move
_MEASURED_TEXTS = 12  # between the steps; at the end all are
_PENALTY = 100.0  # of a nat beyond half of HARMFUL_KL, where the best step is chosen
_TEXT_TOKENS = 16  # of a preserved text that are compared in a step: their logits cost most


@dataclass(frozen=True)
class Distillation:
    """How a patch is trained.

    Attributes:
        steps: of AdamW, at most; a budget of seconds may leave fewer. learning_rate: after a
            warm-up over ``warmup`` steps it falls by a cosine to 2 %.
        batch_size, batch_tokens: questions a step, and at most as many tokens, padding included.
        preserve_batch_size: preserved texts a step.
        check_every: steps between two measurements of the held-out KL; patience: how many of them
            without a new best until it stops early.
        clip: the largest norm of the gradient.
        dtype: of the passes; None: bf16 where the processor multiplies in it, else the model's own.
            An fp32 model is then copied.
        seed: of the first factors and the order of the questions.
    """

    steps: int = 60
    learning_rate: float = 5e-3
    warmup: int = 5
    batch_size: int = 16
    batch_tokens: int = 512
    preserve_batch_size: int = 4
    check_every: int = 10
    patience: int = 5
    clip: float = 1.0
    dtype: torch.dtype | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.steps, self.warmup, self.batch_size, self.batch_tokens)
        least = min(*counts, self.preserve_batch_size, self.check_every, self.patience)
        if least < 1 or not min(self.learning_rate, self.clip) > 0:
            raise ValueError(f"expected positive settings of a distillation, got {self}")

    def rate(self, step: int, steps: int) -> float:
        """The share of the learning rate at a step of ``steps``."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min(1.0, (step + 1) / self.warmup) * (_FINAL_RATE + (1 - _FINAL_RATE) * cosine)

    def dtype_for(self, model: PreTrainedModel) -> torch.dtype:
        """The dtype of the passes."""
        # a model that is spread over devices cannot be copied into another dtype
        if self.dtype is not None or model.dtype != torch.float32 or is_aligned(model):
            return self.dtype or model.dtype
        fast = model.device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if fast else model.dtype


class Training:
    """Factors on their way to the smallest loss on held-out targets.

    The loss of a step is the mean KL(with context ‖ patched) over the answers' tokens of its
    questions, plus κ times that of the unpatched model over tokens of its preserved texts. At each
    measurement at which these have moved by more than half of what they may, κ is doubled.

    Args:
        student: the model in the dtype of the passes, unpatched.
        changes: path -> factors, which are trained.
        first_block: the first that is changed; what lies below is computed once.
        questions, texts: the targets to train on.
        held_out, held_texts: those to choose the best step by; without ``held_out`` the last step
            counts.
        kappa: the weight κ of the texts at the beginning.
    """

    def __init__(
        self,
        student: Student,
        changes: dict[str, LowRank],
        *,
        first_block: int,
        questions: Sequence[Target],
        texts: Sequence[Target],
        held_out: Sequence[Target],
        held_texts: Sequence[Target],
        kappa: float,
        options: Distillation,
    ) -> None:
        self.student, self.changes, self.options = student, changes, options
        self.first_block, self.questions, self.texts = first_block, questions, texts
        self.held_out, self.held_texts = held_out, list(held_texts)[:_MEASURED_TEXTS]
        self.kappa = self.first_kappa = kappa
        self.parameters = [x for change in changes.values() for x in (change.u, change.v)]
        for parameter in self.parameters:
            parameter.requires_grad_()
        rate = options.learning_rate
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=0.0)
        self.step = 0
        self.best = (math.inf, 0, self._copy())
        self._patched = Overrides(_with_changes(student.model, changes))
        self._below = self._computed_once() if first_block else {}

    def _copy(self) -> dict[str, LowRank]:
        return {
            path: LowRank(change.u.detach().clone(), change.v.detach().clone())
            for path, change in self.changes.items()
        }

    @torch.no_grad()
    def _computed_once(self) -> dict[Target, Tensor]:
        """The hidden states (T, d) of every row before the first block that is changed."""
        found = {}
        device = input_device(self.student.model)
        rows = sorted([*self.questions, *self.texts], key=length_of)
        for batch in batches(rows, length_of, self.student.kind):
            hidden = self.student.below(
                pad([target.ids for target in batch], device), self.first_block
            )
            for row, target in zip(hidden, batch, strict=True):
                found[target] = row[: len(target.ids)].clone()
        return found

    def run(
        self,
        until: float = math.inf,
        checkpoint: "Checkpoint | None" = None,
        progress: Progress | None = None,
    ) -> None:
        """All steps; fewer if the held-out loss has not fallen for ``patience`` measurements, or if
        the time ``until``, of ``time.perf_counter``, does not hold them.
        """
        options, steps, measured = self.options, self.options.steps, self.step
        first = self.step
        if not first and any(bool(change.u.any()) for change in self.changes.values()):
            self._keep_best()  # what it starts from may be the best
        began = time.perf_counter()
        for questions, texts in self._draws():
            waited = self.step - self.best[1]
            if self.step >= steps or waited >= options.patience * options.check_every:
                break
            if time.perf_counter() > until:
                break
            self._descend(questions, texts, steps)
            self.step += 1
            is_timed = math.isfinite(until) and self.step - first == _TIMED_STEPS
            if is_timed or self.step % options.check_every == 0 or self.step == steps:
                before, measured = time.perf_counter(), self.step
                self._keep_best()
                after = time.perf_counter()
                if checkpoint is not None:
                    checkpoint.write(self)
            if is_timed:
                of_check, of_step = after - before, (before - began) / _TIMED_STEPS
                left = (until - after - of_check) / (of_step + of_check / options.check_every)
                steps = min(steps, self.step + max(0, int(left)))
            if progress is not None:
                progress(self.step, steps)
        if measured != self.step:
            self._keep_best()

    def _draws(self) -> Iterator[tuple[list[Target], list[Target]]]:
        """The questions and texts of each step from the current one on."""
        options = self.options
        shuffled = partial(_shuffled, kind=self.student.kind, tokens=options.batch_tokens)
        questions = shuffled(self.questions, options.batch_size, options.seed)
        texts: Iterator[list[Target]] = repeat([])
        if self.texts:
            texts = shuffled(self.texts, options.preserve_batch_size, options.seed + 1)
        return islice(zip(questions, texts, strict=False), self.step, None)

    def _keep_best(self) -> None:
        """Keep the factors if their held-out loss is the smallest so far."""
        with self._patched:
            quality, texts = (measure(self.student, x) for x in (self.held_out, self.held_texts))
        loss, moved = -float(self.step), 0.0 if texts is None else texts.kl
        if quality is not None:
            loss = quality.kl + self.first_kappa * moved
            loss += _PENALTY * max(0.0, moved - HARMFUL_KL / 2)
        if moved > HARMFUL_KL / 2:
            self.kappa *= 2
        if loss < self.best[0]:
            self.best = (loss, self.step, self._copy())

    def _descend(self, questions: list[Target], texts: list[Target], steps: int) -> None:
        """One step of the optimiser."""
        with self._patched, torch.enable_grad(), _attention(self.student.model):
            loss = self._loss(questions)
            if texts:
                loss = loss + self.kappa * self._loss(texts, _TEXT_TOKENS)
            gradients = torch.autograd.grad(loss, self.parameters)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * self.options.rate(self.step, steps)
        self.optimizer.step()

    def _loss(self, targets: list[Target], tokens: int | None = None) -> Tensor:
        """Mean KL(with context ‖ patched) over the tokens that are asked, or some of each row."""
        ids = pad([target.ids for target in targets], input_device(self.student.model))
        below = None
        if self.first_block:
            below = pad_sequence([self._below[target] for target in targets], batch_first=True)
        hidden = self.student.final(ids, self.first_block, below)
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.step)
        own, with_context = [], []
        for row, target in zip(hidden, targets, strict=True):
            some = torch.randperm(len(target.asked), generator=generator)[:tokens].to(ids.device)
            own.append(row[target.asked[some]])
            with_context.append(target.hidden[some])
        with torch.no_grad():
            wanted = self.student.logits(torch.cat(with_context)).log_softmax(-1)
        got = self.student.logits(torch.cat(own)).log_softmax(-1)
        return (wanted.exp() * (wanted - got)).sum(-1).mean()


def _shuffled(
    targets: Sequence[Target], count: int, seed: int, *, kind: Callable[[int], int], tokens: int
) -> Iterator[list[Target]]:
    """Batches without end, each target once before any comes again: at most ``count`` of similar
    lengths, with at most ``tokens`` tokens, padding included.
    """
    generator = torch.Generator().manual_seed(seed)

    def order(n: int) -> list[int]:
        found: list[int] = torch.randperm(n, generator=generator).tolist()
        return found

    while True:
        by_length = sorted((targets[i] for i in order(len(targets))), key=length_of)
        groups = batches(by_length, length_of, kind, count=count, tokens=tokens)
        yield from (groups[i] for i in order(len(groups)))


def _with_changes(
    model: PreTrainedModel, changes: dict[str, LowRank]
) -> Iterator[tuple[nn.Module, Forward]]:
    """Each changed module and its forward ``W z + Σ_r (z·v_r) u_r``, in plain torch."""

    def changed(forward: Forward, change: LowRank, z: Tensor) -> Tensor:
        plain: Tensor = forward(z)
        z = z.to(plain.device)
        return plain + F.linear(F.linear(z, change.v.to(z)), change.u.T.to(z))

    for path, change in changes.items():
        module = model.get_submodule(path)
        yield module, partial(changed, module.forward, change)


def _attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Attention as products and a softmax on the CPU: the gradient of torch's fused attention takes
    a quarter of a step there, for rows of a few tokens.
    """
    if input_device(model).type != "cpu":
        return nullcontext()
    kernel: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return kernel


def first_factors(
    matrices: Sequence[Matrix],
    rank: int,
    seed: int,
    start: dict[str, LowRank],
    device: torch.device,
) -> dict[str, LowRank]:
    """u = 0 and random v, as a LoRA starts; or a patch, its factors brought to one size."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for matrix in matrices:
        n, k = matrix.shape
        v = torch.randn(rank, k, generator=generator, dtype=torch.float32) / k**0.5
        u = torch.zeros(rank, n, dtype=torch.float32)
        if matrix.path in start:
            given = start[matrix.path].truncated(rank)
            u[: given.rank], v[: given.rank] = given.u, given.v
        changes[matrix.path] = LowRank(u.to(device), v.to(device))
    return changes


class Checkpoint:
    """The file from which a stopped training continues."""

    def __init__(
        self, folder: str | os.PathLike[str], training: Training, fingerprint: str, data: str
    ) -> None:
        first = hashlib.sha256()  # of the factors from which it starts
        for parameter in training.parameters:
            first.update(parameter.detach().cpu().numpy().data)
        options = asdict(training.options) | {"dtype": str(training.student.model.dtype)}
        self.file = Path(folder) / "distillation.safetensors"
        self.header: dict[str, Any] = {
            "kind": _KIND,
            "fingerprint": fingerprint,
            "options": options,
            "matrices": {path: change.rank for path, change in training.changes.items()},
            "start": first.hexdigest(),
            "data": hashlib.sha256(data.encode()).hexdigest(),
        }

    def write(self, training: Training) -> None:
        """Write factors, moments of the optimiser and the best factors."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for i, parameter in enumerate(training.parameters):
            moments = training.optimizer.state[parameter]
            tensors[f"{i}.value"] = parameter.detach()
            tensors |= {f"{i}.{name}": moments[name] for name in ("exp_avg", "exp_avg_sq")}
        for path, change in training.best[2].items():
            tensors |= {f"best.{path}.u": change.u, f"best.{path}.v": change.v}
        entries = {
            "step": training.step,
            "kappa": training.kappa,
            "best": list(training.best[:2]),
        }
        content = {name: x.contiguous().cpu() for name, x in tensors.items()}
        write_atomically(self.file, file_parts({**self.header, **entries}, content))

    def read(self, training: Training) -> None:
        """Continue from the file, if there is one.

        Raises:
            ValueError: it is of another model or distillation.
        """
        if not self.file.exists():
            return
        header, tensors = read_file(self.file)
        for name, value in self.header.items():
            if header.get(name) != value:
                raise ValueError(
                    f"expected a checkpoint of this model and these settings in {self.file}, got"
                    f" one with another {name}: take another folder, or remove it"
                )
        training.step, training.kappa = header["step"], header["kappa"]
        device = input_device(training.student.model)
        for i, parameter in enumerate(training.parameters):
            parameter.data.copy_(tensors[f"{i}.value"])
            moments = {
                name: tensors[f"{i}.{name}"].to(device) for name in ("exp_avg", "exp_avg_sq")
            }
            step = torch.tensor(float(training.step))
            training.optimizer.state[parameter] = {"step": step, **moments}
        best = {
            path: LowRank(
                tensors[f"best.{path}.u"].to(device), tensors[f"best.{path}.v"].to(device)
            )
            for path in training.changes
        }
        training.best = (header["best"][0], header["best"][1], best)
