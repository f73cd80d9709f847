"""A context that grows by a token a step, each step with a patch of everything before it."""

from dataclasses import replace

import torch
from torch import Tensor

from icl_patch import ContextPatcher
from icl_patch.recording.passes import Computation
from icl_patch.recording.sequences import Sequences, absorb_all_but_last, check_context, switches


class GrowingContext:
    """The cache and the tokens of one context; a pass leaves nothing of them in the model."""

    @torch.no_grad()
    def __init__(
        self, patcher: ContextPatcher, context_ids: Tensor, context_mask: Tensor | None = None
    ) -> None:
        self.attached = patcher.attached_model
        self.sequences = absorb_all_but_last(*check_context(context_ids, context_mask))
        self.cache = self.attached.prefill(self.sequences)

    @torch.no_grad()
    def step(self) -> Computation:
        """The patch of the current token; call once a token."""
        if switches(self.attached.model, self.sequences):
            self.cache = self.attached.prefill(self.sequences)
        return self.attached.compute_from(self.cache, self.sequences)

    def append(self, token_ids: Tensor) -> None:
        """Make ``token_ids`` (B,) the current token."""
        self.sequences = advanced(self.sequences, token_ids)


def advanced(sequences: Sequences, token_ids: Tensor) -> Sequences:
    """The sequences one token later: the tail, one token, joins the absorbed head, and
    ``token_ids`` (B,) are the new tail.
    """
    everything = torch.ones_like(sequences.tail_mask)
    return replace(
        sequences,
        head_ids=sequences.ids,
        head_mask=sequences.mask,
        head_absorbed=torch.cat([sequences.head_absorbed, everything], 1),
        tail_ids=token_ids.unsqueeze(1),
        tail_mask=everything,
    )
