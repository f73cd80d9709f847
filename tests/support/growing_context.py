"""A context that grows by a token a step, each step with a patch of everything before it."""

import torch
from torch import Tensor

from icl_patch import ContextPatcher
from icl_patch.recording.passes import Computation
from icl_patch.recording.sequences import absorb_all_but_last, check_context, switches


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
        self.sequences = self.sequences.advanced(token_ids)
