"""Which tokens of a context a patch comes from: how much it changes when they are left out."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from icl_patch.models.block_spec import Block
from icl_patch.models.ranks import check_one_process
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.parameter_changes import parameter_changes
from icl_patch.recording.attached_block import BlockActivations, Factors
from icl_patch.recording.attached_model import HasAttachedModel
from icl_patch.recording.sequences import assemble


@torch.no_grad()
def attribution(
    patcher: HasAttachedModel,
    context_ids: Tensor,
    kept_ids: Tensor,
    spans: Sequence[tuple[int, int]],
    *,
    keep_first: int = 0,
    batch_size: int = 8,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """The relative change of every block's factors when context tokens ``i … j - 1`` are left out::

        a_l(i, j) = mean over the parameters p of block l of
                    sqrt(Σ_t ‖ΔW_pt(C) - ΔW_pt(C without c_i … c_{j-1})‖²
                         / Σ_t ‖ΔW_pt(C)‖²)

    where t are the kept tokens, ``ΔW = u vᵀ`` (or Δb, Δm), and the norm is Frobenius'. 0: the block
    does not notice that the tokens are gone; 1: the difference is as large as the change itself,
    as when the whole context is left out. A block that the context changes by no more than rounding
    does has attribution 0: for no token by more than 2 eps of the dtype (in bf16 1.6 %) of its
    readers' outputs, or without readers of its stream. The later tokens move up: they take the
    positions that they have in the shorter text. The sum over tokens is not the effect of leaving
    all of them out.

    The cost: a patch for each span and one more; spans of one length go together, ``batch_size`` at
    a time. A batch holds its factors in memory, ``batch_size`` times as many as one patch.

    Args:
        patcher: attached to the model; its update computes the patches.
        context_ids: (1, C) int64. kept_ids: (1, T) int64.
        spans: (start, stop) columns of ``context_ids``, each with ``keep_first ≤ start < stop ≤
            C``.
        keep_first: as in :meth:`icl_patch.ContextPatcher.compute`.
        progress: called with (spans done, spans in all).

    Returns:
        (spans, blocks) fp64, on the CPU; 0 for a block without changes above rounding, for every
        span.

    Raises:
        ValueError: a span is not in the absorbed context, there are more rows than one, or
            ``batch_size`` is below 1; or as :meth:`icl_patch.ContextPatcher.compute`.
        UnsupportedModelError: the model is split over processes.
        ControllabilityError: as :meth:`icl_patch.ContextPatcher.compute`.
    """
    attached = patcher.attached_model
    attached.attachment.check_outside()
    attached.require_attached()
    check_one_process(attached.model)
    columns = context_ids.shape[1]
    if len(context_ids) != 1 or len(kept_ids) != 1 or batch_size < 1:
        raise ValueError(
            "expected one row, context_ids (1, C) and kept_ids (1, T), and batch_size ≥ 1, got"
            f" {tuple(context_ids.shape)}, {tuple(kept_ids.shape)} and {batch_size}"
        )
    for start, stop in spans:
        if not keep_first <= start < stop <= columns:
            raise ValueError(
                f"expected spans (start, stop) with {keep_first} ≤ start < stop ≤ {columns}, got"
                f" ({start}, {stop})"
            )
    computed = attached.compute(assemble(context_ids, kept_ids, keep_first=keep_first))
    whole, dtype = computed.patch, attached.model.dtype
    of_blocks = zip(whole.blocks, whole.layers, computed.activations, strict=True)
    reached = torch.tensor([_is_reached(*of_block, dtype) for of_block in of_blocks])
    del computed, of_blocks  # the activations of every block
    found = torch.ones(len(spans), len(whole.layers), dtype=torch.float64)
    # without a context there is no change: 1, as it stands
    places = [place for place, span in enumerate(spans) if span != (keep_first, columns)]
    done = 0
    for batch in _batches(spans, places, batch_size):
        rows = [
            torch.cat([context_ids[0, :start], context_ids[0, stop:]])
            for start, stop in (spans[place] for place in batch)
        ]
        kept = kept_ids.expand(len(batch), -1)
        part = attached.compute(assemble(torch.stack(rows), kept, keep_first=keep_first)).patch
        found[batch] = _relative_changes(whole, part)
        done += len(batch)
        progress(done, len(places))
    return torch.where(reached, found, 0.0)


def _is_reached(
    block: Block, layer: Factors, with_context: BlockActivations, dtype: torch.dtype
) -> bool:
    """Whether the context changes the readers' outputs of a block for some token, or, where it has
    none, the residual stream, by more than rounding does.
    """
    spec = block.spec
    if spec.reads and spec.readers:  # together: a gate has one number, which may be near 0
        changes = torch.cat([layer[f"{name}.u"] for name in spec.readers], -1).double()
        outputs = [torch.cat([with_context.readers[name] for name in spec.readers], -1)]
    else:
        parts = (spec.down, f"{spec.experts}.down_proj")
        names = [f"{part}.{factor}" for part in parts for factor in ("u", "bias_change")]
        of_writer = [layer[name] for name in names if name in layer]
        if not of_writer:  # a scale alone: its change has not the size of what it adds
            return True
        changes = of_writer[0].double() * (spec.residual_multiplier / spec.residual_factor)
        # an exact update also corrects the rounding of the block's output
        outputs = [x for x in (with_context.hidden, with_context.output) if x is not None]
    size = sum(x.double().norm(dim=-1).to(changes.device) for x in outputs)
    # an input that was rounded in either run, and sums in fp32: at most 0.6 of it was seen where a
    # block's attention was 0, and at least 1.9 of it in two trained models in bf16
    limit = 2 * torch.finfo(dtype).eps + 64 * torch.finfo(torch.float32).eps
    return bool((changes.norm(dim=-1) > limit * size).any())


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


def _relative_changes(whole: ContextPatch, part: ContextPatch) -> Tensor:
    """``a_l`` of each row of ``part``: (rows, blocks)."""
    blocks = []
    for block, before, after in zip(whole.blocks, whole.layers, part.layers, strict=True):
        squares = []
        changes = (parameter_changes(block.spec, layer) for layer in (before, after))
        for pair in zip(*changes, strict=True):
            old, new = (change.low_rank() for change in pair)
            size = old.inner(old).sum(-1)
            # ‖ΔW - ΔW'‖², summed over the tokens
            difference = size + (new.inner(new) - 2 * old.inner(new)).sum(-1)
            squares.append(torch.where(size > 0, difference / size, torch.nan).clamp(min=0))
        blocks.append(torch.stack(squares).sqrt().nanmean(0).nan_to_num(nan=0.0))
    return torch.stack(blocks, 1).cpu()
