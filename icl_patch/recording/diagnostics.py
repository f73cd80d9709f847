"""Diagnostics of one block in a pass: how exact its factors are, and which tokens no change of the
weights can serve.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from icl_patch.errors import ControllabilityError
from icl_patch.patch.context_patch import PatchReport, blank_report

_Method = TypeVar("_Method", bound=Callable[..., None])


def _collected(method: _Method) -> _Method:
    """Decorate a method of diagnostics whose calls are collected while there is no ``valid``."""

    @wraps(method)
    def collect(diagnostics: "BlockDiagnostics", *arguments: Any) -> None:
        if diagnostics.valid is None:
            diagnostics.collected.append((method.__name__, arguments))
        else:
            method(diagnostics, *arguments)

    return cast(_Method, collect)


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

    To evaluate them takes too many launches for a decode step. So without ``valid`` the calls are
    only collected, and :meth:`resolve` evaluates them later.

    Attributes:
        path: the block's path.
        valid: (B, T) bool, the columns of kept tokens; the others are ignored. None while calls
            are collected.
        report: see :class:`icl_patch.patch.context_patch.PatchReport`; None without ``valid``.
        violations: the violations by condition.
        collected: the collected calls: a method's name and its arguments.
    """

    path: str
    valid: Tensor | None
    report: PatchReport | None = None
    violations: dict[str, ControllabilityViolation] = field(default_factory=dict)
    collected: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.valid is not None and self.report is None:
            self.report = blank_report(self.valid)

    @_collected
    def refuse(self, condition: str, rows: Tensor, always: Tensor, side: str = "output") -> None:
        """Record a violation, see :class:`ControllabilityViolation` for ``rows`` and ``always``."""
        assert self.valid is not None
        self.violations[condition] = ControllabilityViolation(
            side, condition, rows & self.valid, always & self.valid
        )

    @_collected
    def refuse_at_zero(
        self, condition: str, inverse: Tensor, change: Tensor, side: str = "output"
    ) -> None:
        """Record a violation for the rows with an input of 0 although their output must change.

        inverse: (B, T), 1 / the input's squared norm, or 0 for an input of 0.
        """
        self.refuse(condition, (inverse == 0) & (change != 0).any(-1), inverse == 0, side)

    @_collected
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
        self._largest("reader_error", error if error.dim() == 2 else error.amax(-1))

    @_collected
    def reader_pair(self, pair: Tensor, change: Tensor) -> None:
        """:meth:`reader` for the outputs of both streams in one tensor, rows (2M, N)."""
        reference, patched = pair.reshape(2, *change.shape)
        self.reader(patched, reference, change)

    @_collected
    def inversion(self, status: Tensor) -> None:
        """Record the status of an RMSNorm inversion, (B, T)."""
        self._largest("status", status)

    @_collected
    def experts(self, changed: Tensor) -> None:
        """Record how many chosen experts differ from those chosen with the context, (B, T)."""
        self._largest("experts_changed", changed)

    @_collected
    def closing(self, misses: Tensor, correction: Tensor) -> None:
        """Record the misses and the correction of an exact update, (B, T) each."""
        self._largest("misses", misses)
        self._largest("correction", correction)

    def _largest(self, name: str, value: Tensor) -> None:
        assert self.valid is not None and self.report is not None
        before = getattr(self.report, name)
        value = torch.where(self.valid, torch.maximum(before, value.to(before.dtype)), 0)
        self.report = replace(self.report, **{name: value})

    def feasibility_checks(self) -> tuple[list[Tensor], list[Tensor]]:
        """Flags and values (B, 1) of the collected calls: if no flag is True and no value is 0,
        :meth:`check` passes.
        """
        refused = [arguments[1] for name, arguments in self.collected if name == "refuse"]
        inverses = {
            id(arguments[1]): arguments[1]
            for name, arguments in self.collected
            if name == "refuse_at_zero"
        }
        return refused, list(inverses.values())

    def resolve(self, valid: Tensor) -> "BlockDiagnostics":
        """The diagnostics with the collected calls evaluated, on their device."""
        assert self.valid is None
        collected = [x for _, arguments in self.collected for x in arguments]
        device = next((x.device for x in collected if isinstance(x, Tensor)), valid.device)
        valid = valid.to(device)
        resolved = BlockDiagnostics(self.path, valid)
        for name, arguments in self.collected:
            getattr(resolved, name)(*arguments)
        return resolved

    def check(self, start: int = 0) -> None:
        """Raises ControllabilityError for the first token that no change of the weights can serve.

        start: the number of kept tokens before the first one.
        """
        for condition, violation in self.violations.items():
            if violation.rows.any():
                row, token = violation.rows.nonzero()[0].tolist()
                raise ControllabilityError(
                    f"{self.path}, row {row}, kept token {start + token}: {condition}"
                )


register_dataclass(ControllabilityViolation)
register_dataclass(BlockDiagnostics)  # part of a compiled step's output
