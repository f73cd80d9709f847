"""The state of a generation: a growing context, the tensors that a step reads, and its output."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_dataclass
from transformers import Cache

from icl_patch.models.forward import MediaPositions
from icl_patch.recording.attached_block import BlockActivations, Factors
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.recording.diagnostics import BlockDiagnostics
from icl_patch.recording.sequences import Sequences, absorb_all_but_last


class DecodeMode(Enum):
    """How a decode step runs the rows with the context and the rows without it."""

    # the unmodified model, then the current token alone in the shapes of its replay
    TWO_PASS = "two_pass"
    # one pass of 2B rows over a cache of 2B rows
    TWO_STREAM = "two_stream"
    # one pass over a cache of B rows; 2B rows from the attention's output to the block's end
    SHARED_CACHE = "shared_cache"


@dataclass(eq=False)
class StepInputs:
    """The tensors that a step reads: which token it is and where it stands. They keep their
    addresses, so a compiled step can run again.

    Attributes:
        current, positions: (rows, 1) int64, the current token and its position; B rows, or 2B with
            two streams in the cache.
        mask: (rows, capacity) int64, 1 = token.
        cache: all tokens but the current one.
        slot: (1,) int64, the current token's column in a fixed cache; None for a dynamic one.
        length: the number of tokens including the current one.
    """

    current: Tensor
    positions: Tensor
    mask: Tensor
    cache: Cache
    slot: Tensor | None
    length: int

    def advance(self, token_ids: Tensor) -> None:
        """Make ``token_ids`` (B,) the current token, without waiting for the device."""
        self.current.copy_(token_ids.repeat(len(self.current) // len(token_ids)).unsqueeze(1))
        self.positions += 1
        self.mask[:, self.length] = 1
        self.length += 1
        if self.slot is not None:
            self.slot += 1

    def rewind(self) -> None:
        """Undo :meth:`advance`; of the cache too, if it is dynamic.

        A layer with a full window has dropped a token, which only a dynamic cache gets back, after
        ``Cache.activate_past_recording``.
        """
        self.length -= 1
        self.positions -= 1
        self.mask[:, self.length] = 0
        if self.slot is not None:
            self.slot -= 1
        else:
            cache: Any = self.cache
            cache.crop(-1)

    @property
    def visible(self) -> Tensor:
        """The mask over the columns of the cache, including the current token's."""
        return self.mask if self.slot is not None else self.mask[:, : self.length]


@dataclass(frozen=True, eq=False)
class StepOutput:
    """The output of a step.

    Attributes:
        logits: (B, V) of the reduced stream.
        maybe_infeasible: () bool, whether some block may not be able to take up the context.
        factors, diagnostics: of every block.
        misses: (L, B), the number of elements that an exact factor of each block misses; None for
            other updates. activations: of every block, with the context, if there are misses.
        is_overwritten: whether a later step of a CUDA graph has overwritten these tensors.
    """

    logits: Tensor
    maybe_infeasible: Tensor
    factors: list[Factors]
    diagnostics: list[BlockDiagnostics]
    is_overwritten: Callable[[], bool] | None = None
    misses: Tensor | None = None
    activations: list[BlockActivations] | None = None


register_dataclass(StepOutput)  # so that a compiled step's output can be flattened
RunStep = Callable[[], StepOutput]


@dataclass(eq=False)
class DecodeState:
    """A growing context: its tokens, its cache, and how its steps run.

    Attributes:
        attached: the model. mode: how the steps run.
        inputs: which token is the current one; the only owner of the position.
        run: a step of one pass on ``inputs``, eager, compiled or captured; None in two passes.
        ids: (B, capacity) int64. context_mask: (B, C) bool, of the first C columns; the later ones
            hold tokens.
        live: (B, 1) bool, the rows that still generate. The others get no patch.
        fingerprint: of the weights at the start.
        fill: runs the model on a head; returns a new cache with the rows of a step. None unless
            the rotary factors change at some length (LongRoPE).
        media: positions of the context with its images (M-RoPE).
    """

    attached: AttachedModel
    mode: DecodeMode
    inputs: StepInputs
    run: RunStep | None
    ids: Tensor
    context_mask: Tensor
    live: Tensor
    fingerprint: str
    fill: Callable[[Sequences], Cache] | None
    media: MediaPositions | None

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return 1 + self.inputs.length - self.context_mask.shape[1]

    def advance(self, token_ids: Tensor) -> None:
        """Make ``token_ids`` (B,) the current token; the one before joins the context."""
        self.ids[:, self.inputs.length] = token_ids
        self.inputs.advance(token_ids)

    @property
    def tokens(self) -> Tensor:
        """(B, S), the context so far, including the current token."""
        return self.ids[:, : self.inputs.length]

    def sequences(self) -> Sequences:
        """The tokens so far: all but the current one absorbed."""
        return sequences_of(self.tokens, self.context_mask, self.media)


def sequences_of(ids: Tensor, context_mask: Tensor, media: MediaPositions | None) -> Sequences:
    """Tokens (B, S) that began with a context of mask (B, C), and perhaps with images: all but the
    last one absorbed.
    """
    mask = F.pad(context_mask, (0, ids.shape[1] - context_mask.shape[1]), value=True)
    return replace(absorb_all_but_last(ids, mask), media=media)


def maybe_infeasible(diagnostics: list[BlockDiagnostics], like: Tensor) -> Tensor:
    """Whether some block may not be able to take up the context, () bool, in a few launches."""
    checks = [block.feasibility_checks() for block in diagnostics]
    refused = [flag.to(like.device) for flags, _ in checks for flag in flags]
    inverses = [inverse.to(like.device) for _, values in checks for inverse in values]
    flags = [torch.cat(refused).any()] if refused else []
    flags += [(torch.cat(inverses) == 0).any()] if inverses else []
    return torch.stack(flags).any() if flags else like.new_zeros((), dtype=torch.bool)
