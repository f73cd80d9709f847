"""Whether a change of weights can have a context's effect in each block of a model.

These are the papers' input- and output-controllability, with the conditions that fail.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from icl_patch.errors import ControllabilityError
from icl_patch.models.block_spec import Block
from icl_patch.models.ranks import check_one_process
from icl_patch.recording.attached_model import HasAttachedModel
from icl_patch.recording.diagnostics import ControllabilityViolation
from icl_patch.recording.sequences import assemble


@dataclass(frozen=True, eq=False)
class BlockControllability:
    """Whether one block is controllable at B x T kept tokens.

    Attributes:
        block: its path and form. kept_mask: (B, T) bool; padding is ignored.
        violations: the conditions that were examined, and the tokens that violate them.

    Source: Goldwaser et al. (2025), Definitions 3 and 4.
    """

    block: Block
    kept_mask: Tensor
    violations: tuple[ControllabilityViolation, ...]

    def _controllable(self, side: str) -> Tensor:
        return ~self._any(v.always for v in self.violations if v.side == side)

    def _any(self, rows: Iterable[Tensor]) -> Tensor:
        return torch.stack([torch.zeros_like(self.kept_mask), *rows]).any(0)

    @property
    def input_controllable(self) -> Tensor:
        """(B, T) bool: for every change of the MLP's input a change of its input matrices has the
        same effect (Definition 3).

        Fails where ``z = 0`` (Lemmas 6 and 7). The MLP of a parallel block reads nothing that the
        context changes, and cannot fail (Lemma 12).
        """
        return self._controllable("input")

    @property
    def output_controllable(self) -> Tensor:
        """(B, T) bool: for every difference a change of the output's parameters produces it
        (Definition 4).

        Fails where ``h = 0`` for a weight writer (Lemma 9) or a stable scale writer (Appendix B),
        where some ``Norm(h)_k = 0`` for a direct scale writer (Lemma 10), where the active experts'
        weights sum to 0 (Lemma 11), and where the block multiplies its MLP's output by 0. A bias
        cannot fail (Lemma 8).
        """
        return self._controllable("output")

    @property
    def takes_up(self) -> Tensor:
        """(B, T) bool: whether there is a patch for this particular context (Theorem 5)."""
        return ~self._any(violation.rows for violation in self.violations)

    def reasons(self, row: int, token: int) -> tuple[str, ...]:
        """Why the block is not controllable at one kept token, in words; nothing if it is."""
        return tuple(
            f"{violation.side}: {violation.condition}"
            for violation in self.violations
            if violation.always[row, token]
        )


class Controllability(tuple[BlockControllability, ...]):
    """The answers of all blocks, in order; printed, they are a table."""

    def __repr__(self) -> str:
        header = ("block", "input", "output", "takes up", "why not")
        rows = [header, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


def _cells(block: BlockControllability) -> tuple[str, ...]:
    """A block's row: the shares of kept tokens for which each holds, and the failing conditions."""
    mask = block.kept_mask
    shares = (
        f"{int((holds & mask).sum())} of {int(mask.sum())}"
        for holds in (block.input_controllable, block.output_controllable, block.takes_up)
    )
    reasons = dict.fromkeys(
        reason for row, token in mask.nonzero().tolist() for reason in block.reasons(row, token)
    )
    return (block.block.path, *shares, "; ".join(reasons))


@torch.no_grad()
def controllability(
    patcher: HasAttachedModel,
    context_ids: Tensor,
    kept_ids: Tensor,
    *,
    context_mask: Tensor | None = None,
    kept_mask: Tensor | None = None,
    keep_first: int = 0,
    absorbed: list[tuple[int, int]] | None = None,
) -> Controllability:
    """Which blocks are input- and output-controllable at the kept tokens without the context, and
    why the others are not.

    The conditions are those of the patcher's update. A block behind one that cannot take up the
    context is judged by the hidden states that reach it.

    Args:
        patcher: attached to the model. The others as in :meth:`icl_patch.ContextPatcher.compute`,
            which raises ControllabilityError where ``takes_up`` is False here.

    Returns:
        One answer per block; ``print`` shows them as a table.

    Raises:
        ValueError: a shape, a mask or a span does not fit.

    Source: Goldwaser et al. (2025), Definitions 3 and 4, Theorem 5, Lemmas 6 to 12.
    """
    attached = patcher.attached_model
    attached.require_attached()
    check_one_process(attached.model)
    sequences = assemble(
        context_ids,
        kept_ids,
        context_mask=context_mask,
        kept_mask=kept_mask,
        keep_first=keep_first,
        absorbed=absorbed,
    )
    try:
        violations = attached.compute(sequences).violations
    except ControllabilityError as error:
        violations = error.violations
    mask = sequences.mask[:, sequences.kept_slots]
    return Controllability(
        BlockControllability(block.block, mask, failed)
        for block, failed in zip(attached.blocks, violations, strict=True)
    )
