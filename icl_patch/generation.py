"""The per-token loop: at every step the context, all of it, becomes a change of weights for the current token."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icl_patch import streams
from icl_patch.passes import Computation
from icl_patch.patch import ContextPatch
from icl_patch.patcher import ContextPatcher


@dataclass(frozen=True, eq=False)
class GenerationStep:
    """One generated token of every row: ``token_ids`` (B,), the ``logits`` (B, V) it was chosen from, and the ``patch`` it took."""

    token_ids: Tensor
    logits: Tensor
    patch: ContextPatch


class History:
    """A growing context with its cache: at each step, everything before the current token is absorbed.

    ``model_inputs`` are further inputs of the model for the pass over all of the context but its last token.
    Several histories on one patcher do not mix: all their state is here, and a pass leaves none in the model.
    """

    def __init__(self, patcher: ContextPatcher, context_ids: Tensor, context_mask: Tensor | None, **model_inputs: Any) -> None:
        patcher.require_attached()
        ids, mask = streams.check_context(context_ids, context_mask)
        self._patcher = patcher
        self._sequences = streams.absorb_all_but_last(ids, mask)
        patcher.check_vocabulary(self._sequences)
        with torch.no_grad():
            self._cache = patcher.prefill(self._sequences, **model_inputs)

    @torch.no_grad()
    def step(self) -> Computation:
        """The patch for the current token; call once a token."""
        self._patcher.require_attached()
        return self._patcher.compute_from(self._cache, self._sequences)

    def append(self, token_ids: Tensor) -> None:
        """Make ``token_ids`` (B,) the current token; the one before joins the context."""
        self._sequences = self._sequences.advanced(token_ids)


def generate(history: History, max_new_tokens: int) -> Iterator[GenerationStep]:
    """Greedy generation on top of a history, from the reduced stream's logits; see :meth:`icl_patch.ContextPatcher.generate`."""
    if max_new_tokens < 0:
        raise ValueError(f"expected max_new_tokens ≥ 0, got {max_new_tokens}")
    return _steps(history, max_new_tokens)


def _steps(history: History, max_new_tokens: int) -> Iterator[GenerationStep]:
    for _ in range(max_new_tokens):
        computation = history.step()
        logits = computation.reduced_logits[:, -1]
        token_ids = logits.argmax(-1)
        yield GenerationStep(token_ids, logits, computation.patch)
        history.append(token_ids)
