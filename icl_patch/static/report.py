"""The measurements of a fit."""

from dataclasses import asdict, dataclass
from typing import Any

from icl_patch.static.targets import Quality


@dataclass(frozen=True)
class StaticReport:
    """The measurements of a fit.

    Attributes:
        held_out: on questions that the patch was not fitted on; None if there were none.
        without: the same questions without a patch.
        preserved: on texts that it was not fitted on, beside the model itself; None if there were
            none.
        fitted: the number of questions that it was fitted on.
        steps: of the optimiser; best_step: the one whose factors were taken.
        seconds: of the fit; nbytes: of the patch.
        warnings: what is not known of the patch, and why.
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
