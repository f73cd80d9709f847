"""Which tokens of a context a patch comes from: how much it changes when they are left out."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from icl_patch.analysis.dynamics import Trajectory
from icl_patch.errors import UnsupportedModelError
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.low_rank import LowRank
from icl_patch.patch.parameter_changes import parameter_changes
from icl_patch.recording.attached_model import HasAttachedModel
from icl_patch.recording.sequences import assemble


@torch.no_grad()
def attribution(
    patcher: HasAttachedModel,
    context_ids: Tensor,
    kept_ids: Tensor,
    spans: Sequence[tuple[int, int]],
    *,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The relative change of every block's factors when context tokens ``i … j - 1`` are left out::

        a_l(i, j) = mean over the parameters p of block l of
                    sqrt(Σ_t ‖ΔW_pt(C) - ΔW_pt(C without c_i … c_{j-1})‖²
                         / Σ_t ‖ΔW_pt(C)‖²)

    where t are the kept tokens, ``ΔW = u vᵀ`` (or Δb, Δm), and the norm is Frobenius'. 0: the block
    does not notice that the tokens are gone; 1: the difference is as large as the change itself,
    as when the whole context is left out. The later tokens move up: they take the positions that
    they have in the shorter text. The sum over tokens is not the effect of leaving all of them out.

    The cost: a patch for each span and one more; spans of one length go together, ``batch_size`` at
    a time. A batch holds its factors in memory, ``batch_size`` times as many as one patch.

    Args:
        patcher: attached to the model; its update computes the patches.
        context_ids: (1, C) int64. kept_ids: (1, T) int64.
        spans: (start, stop) columns of ``context_ids``, each with ``0 ≤ start < stop ≤ C``.
        progress: called with (spans done, spans in all).

    Returns:
        (spans, blocks) fp64, on the CPU; 0 for a block without changes.

    Raises:
        ValueError: a span is not in the context, there are more rows than one, or ``batch_size``
            is below 1; or as :meth:`icl_patch.ContextPatcher.compute`.
        UnsupportedModelError: the model is split over processes.
        ControllabilityError: as :meth:`icl_patch.ContextPatcher.compute`.
    """
    attached = patcher.attached_model
    attached.attachment.check_outside()
    attached.require_attached()
    if attached.ranks.size > 1:
        raise UnsupportedModelError(
            f"expected {type(attached.model).__name__} in one process, got it split over"
            f" {attached.ranks.size}: spread it over devices with device_map"
        )
    _check(context_ids, kept_ids, spans, batch_size)
    whole = attached.compute(assemble(context_ids, kept_ids)).patch
    found = torch.ones(len(spans), len(whole.layers), dtype=torch.float64)
    columns = context_ids.shape[1]
    # without a context there is no change: 1, as it stands
    places = [place for place, span in enumerate(spans) if span != (0, columns)]
    done = 0
    for batch in _batches(spans, places, batch_size):
        ids = torch.cat([_without(context_ids, spans[place]) for place in batch])
        part = attached.compute(assemble(ids, kept_ids.expand(len(batch), -1))).patch
        found[batch] = _relative_changes(whole, part)
        done += len(batch)
        if progress is not None:
            progress(done, len(places))
    return found


def _check(
    context_ids: Tensor, kept_ids: Tensor, spans: Sequence[tuple[int, int]], batch_size: int
) -> None:
    if context_ids.dim() != 2 or len(context_ids) != 1 or len(kept_ids) != 1:
        raise ValueError(
            "expected one context (1, C) and its kept tokens (1, T), got"
            f" {tuple(context_ids.shape)} and {tuple(kept_ids.shape)}"
        )
    columns = context_ids.shape[1]
    for start, stop in spans:
        if not 0 <= start < stop <= columns:
            raise ValueError(
                f"expected spans (start, stop) with 0 ≤ start < stop ≤ {columns}, got"
                f" ({start}, {stop})"
            )
    if batch_size < 1:
        raise ValueError(f"expected batch_size ≥ 1, got {batch_size}")


def _batches(
    spans: Sequence[tuple[int, int]], places: list[int], batch_size: int
) -> Iterator[list[int]]:
    """The places of spans of one length: not every model takes padding."""

    def length(place: int) -> int:
        return spans[place][1] - spans[place][0]

    for _, same in groupby(sorted(places, key=length), length):
        rest = list(same)
        for first in range(0, len(rest), batch_size):
            yield rest[first : first + batch_size]


def _without(context_ids: Tensor, span: tuple[int, int]) -> Tensor:
    return torch.cat([context_ids[:, : span[0]], context_ids[:, span[1] :]], 1)


def _relative_changes(whole: ContextPatch, part: ContextPatch) -> Tensor:
    """``a_l`` of each row of ``part``: (rows, blocks)."""
    blocks = []
    for block, before, after in zip(whole.blocks, whole.layers, part.layers, strict=True):
        ratios = []
        for old, new in zip(
            parameter_changes(block.spec, before),
            parameter_changes(block.spec, after),
            strict=True,
        ):
            size, difference = _size_and_difference(old.low_rank(), new.low_rank())
            ratio = difference / torch.where(size > 0, size, 1.0)
            ratios.append(torch.where(size > 0, ratio, torch.nan))
        blocks.append(torch.stack(ratios).nanmean(0).nan_to_num(nan=0.0))
    return torch.stack(blocks, 1).cpu()


def _size_and_difference(old: LowRank, new: LowRank) -> tuple[Tensor, Tensor]:
    """``sqrt(Σ_t ‖ΔW_t‖²)`` and the same of the differences: (rows,) each."""
    index = None
    if old.index is not None and new.index is not None:
        index = torch.stack([old.index.expand_as(new.index), new.index])
    u, v = (torch.stack([a.expand_as(b), b]) for a, b in ((old.u, new.u), (old.v, new.v)))
    pair = Trajectory(LowRank(u, v, index))
    return pair.norms()[0].norm(dim=-1), pair.step_norms()[0].norm(dim=-1)
