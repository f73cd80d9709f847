"""The target of a patch at each token, and how well the patch reaches it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from icl_patch.layers.device_hooks import input_device
from icl_patch.models.language_model import vocabulary
from icl_patch.models.prompts import Tokens
from icl_patch.static.examples import Example, batches, pad
from icl_patch.static.student import Student

LOGITS = 2**24  # that are compared at a time: bounds the memory


@dataclass(frozen=True, eq=False)
class Target:
    """A row of ids without its context, and the run that it should reproduce.

    Attributes:
        ids: (T,), the prompt without its context, and the answer without its last token; or a text.
        asked: (n,) int64, the columns at which the two runs are compared: those that predict the
            answer's tokens, or all columns of a text.
        hidden: (n, d), the head's input at these columns in the run with the context.
        labels: the answer (n,); empty for a text.
    """

    ids: Tokens
    asked: Tensor
    hidden: Tensor
    labels: Tokens


def length_of(target: Target) -> int:
    """The number of a row's ids."""
    return len(target.ids)


@torch.no_grad()
def targets_of(student: Student, examples: Sequence[Example]) -> list[Target]:
    """The targets of answered examples; the model must not be patched.

    Raises:
        ValueError: an activation is NaN or infinite.
    """
    rows = []
    for example in examples:
        assert example.answer is not None
        teacher = (*example.with_context, *example.answer[:-1])
        ids = (*example.without, *example.answer[:-1])
        rows.append((teacher, ids, len(example.answer), example.answer))
    return _targets(student, rows)


@torch.no_grad()
def targets_of_texts(student: Student, texts: Sequence[Sequence[int]]) -> list[Target]:
    """The targets of texts on which the model should not change."""
    return _targets(student, [(tuple(x), tuple(x), len(x), ()) for x in texts])


def _targets(student: Student, rows: Sequence[tuple[Tokens, Tokens, int, Tokens]]) -> list[Target]:
    """Targets of rows: ids of the two runs, the number of asked tokens at their ends, labels."""
    device = input_device(student.model)
    found: dict[int, Target] = {}
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    for batch in batches(order, lambda i: len(rows[i][0]), student.kind):
        final = student.final(pad([rows[i][0] for i in batch], device))
        for hidden, i in zip(final, batch, strict=True):
            teacher, ids, count, labels = rows[i]
            own = hidden[len(teacher) - count : len(teacher)].clone()
            if not own.isfinite().all():
                raise ValueError(
                    "expected finite activations, got NaN or infinity after the last block in the"
                    " run with the context"
                )
            asked = torch.arange(len(ids) - count, len(ids), device=device)
            found[i] = Target(ids, asked, own, labels)
    return [found[i] for i in range(len(rows))]


@dataclass(frozen=True)
class Quality:
    """The patched model compared with the model that has the context, at the answers' tokens.

    Attributes:
        kl: mean KL(with context ‖ patched) in nats per token; tvd: mean total variation distance.
        whole: the share of answers that the patched model gives greedily: every token is its first
            choice.
        tokens: the share of tokens that are its first choice.
        questions: how many answers were measured.
    """

    kl: float
    tvd: float
    whole: float
    tokens: float
    questions: int


@dataclass(frozen=True)
class StaticReport:
    """The measurements of a fit.

    Attributes:
        held_out: the quality on questions that were not fitted; None without such questions.
        without: the quality on the same questions without a patch.
        preserved: the quality on texts that were not fitted, compared with the unpatched model;
            None without such texts.
        fitted: the number of questions that were fitted.
        steps: steps of the optimiser; best_step: the step that gave the patch's factors.
        seconds: the time of the fit; nbytes: the size of the patch.
        warnings: properties of the patch that are unknown, and why.
    """

    held_out: Quality | None
    without: Quality | None
    preserved: Quality | None
    fitted: int
    steps: int
    best_step: int
    seconds: float
    nbytes: int
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "StaticReport":
        """The report that :meth:`to_json` wrote."""
        qualities = {
            name: None if value[name] is None else Quality(**value[name])
            for name in ("held_out", "without", "preserved")
        }
        return cls(**{**value, **qualities, "warnings": tuple(value["warnings"])})

    def __str__(self) -> str:
        lines = []
        if self.held_out is not None and self.without is not None:
            count = self.held_out.questions
            lines.append(
                f"{count} held-out question{'s' * (count > 1)}: KL {self.held_out.kl:.3f} nats a"
                f" token (without a patch {self.without.kl:.3f}), whole answers as with the"
                f" context {self.held_out.whole:.0%} ({self.without.whole:.0%})"
            )
        if self.preserved is not None:
            lines.append(
                f"{self.preserved.questions} preserved texts that were not fitted: KL"
                f" {self.preserved.kl:.3f}"
            )
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines.append(
            f"{self.fitted} questions, {self.steps} steps, {self.seconds:.1f} s,"
            f" {self.nbytes:,} bytes"
        )
        return "\n".join(lines)


@torch.no_grad()
def measure(student: Student, targets: Sequence[Target]) -> Quality | None:
    """The quality of the model as it is now, patched or not, on targets; None without targets. In a
    text a token counts as right if it is the unpatched model's first choice.
    """
    if not targets:
        return None
    kl = tvd = whole = right = tokens = 0.0
    for batch in batches(sorted(targets, key=length_of), length_of, student.kind):
        hidden = student.final(pad([target.ids for target in batch], input_device(student.model)))
        own = [row[target.asked] for row, target in zip(hidden, batch, strict=True)]
        wanted = torch.cat([target.hidden for target in batch]).to(hidden.dtype)
        found = _compared(student, wanted, torch.cat(own))
        for target, part in zip(batch, found.split([len(x) for x in own], 1), strict=True):
            labels = torch.tensor(target.labels or part[3].tolist(), device=part.device)
            is_right = part[2] == labels
            kl, tvd = kl + float(part[0].sum()), tvd + float(part[1].sum())
            right, whole = right + float(is_right.sum()), whole + float(is_right.all())
            tokens += len(labels)
    if not math.isfinite(kl):
        raise ValueError("expected finite logits, got NaN or infinity")
    count = len(targets)
    return Quality(kl / tokens, tvd / tokens, whole / count, right / tokens, count)


def _compared(student: Student, with_context: Tensor, patched: Tensor) -> Tensor:
    """KL, total variation distance, and both first choices, patched and with context, of hidden
    states (n, d): (4, n) fp64.
    """
    count = max(1, LOGITS // vocabulary(student.model))
    parts = []
    for pair in zip(with_context.split(count), patched.split(count), strict=True):
        wanted, got = (student.logits(x).log_softmax(-1) for x in pair)
        kl = (wanted.exp() * (wanted - got)).sum(-1)
        tvd = (wanted.exp() - got.exp()).abs().sum(-1) / 2
        choices = (got.argmax(-1), wanted.argmax(-1))
        parts.append(torch.stack([x.double() for x in (kl, tvd, *choices)]))
    return torch.cat(parts, 1)
