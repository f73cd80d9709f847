"""The quality of a static patch beside the model with its context, and its cost."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from icl_patch.models.language_model import vocabulary
from icl_patch.static.block_runner import Batch, BlockRunner

LOGITS = 2**24  # that are compared at a time: bounds the memory


@dataclass(frozen=True)
class Quality:
    """The patched model beside the model with its context, at the tokens of the answers.

    Attributes:
        kl: mean KL(with context ‖ patched) in nats a token; tvd: mean total variation distance.
        whole: the share of answers that the patched model gives greedily: each of their tokens is
            its first choice.
        tokens: the share of such tokens.
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
        held_out: on questions that the patch was not fitted on; None if there were none.
        without: the same questions without a patch.
        cross_fitted: ``held_out`` is of all questions, each answered by the patch that was fitted
            without its fold; False: of questions that were held out, by the patch itself. There is
            a small leak: a fold's patch of a later block is fitted on the streams of other folds,
            and their patches have seen the fold. Questions that are held out altogether are the
            stricter test.
        preserve_kl: mean KL(model ‖ patched) on the preserved texts, None without any.
        residual: for each block, ``‖out_ctx − out‖ / ‖out_ctx‖`` at the answers' tokens; only of
            a ridge fit.
        ridges, explained: for each block, part -> λ, and the share of its target that it explains
            out of fold.
        steps: of the optimiser, 0 for a ridge fit.
        seconds: of the fit; nbytes: of the patch.
        losses: of ``method="auto"``, method -> :meth:`loss`; the smallest was chosen.
    """

    held_out: Quality | None
    without: Quality | None
    cross_fitted: bool
    preserve_kl: float | None
    residual: tuple[float, ...]
    ridges: tuple[dict[str, float], ...]
    explained: tuple[dict[str, float], ...]
    steps: int
    seconds: float
    nbytes: int
    losses: dict[str, float] = field(default_factory=dict)

    def loss(self, kappa: float) -> float:
        """Held-out KL + κ KL on the preserved texts; infinite if nothing was held out."""
        if self.held_out is None:
            return math.inf
        return self.held_out.kl + kappa * (self.preserve_kl or 0.0)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "StaticReport":
        """The report that :meth:`to_json` wrote."""
        qualities = {
            name: None if value[name] is None else Quality(**value[name])
            for name in ("held_out", "without")
        }
        lists = {name: tuple(value[name]) for name in ("residual", "ridges", "explained")}
        return cls(**{**value, **qualities, **lists})

    def __str__(self) -> str:
        lines = []
        if self.held_out is not None and self.without is not None:
            kind = "cross-fitted" if self.cross_fitted else "held out"
            lines.append(
                f"{self.held_out.questions} questions, {kind}: KL {self.held_out.kl:.3f} (without"
                f" a patch {self.without.kl:.3f}), whole answers {self.held_out.whole:.0%}"
                f" ({self.without.whole:.0%})"
            )
        if self.preserve_kl is not None:
            lines.append(f"preserved texts: KL {self.preserve_kl:.3f}")
        if self.residual:
            worst = max(range(len(self.residual)), key=self.residual.__getitem__)
            lines.append(
                f"residual of the last block {self.residual[-1]:.2f}, largest in block {worst}:"
                f" {self.residual[worst]:.2f}"
            )
        if self.losses:
            losses = (f"{method} {loss:.3f}" for method, loss in self.losses.items())
            lines.append(f"chosen by the KL of both: {', '.join(losses)}")
        lines.append(f"{self.seconds:.1f} s, {self.nbytes:,} bytes")
        return "\n".join(lines)


class Tally:
    """Sums over answers' tokens and preserved tokens."""

    def __init__(self) -> None:
        self.kl = self.tvd = self.right = self.whole = self.preserve_kl = 0.0
        self.tokens = self.questions = self.preserved = 0

    def add(self, batch: Batch, with_context: Tensor, patched: Tensor) -> None:
        """Add a batch's logits (B, T, V), both at the student's tokens."""
        asked = batch.measured
        self._count(batch, _compared(with_context[asked], patched[asked], batch.labels[asked]))

    def add_hidden(
        self, runner: BlockRunner, batch: Batch, with_context: Tensor, patched: Tensor
    ) -> None:
        """Add a batch's hidden states (B, T, d) behind the last block; their logits are computed
        some at a time.
        """
        asked = batch.measured
        count = max(1, LOGITS // vocabulary(runner.model))
        parts = (x.to(asked.device)[asked].split(count) for x in (with_context, patched))
        found = [
            _compared(runner.logits(wanted), runner.logits(got), labels)
            for wanted, got, labels in zip(*parts, batch.labels[asked].split(count), strict=True)
        ]
        self._count(batch, torch.cat(found, 1))

    def _count(self, batch: Batch, found: Tensor) -> None:
        """Add the values (3, n) of the batch's measured tokens."""
        answer, measured = batch.answer, batch.measured
        values = found.new_zeros(3, *measured.shape)
        values[:, measured] = found
        kl, tvd, right = values
        self.kl += float(kl[answer].sum())
        self.tvd += float(tvd[answer].sum())
        self.right += float(right[answer].sum())
        self.tokens += int(answer.sum())
        asked = answer.any(1)
        self.whole += float((right.bool() | ~answer).all(1)[asked].sum())
        self.questions += int(asked.sum())
        preserved = measured & ~answer
        self.preserve_kl += float(kl[preserved].sum())
        self.preserved += int(preserved.sum())

    def summed(self, runner: BlockRunner) -> "Tally":
        """The sums over the processes."""
        names = list(vars(self))
        own = torch.tensor([getattr(self, name) for name in names], dtype=torch.float64)
        total = runner.processes.summed(own.to(runner.model.device)).tolist()
        for name, value in zip(names, total, strict=True):
            setattr(self, name, type(getattr(self, name))(value))
        return self

    def quality(self) -> Quality | None:
        """The means over the answers; None if there were none."""
        if not self.questions:
            return None
        return Quality(
            self.kl / self.tokens,
            self.tvd / self.tokens,
            self.whole / self.questions,
            self.right / self.tokens,
            self.questions,
        )

    def preserved_kl(self) -> float | None:
        """The mean over the preserved tokens; None if there were none."""
        return self.preserve_kl / self.preserved if self.preserved else None


def _compared(with_context: Tensor, patched: Tensor, labels: Tensor) -> Tensor:
    """KL, total variation distance, and whether the label is the first choice, of logits (n, V):
    (3, n) fp64.
    """
    wanted, got = (x.float().log_softmax(-1) for x in (with_context, patched))
    if wanted.isnan().any():
        raise ValueError("expected finite logits, got NaN or infinity in the run with the context")
    kl = (wanted.exp() * (wanted - got)).sum(-1)
    tvd = (wanted.exp() - got.exp()).abs().sum(-1) / 2
    return torch.stack([kl.double(), tvd.double(), (got.argmax(-1) == labels).double()])


@torch.no_grad()
def measure(
    runner: BlockRunner,
    batches: Iterable[Batch],
    with_context: Iterable[Tensor],
    own: Iterable[Tensor] | None = None,
) -> Tally:
    """The tally of batches, from the last hidden states (B, T, d) of each at the student's tokens:
    with the context, see :func:`ends_with_context`, and without it; by default those of the model
    as it is now, patched or not.
    """
    tally = Tally()
    own = (runner.final(batch.student.ids) for batch in batches) if own is None else own
    for batch, wanted, got in zip(batches, with_context, own, strict=True):
        tally.add_hidden(runner, batch, wanted, got)
    return tally.summed(runner)


@torch.no_grad()
def ends_with_context(runner: BlockRunner, batches: Iterable[Batch]) -> list[Tensor]:
    """The last hidden states (B, T, d) of the runs with the context, at the student's tokens; the
    model must not be patched.

    Raises:
        ValueError: an activation is NaN or infinite.
    """
    ends = []
    for batch in batches:
        ends.append(spread(batch, runner.final(batch.teacher.ids)))
        if not ends[-1][batch.valid].isfinite().all():
            raise ValueError(
                "expected finite activations, got NaN or infinity behind the last block in the run"
                " with the context"
            )
    return ends


def spread(batch: Batch, hidden: Tensor) -> Tensor:
    """The teacher's hidden states (B, T', d) at the columns of the student, (B, T, d)."""
    row = torch.arange(len(hidden), device=batch.place.device).unsqueeze(1)
    values: Tensor = hidden.to(row.device)[row, batch.place]
    return values


def plain_logits(runner: BlockRunner, ids: Tensor) -> Tensor:
    """The model's own logits (B, T, V) of right-padded ids."""
    logits: Tensor = runner.model(
        input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
    ).logits
    return logits
