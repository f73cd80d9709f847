"""What a pass notes of one block beside its factors: how good they are, and what no change of the
weights can do.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from icl_patch.errors import ControllabilityError
from icl_patch.patch.context_patch import PatchReport, blank_report


@dataclass(frozen=True)
class ControllabilityViolation:
    """What keeps a block from being controllable, for some of B x T tokens.

    Attributes:
        side: "input" (Definition 3 of Goldwaser et al.) or "output" (Definition 4).
        condition: in words.
        rows: (B, T) bool, the tokens whose own change cannot be made.
        always: (B, T) bool, the tokens for which some change could not be made, whether it is
            theirs or not.
    """

    side: str
    condition: str
    rows: Tensor
    always: Tensor


@dataclass(eq=False)
class BlockDiagnostics:
    """The notes on one block, for B x T tokens.

    Working them out takes more launches than a decode step has to spare. Without ``valid`` they are
    only collected, and
    :meth:`resolve` works them out when somebody asks.

    Attributes:
        path: the block's.
        valid: (B, T) bool, the columns that are kept tokens; nothing is said of the others. None
            until it is known.
        report: what was observed, see :class:`icl_patch.patch.context_patch.PatchReport`; None
            without ``valid``.
        obstacles: by their condition.
        collected: what is to be worked out: the methods and their arguments.
    """

    path: str
    valid: Tensor | None
    report: PatchReport | None = None
    violations: dict[str, ControllabilityViolation] = field(default_factory=dict)
    collected: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.valid is not None and self.report is None:
            self.report = blank_report(self.valid)

    def refuse(self, condition: str, rows: Tensor, always: Tensor, side: str = "output") -> None:
        """The rows for which no change of the weights has the effect, and those for which none
        could have every effect.
        """
        if self.valid is None:
            self.collected.append(("refuse", (condition, rows, always, side)))
        else:
            self.violations[condition] = ControllabilityViolation(
                side, condition, rows & self.valid, always & self.valid
            )

    def refuse_at_zero(
        self, condition: str, inverse: Tensor, change: Tensor, side: str = "output"
    ) -> None:
        """The rows whose input is 0 (``inverse`` of its squared norm, too) although their output
        must change.
        """
        if self.valid is None:
            self.collected.append(("refuse_at_zero", (condition, inverse, change, side)))
        else:
            self.refuse(condition, (inverse == 0) & (change != 0).any(-1), inverse == 0, side)

    def reader(self, patched: Tensor, reference: Tensor, change: Tensor) -> None:
        """A reader's outputs with the patch and with the context, and what the context changes in
        it.

        The error is relative to the larger of its outputs with and without the context: a gate has
        one number, which may be near 0.
        """
        if self.valid is None:
            self.collected.append(("reader", (patched, reference, change)))
            return
        size = (
            torch.maximum(reference.abs(), (reference - change).abs())
            .amax(-1)
            .clamp(min=torch.finfo(reference.dtype).tiny)
        )
        error = (patched.float() - reference.float()).abs().amax(-1) / size.float()
        self._largest("reader_error", error if error.dim() == 2 else error.amax(-1))

    def reader_pair(self, out: Tensor, change: Tensor) -> None:
        """The same of a decode step: the outputs (2M, N) with the context and then with the patch,
        and the change (M, N).
        """
        if self.valid is None:
            self.collected.append(("reader_pair", (out, change)))
        else:
            reference, patched, change = (
                x.reshape(*self.valid.shape, -1) for x in (*out.chunk(2), change)
            )
            self.reader(patched, reference, change)

    def inversion(self, status: Tensor) -> None:
        """How an inversion of an RMSNorm ended, (B, T)."""
        if self.valid is None:
            self.collected.append(("inversion", (status,)))
        else:
            self._largest("status", status)

    def experts(self, changed: Tensor) -> None:
        """How many experts are not those chosen with the context, (B, T)."""
        if self.valid is None:
            self.collected.append(("experts", (changed,)))
        else:
            self._largest("experts_changed", changed)

    def closing(self, misses: Tensor, correction: Tensor) -> None:
        """How an exact writer's loop was closed, (B, T) each."""
        self._largest("misses", misses)
        self._largest("correction", correction)

    def _largest(self, name: str, value: Tensor) -> None:
        assert self.valid is not None and self.report is not None
        before = getattr(self.report, name)
        value = torch.where(self.valid, torch.maximum(before, value.to(before.dtype)), 0)
        self.report = replace(self.report, **{name: value})

    def feasibility_checks(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of what is collected: bools of which one is true, and numbers of which one is 0, wherever
        :meth:`check` would refuse a row.
        """
        refused = [arguments[1].flatten() for name, arguments in self.collected if name == "refuse"]
        inverses = {
            id(arguments[1]): arguments[1].flatten()
            for name, arguments in self.collected
            if name == "refuse_at_zero"
        }
        return refused, list(inverses.values())

    def resolve(self, valid: Tensor) -> "BlockDiagnostics":
        """The notes worked out."""
        assert self.valid is None
        resolved = BlockDiagnostics(self.path, valid)
        for name, arguments in self.collected:
            getattr(resolved, name)(*arguments)
        return resolved

    def check(self, columns: Tensor | slice = slice(None), start: int = 0) -> None:
        """Raises ControllabilityError for the first of the kept columns that no change of this
        block's weights can serve.

        ``start``: the number of kept tokens before the first column.
        """
        for condition, obstacle in self.violations.items():
            if obstacle.rows.any():
                row, token = obstacle.rows[:, columns].nonzero()[0].tolist()
                raise ControllabilityError(
                    f"{self.path}, row {row}, kept token {start + token}: {condition}"
                )
