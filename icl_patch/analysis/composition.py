"""Whether the patches of two contexts add up to the patch of both."""

from collections.abc import Sequence

import torch
from torch import Tensor

from icl_patch.analysis.dynamics import named_changes
from icl_patch.patch.context_patch import ContextPatch


def additivity(whole: ContextPatch, parts: Sequence[ContextPatch]) -> dict[str, Tensor]:
    """How far the changes of ``parts`` are from adding up to those of ``whole``, by parameter::

        ‖ΔW - Σ_i ΔW_i‖_F / ‖ΔW‖_F       (B, T) fp64; NaN where ΔW = 0

    0: they add up. For the patches of two contexts and the patch of both, it is the share of the
    latter that the sum misses. It is computed from the vectors, without a matrix.

    Raises:
        ValueError: the patches are of other kept tokens, blocks or updates, or there are no parts.
    """
    if not parts:
        raise ValueError("expected at least one part of the whole patch, got none")
    for part in parts:
        differ = {
            "kept tokens": not torch.equal(whole.kept_ids, part.kept_ids),
            "blocks": whole.layer_indices != part.layer_indices,
            "updates": whole.info.update != part.info.update,
        }
        if names := [name for name, other in differ.items() if other]:
            raise ValueError(
                "expected patches of the same kept tokens, blocks and update, got other"
                f" {' and '.join(names)}: {whole!r} and {part!r}"
            )
    found = {}
    for named in zip(*map(named_changes, (whole, *parts)), strict=True):
        first, *others = (change.low_rank() for _, change in named)
        slots = [(1, first), *((-1, other) for other in others)]
        square = sum(a * b * x.inner(y) for a, x in slots for b, y in slots)
        size = first.norm()
        share = torch.as_tensor(square).clamp(min=0).sqrt() / size
        found[named[0][0]] = torch.where(size > 0, share, torch.nan)
    return found
