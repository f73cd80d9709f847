"""A decode step: both streams of one token through the model, in one pass.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from icl_patch import metrics
from icl_patch.generation.fused_modules import NormBefore
from icl_patch.generation.one_pass_plan import OnePassPlan
from icl_patch.generation.rotary import fused_rotary
from icl_patch.generation.step_inputs import StepInputs
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
from icl_patch.recording.decode_recorder import (
    ExactDecodeRecorder,
    InexactDecodeRecorder,
    close_blocks,
)
from icl_patch.recording.diagnostics import Note
from icl_patch.recording.passes import computing_factors


@dataclass(frozen=True, eq=False)
class StepDetails:
    """What a step leaves for its patch, and for a step that has to be repeated.

    Attributes:
        factors, notes: of every block; the notes for its diagnostics.
        misses: (L, B), the number of elements that an exact factor of each block misses.
            activations: of every block, with the context. Both None for other updates.
    """

    factors: list[Factors]
    notes: list[list[Note]]
    misses: Tensor | None = None
    activations: list[BlockActivations] | None = None


register_dataclass(StepDetails)  # so that the output of a step that is made once can be flattened


@dataclass(frozen=True, eq=False)
class StepOutput:
    """The output of a step.

    Attributes:
        logits: (B, V) of the reduced stream; of an exact step those of the context's, which are
            the same.
        maybe_infeasible: () bool, whether some block may not be able to take up the context, or a
            logit is not finite.
        details: gives the rest, which few steps need.
    """

    logits: Tensor
    maybe_infeasible: Tensor
    details: Callable[[], StepDetails]


RunStep = Callable[[], StepOutput]


class DecodeStep:
    """Both streams of one token through the model, without waiting for the device.

    Args:
        plan: how the model runs both streams.
        inputs: the tensors that the step reads.
        batch: B.
    """

    def __init__(self, plan: OnePassPlan, inputs: StepInputs, batch: int) -> None:
        self.plan, self.inputs, self.batch = plan, inputs, batch
        # of each row of both streams, -1 for none
        index = torch.arange(-batch, batch, device=inputs.current.device)
        self._patch_index = index.clamp(min=-1)

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
                writer_first=self.plan.writer_first,
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
        active = self.plan.layout.active(step_inputs)
        rotary = fused_rotary(self.plan.rotary)
        with computing_factors(recorders), active, self._overrides, self.plan.rounding(), rotary:
            logits = model(**model_inputs).logits[-self.batch :, -1]
        attached.watch.accept()
        misses = close_blocks(recorders) if self.plan.exact else None
        factors = [recorder.factors for recorder in recorders]
        notes = [recorder.notes for recorder in recorders]
        flag, activations = maybe_infeasible(notes, logits), None
        if misses is not None:
            flag, activations = flag | misses.any(), [recorder.context for recorder in recorders]
        details = StepDetails(factors, notes, misses, activations)
        return StepOutput(logits, flag, lambda: details)

    @cached_property
    def _overrides(self) -> ForwardOverrides:
        """All replaced forwards, each module's once."""
        attached = self.plan.attached
        linears = plain_linears(attached.model, attached.block_specs)
        forwards: dict[nn.Module, Forward] = {x: linear_forward(x) for x in linears}
        forwards |= {found.module: found for found in self.plan.fused}
        # the attention's output projections among them, with a shared cache
        forwards |= self.plan.layout.forwards
        return ForwardOverrides([*forwards.items(), *self._head()])

    @cached_property
    def _norm_receivers(self) -> set[AttachedBlock]:
        """The blocks whose recorder gets its input from the fused pre-MLP norm."""
        return {found.block for found in self.plan.fused if isinstance(found, NormBefore)}

    def _head(self) -> list[tuple[nn.Module, Forward]]:
        """The head is the widest matrix of all: it runs only on the last B rows, (2B, 1, d), or
        (B, 1, d) of an exact step with a shared cache -> (B, 1, V).
        """
        head: Any = self.plan.attached.model.get_output_embeddings()
        if not overridable(head):
            return []
        forward = linear_forward(head) if is_plain_linear(head) else head.forward
        return [(head, lambda x: forward(x[-self.batch :]))]


def maybe_infeasible(notes: list[list[Note]], logits: Tensor) -> Tensor:
    """Whether some block may not be able to take up the context, or a logit is not finite, () bool,
    in a few launches.
    """
    flag = ~metrics.all_finite(logits)
    found = [[note.gain for note in block if note.gain is not None] for block in notes]
    # Readers share an input. Those of the same place in all blocks often lie in one tensor.
    places = chain.from_iterable(zip_longest(*found))
    gains = {id(gain): gain for gain in places if gain is not None}.values()
    if not gains:
        return flag
    return flag | (torch.cat([gain.flatten().to(logits.device) for gain in gains]) == 0).any()
