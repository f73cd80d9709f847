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
    latter that the sum misses. It is computed from the vectors, without a matrix. The positions of
    the kept tokens may differ, as they do behind contexts of other lengths.

    Raises:
        ValueError: the patches are of other models, prefixes, kept tokens, blocks or updates, or
            there are no parts.
    """
    if not parts:
        raise ValueError("expected at least one part of the whole patch, got none")
    for part in parts:
        differ = {
            "weights": whole.info.fingerprint != part.info.fingerprint,
            "prefixes": _differ(whole, part, "prefix"),
            "kept tokens": _differ(whole, part, "kept"),
            "blocks": _factors_of_blocks(whole) != _factors_of_blocks(part),
            "updates": whole.info.update != part.info.update,
        }
        if names := [name for name, other in differ.items() if other]:
            raise ValueError(
                "expected patches of one model with the same prefix, kept tokens, blocks and"
                f" update, got other {' and '.join(names)}: {whole!r} of {whole.info.model} and"
                f" {part!r} of {part.info.model}"
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


def _differ(whole: ContextPatch, part: ContextPatch, kind: str) -> bool:
    """Whether two patches have other prefixes or kept tokens."""
    names = f"{kind}_ids", f"{kind}_mask"
    return not all(torch.equal(getattr(whole, name), getattr(part, name)) for name in names)


def _factors_of_blocks(patch: ContextPatch) -> list[tuple[int, set[str]]]:
    """The blocks that a patch changes, and the names of their factors: another version may read a
    block otherwise.
    """
    return [(i, {*layer}) for i, layer in zip(patch.layer_indices, patch.layers, strict=True)]
