"""Training low-rank changes by gradient descent on a KL divergence."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from icl_patch.layers.device_hooks import has_accelerate_hooks, input_device
from icl_patch.models.forward_override import Forward, ForwardOverrides
from icl_patch.patch.low_rank import LowRank
from icl_patch.static.examples import batches, pad
from icl_patch.static.student import Student
from icl_patch.static.targets import Target, length_of, measure

Progress = Callable[[int, int], None]

_FINAL_RATE = 0.02  # of the learning rate
HARMFUL_KL = 0.2  # nats a token, by which preserved texts may move
_MEASURED_TEXTS = 12  # between the steps; at the end all are
_PENALTY = 100.0  # of a nat beyond half of HARMFUL_KL, where the best step is chosen
_TEXT_TOKENS = 16  # of a preserved text that are compared in a step: their logits cost most


@dataclass(frozen=True)
class Distillation:
    """How a patch is trained.

    Attributes:
        steps: the maximum number of AdamW's steps; a budget of seconds may allow fewer.
        learning_rate: the rate after a warm-up over ``warmup`` steps; it then falls by a cosine to
            2 %.
        batch_size, batch_tokens: the questions per step, and their maximum number of tokens,
            padding included.
        preserve_batch_size: the preserved texts per step.
        check_every: the number of steps between two measurements of the held-out KL.
        patience: the training stops early after this many measurements without a new best.
        clip: the largest norm of the gradient.
        dtype: the dtype of the passes. None means bf16 if the processor multiplies in it, else the
            model's own. An fp32 model is then copied.
        seed: the seed of the first factors and the order of the questions.
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
        if abs(self.seed) >= 2**32:  # those of later steps are a million times as large
            raise ValueError(f"expected a seed below 2³² in size, got {self.seed}")

    def rate(self, step: int, done: float) -> float:
        """The factor of the learning rate at a step, after this share of the fit."""
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return min(1.0, (step + 1) / self.warmup) * (_FINAL_RATE + (1 - _FINAL_RATE) * cosine)

    def dtype_for(self, model: PreTrainedModel) -> torch.dtype:
        """The dtype of the passes."""
        # a model that is spread over devices cannot be copied into another dtype
        if self.dtype is not None or model.dtype != torch.float32 or has_accelerate_hooks(model):
            return self.dtype or model.dtype
        fast = model.device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if fast else model.dtype


class Training:
    """Trains factors towards the smallest loss on held-out targets.

    The loss of a step is the mean KL(with context ‖ patched) over the answers' tokens of its
    questions, plus κ times KL(unpatched ‖ patched) over tokens of its preserved texts. A
    measurement doubles κ if the preserved texts have moved by more than half of the allowed KL.

    Args:
        student: the model in the dtype of the passes, unpatched.
        changes: path -> the factors to train.
        questions, texts: the targets to train on.
        held_out, held_texts: the targets that decide on the best step; without ``held_out`` the
            last step counts.
        kappa: the initial weight κ of the texts.
        say: called with a line for each measurement.
    """

    def __init__(
        self,
        student: Student,
        changes: dict[str, LowRank],
        *,
        questions: Sequence[Target],
        texts: Sequence[Target],
        held_out: Sequence[Target],
        held_texts: Sequence[Target],
        kappa: float,
        options: Distillation,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.student, self.changes, self.options, self.say = student, changes, options, say
        self.questions, self.texts = questions, texts
        self.held_out, self.held_texts = held_out, held_texts[:_MEASURED_TEXTS]
        self.kappa = self.first_kappa = kappa
        self.parameters = [x for change in changes.values() for x in (change.u, change.v)]
        for parameter in self.parameters:
            parameter.requires_grad_()
        rate = options.learning_rate
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=0.0)
        self.step = 0
        self.best = (math.inf, 0, self._copy())
        self._patched = ForwardOverrides(_with_changes(student.model, changes))

    def _copy(self) -> dict[str, LowRank]:
        return {
            path: LowRank(change.u.detach().clone(), change.v.detach().clone())
            for path, change in self.changes.items()
        }

    def run(self, until: float = math.inf, progress: Progress = lambda done, total: None) -> None:
        """Run all steps. Stop earlier if the held-out loss has not fallen for ``patience``
        measurements, or at the time ``until`` of ``time.perf_counter``. The learning rate falls
        with the used share of the steps or of the time, whichever is larger.
        """
        options, began, measured = self.options, time.perf_counter(), 0
        if any(bool(change.u.any()) for change in self.changes.values()):
            self._keep_best()  # the start may be the best
        for questions, texts in self._draws():
            waited, now = self.step - self.best[1], time.perf_counter()
            patient = waited < options.patience * options.check_every
            if self.step == options.steps or now >= until or not patient:
                break
            done = max(self.step / options.steps, (now - began) / (until - began))
            self._descend(questions, texts, options.rate(self.step, done))
            self.step += 1
            if self.step % options.check_every == 0:
                measured = self.step
                self._keep_best()
            progress(self.step, options.steps)
        if measured != self.step:
            self._keep_best()

    def seconds_of_step(self) -> float:
        """Measure the time of one step, without changing the factors."""
        questions, texts = next(self._draws())
        began = time.perf_counter()
        self._descend(questions, texts, 0.0)
        return time.perf_counter() - began

    def _draws(self) -> Iterator[tuple[list[Target], list[Target]]]:
        """The questions and texts of each step."""
        options = self.options
        shuffled = partial(_shuffled, kind=self.student.kind, tokens=options.batch_tokens)
        questions = shuffled(self.questions, options.batch_size, options.seed)
        texts: Iterator[list[Target]] = repeat([])
        if self.texts:
            texts = shuffled(self.texts, options.preserve_batch_size, options.seed + 1)
        return zip(questions, texts, strict=False)

    def _keep_best(self) -> None:
        """Keep the factors if their held-out loss is the smallest so far."""
        with self._patched:
            quality, texts = (measure(self.student, x) for x in (self.held_out, self.held_texts))
        loss, moved = -float(self.step), 0.0 if texts is None else texts.kl
        if quality is not None:
            loss = quality.kl + self.first_kappa * moved
            loss += _PENALTY * max(0.0, moved - HARMFUL_KL / 2)
            self.say(f"step {self.step}: KL {quality.kl:.3f} nats a token on held-out questions")
        if moved > HARMFUL_KL / 2:
            self.kappa *= 2
        if loss < self.best[0]:
            self.best = (loss, self.step, self._copy())

    def _descend(self, questions: list[Target], texts: list[Target], rate: float) -> None:
        """One step of the optimiser, at a share of the learning rate."""
        # the gradient of torch's fused attention takes a quarter of a step on a CPU
        on_cpu = input_device(self.student.model).type == "cpu"
        attention = sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext()
        with self._patched, torch.enable_grad(), attention:
            loss = self._loss(questions)
            if texts:
                loss = loss + self.kappa * self._loss(texts, _TEXT_TOKENS)
            gradients = torch.autograd.grad(loss, self.parameters)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * rate
        self.optimizer.step()

    def _loss(self, targets: list[Target], tokens: int | None = None) -> Tensor:
        """Mean KL(with context ‖ patched) over the tokens that are asked, or some of each row."""
        ids = pad([target.ids for target in targets], input_device(self.student.model))
        hidden = self.student.final(ids)
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


def first_factors(
    matrices: Mapping[str, tuple[int, int]],
    rank: int,
    seed: int,
    start: dict[str, LowRank],
    device: torch.device,
) -> dict[str, LowRank]:
    """u = 0 and random v, as in a LoRA; or the factors of a patch, scaled to equal sizes.

    Of a patch of a lower rank than it has factors, the others stay as in a LoRA: where both u and v
    are 0, so are the gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for path, (n, k) in matrices.items():
        v = torch.randn(rank, k, generator=generator, dtype=torch.float32) / k**0.5
        u = torch.zeros(rank, n, dtype=torch.float32)
        if path in start:
            given = start[path].truncated(rank)
            sizes = given.u.norm(dim=1) * given.v.norm(dim=1)  # the singular values
            above = sizes > torch.finfo(torch.float32).eps * max(n, k) * sizes.max()
            count = int(above.sum())
            u[:count], v[:count] = given.u[:count], given.v[:count]
        changes[path] = LowRank(u.to(device), v.to(device))
    return changes
