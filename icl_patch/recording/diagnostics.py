"""Diagnostics of one block in a pass: how exact its factors are, and for which tokens no change of
the weights has the context's effect.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from icl_patch.errors import ControllabilityError
from icl_patch.patch.context_patch import PatchReport, blank_report
from icl_patch.recording import block_math


@dataclass(frozen=True)
class ControllabilityViolation:
    """A condition under which a block is not controllable, for B x T tokens.

    Attributes:
        side: "input" (Definition 3 of Goldwaser et al.) or "output" (Definition 4).
        condition: in words.
        rows: (B, T) bool, the tokens for which no change of the weights has the context's effect.
        always: (B, T) bool, the tokens for which no change of the weights has the effect of some
            context, perhaps of another one.
    """

    side: str
    condition: str
    rows: Tensor
    always: Tensor


@dataclass(eq=False)
class BlockDiagnostics:
    """The diagnostics of one block, for B x T tokens.

    Attributes:
        path: the block's path.
        valid: (B, T) bool, the columns of kept tokens; the others are ignored.
        report: see :class:`icl_patch.patch.context_patch.PatchReport`.
        violations: the violations by condition.
    """

    path: str
    valid: Tensor
    report: PatchReport
    violations: dict[str, ControllabilityViolation] = field(default_factory=dict)

    @classmethod
    def of(cls, path: str, valid: Tensor, notes: "Iterable[Note]" = ()) -> "BlockDiagnostics":
        """The diagnostics from the notes of a decode step, in which evaluating them would take too
        many launches.
        """
        diagnostics = cls(path, valid, blank_report(valid))
        for note in notes:
            note.method(diagnostics, *note.arguments)
        return diagnostics

    def refuse(self, condition: str, gain: Tensor, change: Tensor, side: str) -> None:
        """Record a violation where ``gain`` is 0 although its part of ``change`` is not.

        gain: (B, T, ...), what the change of a weight is multiplied by, or divided by; change: the
            same with further dimensions. side: see :class:`ControllabilityViolation`.
        """
        dead = gain == 0
        dead = dead.reshape(*dead.shape, *[1] * (change.dim() - dead.dim()))
        self.violations[condition] = ControllabilityViolation(
            side,
            condition,
            (dead & (change != 0)).flatten(2).any(-1) & self.valid,
            dead.flatten(2).any(-1) & self.valid,
        )

    def reader(self, patched: Tensor, reference: Tensor, change: Tensor) -> None:
        """Record the error of a reader's patched output; ``change`` is reference - unpatched.

        The error is relative to the larger of its outputs with and without the context: a gate has
        one number, which may be near 0.
        """
        size = (
            torch.maximum(reference.abs(), (reference - change).abs())
            .amax(-1)
            .clamp(min=torch.finfo(reference.dtype).tiny)
        )
        error = (patched.float() - reference.float()).abs().amax(-1) / size.float()
        self.largest("reader_error", error if error.dim() == 2 else error.amax(-1))

    def reader_pair(self, pair: Tensor, change: Tensor) -> None:
        """:meth:`reader` for the outputs of both streams in one tensor, rows (2M, N)."""
        reference, patched = pair.reshape(2, *change.shape)
        self.reader(patched, reference, change)

    def closing(self, misses: Tensor, *parts: Any) -> None:
        """Record the misses (B, T) and the correction of an exact update.

        parts: the arguments of :func:`icl_patch.recording.block_math.correction`.
        """
        self.largest("misses", misses)
        self.largest("correction", block_math.correction(*parts))

    def largest(self, name: str, value: Tensor) -> None:
        """Record a number (B, T) of the report, unless a larger one has been recorded."""
        before = getattr(self.report, name)
        value = torch.where(self.valid, torch.maximum(before, value.to(before.dtype)), 0)
        self.report = replace(self.report, **{name: value})

    def check(self, start: int = 0) -> None:
        """Raises ControllabilityError for the first token with a violation.

        start: the number of kept tokens before the first one.
        """
        for condition, violation in self.violations.items():
            if violation.rows.any():
                row, token = violation.rows.nonzero()[0].tolist()
                raise ControllabilityError(
                    f"{self.path}, row {row}, kept token {start + token}: {condition}"
                )


class Note(NamedTuple):
    """A call of a method of :class:`BlockDiagnostics` that is still to be made."""

    method: Callable[..., None]
    arguments: tuple[Any, ...]

    @property
    def gain(self) -> Tensor | None:
        """The gain of a call of :meth:`BlockDiagnostics.refuse`; None for other calls."""
        return self.arguments[1] if self.method is BlockDiagnostics.refuse else None


register_dataclass(ControllabilityViolation)
register_dataclass(BlockDiagnostics)
