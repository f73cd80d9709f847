"""The tokens of a batch, checked and laid out as head and tail: prefix, context and kept tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch.models.forward import MediaPositions, media_positions
from icl_patch.models.positions import switch_lengths


@dataclass(frozen=True)
class Sequences:
    """``C = [P, Y, X]`` of a batch. The model is run first on the *head* ``[P, Y]``, then on the
    *tail*, which holds the kept tokens.

    The head is left-padded and the tail right-padded, with no padding in between: differences of
    slots are differences of positions.

    Attributes:
        ids: (B, N) int64.
        mask: (B, N) bool.
        absorbed: (B, N) bool, the tokens hidden from the reduced stream. The tail may hold absorbed
            spans too, the same for all rows.
        head: the number of the head's columns.
        media: positions of the head's first columns, where images have no single numbers (M-RoPE).
    """

    ids: Tensor
    mask: Tensor
    absorbed: Tensor
    head: int
    media: MediaPositions | None = None

    @property
    def positions(self) -> Tensor:
        """(B, N) int64; padding has the position of the token before it, or 0. The columns of
        ``media`` have others, see :attr:`head_positions`.
        """
        counted = (self.mask.long().cumsum(1) - 1).clamp(min=0)
        if self.media is not None:
            counted[:, self.media.head.shape[-1] :] += self.media.shift
        return counted

    @property
    def head_positions(self) -> Tensor:
        """(B, H) int64; (3, B, H) with ``media``."""
        counted = self.positions[:, : self.head]
        if self.media is None:
            return counted
        head = self.media.head
        return torch.cat([head, counted[:, head.shape[-1] :].expand(len(head), -1, -1)], -1)

    @property
    def prefix(self) -> Tensor:
        """(B, H) bool, the head's tokens that stay."""
        return (self.mask & ~self.absorbed)[:, : self.head]

    @property
    def longest(self) -> Tensor:
        """() int64, the tokens of the longest row."""
        return self.mask.sum(1).max()

    @property
    def kept_columns(self) -> Tensor:
        """The tail's columns of kept tokens."""
        return (~self.absorbed[0, self.head :]).nonzero().squeeze(1)

    @property
    def kept_slots(self) -> Tensor:
        """(T,) the kept tokens' columns in the whole sequence."""
        return self.head + self.kept_columns


def with_media(
    model: PreTrainedModel, sequences: Sequences, model_inputs: Mapping[str, Any]
) -> Sequences:
    """The sequences with the positions that a model with M-RoPE gives to images in their head.

    model_inputs: the model's further inputs for the head.

    Raises:
        ValueError: as :func:`icl_patch.models.forward.media_positions`.
    """
    head_ids, head_mask = sequences.ids[:, : sequences.head], sequences.mask[:, : sequences.head]
    return replace(sequences, media=media_positions(model, head_ids, head_mask, model_inputs))


def check_tensor(name: str, value: object) -> None:
    """Raises TypeError unless the argument ``name`` is a tensor."""
    if not isinstance(value, Tensor):
        cure = ": pass **encoding, or its tensors" if isinstance(value, Mapping) else ""
        raise TypeError(f"expected {name} as a tensor, got {type(value).__name__}{cure}")


def _as_batch(
    name: str, ids: Tensor, mask: Tensor | None, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    check_tensor(f"{name}_ids", ids)
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"expected {name}_ids (B, T) of integers, got {tuple(ids.shape)} {ids.dtype}"
        )
    if beside is not None and (len(ids), ids.device) != (len(beside), beside.device):
        raise ValueError(
            f"expected {name}_ids with {len(beside)} rows on {beside.device}, got {len(ids)} on"
            f" {ids.device}"
        )
    if mask is None:
        return ids.long(), torch.ones_like(ids, dtype=torch.bool)
    check_tensor(f"{name}_mask", mask)
    if (mask.shape, mask.device) != (ids.shape, ids.device):
        raise ValueError(
            f"expected {name}_mask {tuple(ids.shape)} on {ids.device}, got {tuple(mask.shape)} on"
            f" {mask.device}"
        )
    if not torch.equal(mask, mask.bool().to(mask.dtype)):
        raise ValueError(f"expected {name}_mask of True and False, got other values")
    return ids.long(), mask.bool()


def _check_padding(name: str, mask: Tensor, side: str) -> None:
    begins = mask.long().diff(dim=1) * (1 if side == "left" else -1)  # 1 where tokens begin
    if (begins < 0).any():
        raise ValueError(f"expected {name}_mask with padding on the {side} only")
    if not mask.any(1).all():
        raise ValueError(
            f"expected at least one token in every row of {name}_ids, row"
            f" {int((~mask.any(1)).nonzero()[0])} has none"
        )


def _spans(absorbed: list[tuple[int, int]] | None, width: int) -> list[tuple[int, int]]:
    if absorbed is None:
        return [(0, width)]
    spans = sorted((int(start), int(stop)) for start, stop in absorbed)
    previous = 0
    for start, stop in spans:
        if not previous <= start < stop <= width:
            raise ValueError(
                f"expected absorbed spans (start, stop) within {width} columns, not empty and"
                f" apart, got {absorbed}"
            )
        previous = stop
    if not spans:
        raise ValueError("expected at least one absorbed span, got none")
    return spans


def check_context(context_ids: Tensor, context_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """A left-padded context as int64 ids and bool mask; raises ValueError if it is not one."""
    ids, mask = _as_batch("context", context_ids, context_mask)
    if 0 in ids.shape:
        raise ValueError(
            f"expected at least one row and one token in context_ids, got {tuple(ids.shape)}"
        )
    _check_padding("context", mask, "left")
    return ids, mask


def behind_first(mask: Tensor, keep_first: int) -> Tensor:
    """The tokens of a mask (B, T) without the first ``keep_first`` of every row, which stay.

    Raises:
        ValueError: a negative number.
        TypeError: no integer.
    """
    if not hasattr(keep_first, "__index__"):
        raise TypeError(f"expected keep_first as an integer, got {keep_first!r}")
    if keep_first < 0:
        raise ValueError(f"expected keep_first ≥ 0, got {keep_first}")
    return mask & (mask.cumsum(1) > keep_first)


def absorb_all_but_last(ids: Tensor, mask: Tensor, keep_first: int = 0) -> Sequences:
    """A checked context as sequences with the last token kept, and the first ``keep_first``; a
    context of one token has nothing to absorb.
    """
    absorbed = behind_first(mask, keep_first)
    absorbed[:, -1] = False
    return Sequences(ids, mask, absorbed, ids.shape[1] - 1)


def without_padding(ids: Tensor) -> Sequences:
    """Tokens (B, T) of which none is padding or absorbed, as a tail without a head."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    return Sequences(ids, mask, ~mask, head=0)


def switches(model: PreTrainedModel, sequences: Sequences) -> bool:
    """Whether the last token makes LongRoPE take other factors for these sequences."""
    lengths = switch_lengths(model)
    return bool(lengths) and int(sequences.longest) - 1 in lengths


def assemble(
    context_ids: Tensor,
    kept_ids: Tensor,
    *,
    context_mask: Tensor | None = None,
    kept_mask: Tensor | None = None,
    keep_first: int = 0,
    absorbed: list[tuple[int, int]] | None = None,
) -> Sequences:
    """Lay out context and kept tokens; arguments as in
    :meth:`icl_patch.ContextPatcher.compute`.

    Raises:
        ValueError: a shape, a mask or a span does not fit.
    """
    context_ids, context_mask = check_context(context_ids, context_mask)
    kept_ids, kept_mask = _as_batch("kept", kept_ids, kept_mask, context_ids)
    if kept_ids.shape[1] == 0:
        raise ValueError(f"expected at least one kept token, got kept_ids {tuple(kept_ids.shape)}")
    _check_padding("kept", kept_mask, "right")
    spans = _spans(absorbed, context_ids.shape[1])
    first, head = spans[0]
    hidden = torch.zeros_like(context_mask)
    for start, stop in spans:
        hidden[:, start:stop] = True
    leaving = behind_first(context_mask, keep_first) & hidden
    empty = ~leaving[:, :head].any(1)
    if empty.any():
        row = int(empty.nonzero()[0])
        there = int(context_mask[row, first:head].sum())
        raise ValueError(
            f"expected a token in the first absorbed span of every row, row {row} has "
            + (f"only the first {keep_first}, which stay" if there else "only padding there")
        )
    return Sequences(
        ids=torch.cat([context_ids, kept_ids], 1),
        mask=torch.cat([context_mask, kept_mask], 1),
        absorbed=torch.cat([leaving, torch.zeros_like(kept_mask)], 1),
        head=head,
    )
