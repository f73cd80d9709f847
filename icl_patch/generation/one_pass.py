"""One pass of both streams of one token: how a model runs it, and the step itself.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from transformers import Cache

from icl_patch.generation.fused_modules import fused_modules
from icl_patch.generation.shared_cache import SharedCacheStreams, attending
from icl_patch.invariance.arithmetic import InvariantModules
from icl_patch.models.attention_mask import OneToken, restricted_attention
from icl_patch.models.forward import inputs
from icl_patch.models.forward_override import (
    Forward,
    ForwardOverrides,
    is_plain_linear,
    linear_forward,
    overridable,
    plain_linears,
)
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations, Factors
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.recording.decode_recorder import (
    ExactDecodeRecorder,
    InexactDecodeRecorder,
    close_loops,
)
from icl_patch.recording.diagnostics import Note
from icl_patch.recording.passes import recording


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
        factors, notes: of every block; the notes for its diagnostics.
        misses: (L, B), the number of elements that an exact factor of each block misses.
            activations: of every block, with the context. Both None for other updates.
        is_overwritten: whether a later step of a CUDA graph has overwritten these tensors.
    """

    logits: Tensor
    maybe_infeasible: Tensor
    factors: list[Factors]
    notes: list[list[Note]]
    is_overwritten: Callable[[], bool] | None = None
    misses: Tensor | None = None
    activations: list[BlockActivations] | None = None


register_dataclass(StepOutput)  # so that a compiled step's output can be flattened
RunStep = Callable[[], StepOutput]


class OnePass:
    """How an attached model runs both streams of one token in one pass, for as long as
    nothing in the model changes.

    Args:
        attached: the model.
        mode: two streams in the cache, or a shared one.

    Attributes:
        shared: how both streams share one cache; None if each has its own rows in it.
        fused: the norms and gated MLPs that run as single operations; none for an exact update,
            whose replay has to run the same modules.

    Raises:
        UnsupportedModelError: the blocks do not allow a shared cache.
    """

    def __init__(self, attached: AttachedModel, mode: DecodeMode) -> None:
        self.attached, self.mode, self.exact = attached, mode, attached.update == "exact"
        model, blocks = attached.model, attached.blocks
        self.shared = (
            SharedCacheStreams(model, blocks, context_only=self.exact)
            if mode is DecodeMode.SHARED_CACHE
            else None
        )
        self.fused = [] if self.exact else fused_modules(model, blocks)
        # of a block that is its own mixture, the block
        mixtures = [block.mixture or block.module for block in blocks if block.experts is not None]
        # an exact step runs in the batch-invariant arithmetic, in which both streams round alike
        self.arithmetic: Callable[[], AbstractContextManager[None]] = (
            InvariantModules(model, mixtures).active if self.exact else nullcontext
        )


class DecodeStep:
    """Both streams of one token through the model, without waiting for the device.

    Args:
        plan: how the model runs both streams.
        inputs: the tensors that the step reads.
        batch: B.
        for_inductor: whether the step is written for a compiler, which fuses small operations but
            cannot see into ours, see :class:`DecodeRecorder`.
    """

    def __init__(
        self, plan: OnePass, inputs: StepInputs, batch: int, *, for_inductor: bool = False
    ) -> None:
        self.plan, self.inputs, self.batch = plan, inputs, batch
        # of each row of both streams, -1 for none
        index = torch.arange(-batch, batch, device=inputs.current.device)
        self._patch_index, self._for_inductor = index.clamp(min=-1), for_inductor
        self._fused = [] if for_inductor else plan.fused

    def __call__(self) -> StepOutput:
        """Run the current token."""
        attached, step_inputs = self.plan.attached, self.inputs
        model: Any = attached.model
        kind: Any = ExactDecodeRecorder if self.plan.exact else InexactDecodeRecorder
        recorders = [
            kind(
                block,
                attached.update,
                self._patch_index,
                receives_norm_input=block in self._norm_receivers,
                for_inductor=self._for_inductor,
            )
            for block in attached.blocks
        ]
        model_inputs = inputs(
            model,
            step_inputs.current,
            step_inputs.visible,
            step_inputs.positions,
            step_inputs.cache,
            last_logits=1,
        )
        with recording(recorders), self._attention(), self._overrides, self.plan.arithmetic():
            logits = model(**model_inputs).logits[-self.batch :, -1]
        misses = close_loops(recorders) if self.plan.exact else None
        factors = [recorder.factors for recorder in recorders]
        notes = [recorder.notes for recorder in recorders]
        flag, activations = maybe_infeasible(notes, logits), None
        if misses is not None:
            flag, activations = flag | misses.any(), [recorder.context for recorder in recorders]
        return StepOutput(logits, flag, factors, notes, misses=misses, activations=activations)

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Within this context the rows without the context attend to the current token alone."""
        shared, model = self.plan.shared, self.plan.attached.model
        if shared is not None:
            with shared.active(self.inputs.slot):
                yield
        else:
            visibility = OneToken(self.inputs.mask, batch=self.batch)
            with restricted_attention(model, visibility), attending(lambda *_: None):
                yield

    @cached_property
    def _overrides(self) -> ForwardOverrides:
        """All replaced forwards, each module's once."""
        attached, shared = self.plan.attached, self.plan.shared
        linears = plain_linears(attached.model, attached.block_specs)
        forwards: dict[nn.Module, Forward] = {x: linear_forward(x) for x in linears}
        forwards |= {found.module: found for found in self._fused}
        # the attention's output projections among them, on both streams of a shared cache
        forwards |= {} if shared is None else dict(shared.forwards)
        return ForwardOverrides([*forwards.items(), *self._head()])

    @cached_property
    def _norm_receivers(self) -> set[AttachedBlock | None]:
        """The blocks whose recorder gets its input from the fused pre-MLP norm."""
        return {found.block for found in self._fused}

    def _head(self) -> list[tuple[nn.Module, Forward]]:
        """The head is the widest matrix of all: it runs only on the rows without the context,
        (2B, 1, d) -> (B, 1, V).
        """
        head: Any = self.plan.attached.model.get_output_embeddings()
        if not overridable(head):
            return []
        forward = linear_forward(head) if is_plain_linear(head) else head.forward
        return [(head, lambda x: forward(x[-self.batch :]))]


def maybe_infeasible(notes: list[list[Note]], like: Tensor) -> Tensor:
    """Whether some block may not be able to take up the context, () bool, in a few launches."""
    refused = (arguments for block in notes for name, arguments in block if name == "refuse")
    gains = {id(gain): gain for _, gain, *_ in refused}.values()  # readers share an input
    if not gains:
        return like.new_zeros((), dtype=torch.bool)
    return (torch.cat([gain.flatten().to(like.device) for gain in gains]) == 0).any()
