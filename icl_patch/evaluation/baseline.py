"""The run of the model with its context that patched replays are compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch.invariance.arithmetic import arithmetic_here, running_in
from icl_patch.models import kv_cache
from icl_patch.models.forward import media_positions, over_columns
from icl_patch.recording import forward_passes
from icl_patch.recording.sequences import Sequences, assemble, switches, with_media


@dataclass(frozen=True, eq=False)
class BaselineRun:
    """A run of the model with its context.

    Attributes:
        ids, mask: (B, C), the context. inputs: the model's further inputs for it.
        keep_last: tokens before the current one that are kept with it. keep_first: tokens of each
            row that stay in front of them.
        logits: (B, steps, V). tokens: (B, steps), that follow the context.
        lengths: of the rows' answers, (B,). A row that has ended runs on until the longest ends.
    """

    ids: Tensor
    mask: Tensor
    inputs: Mapping[str, Tensor]
    keep_last: int
    keep_first: int
    logits: Tensor
    tokens: Tensor
    lengths: Tensor

    @property
    def counted(self) -> Tensor:
        """The steps of the answers, (B, steps) bool."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return places < self.lengths[:, None]


@torch.no_grad()
def baseline(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    steps: int,
    keep_last: int = 0,
    inputs: Mapping[str, Tensor] | None = None,
    forced: Tensor | None = None,
    arithmetic: str | None = None,
    keep_first: int = 0,
    ends: Sequence[int] = (),
) -> BaselineRun:
    """Run the model with its context, ``steps`` tokens on, or less if all rows have ended.

    The context is cached. The kept tokens then run in one call, or token by token if only the
    current one is kept.

    Args:
        inputs: the model's further inputs for the context.
        forced: tokens (B, steps) to follow; by default the greedy choice.
        arithmetic: of the calls on the kept tokens, as ``"batch_invariant"``; the context runs in
            that of the model's own calls here, which is the default.
        keep_first: of the patches that are compared with this run, which itself has all tokens.
        ends: ids that end a row's answer.
    """
    context, logits, tokens = (ids, mask, inputs or {}, keep_last, keep_first), [], []
    cache = None
    stops, lengths = ids.new_tensor(ends), torch.full_like(ids[:, 0], steps)
    for step in range(steps):
        if bool((lengths <= step).all()):
            break
        sequences, further = sequences_at(model, ids, mask, keep_last, context[2])
        if cache is None or keep_last or switches(model, sequences):
            cache = kv_cache.new_cache(model)
            forward_passes.run_head(model, sequences, cache, **further)
        with running_in(arithmetic or arithmetic_here(model), model):
            logits.append(forward_passes.run_tail(model, sequences, cache)[:, -1])
        tokens.append(logits[-1].argmax(-1) if forced is None else forced[:, step])
        ids, mask = extended(ids, mask, tokens[-1][:, None])
        ended = torch.isin(tokens[-1], stops)
        lengths = torch.where(ended & (lengths > step), step + 1, lengths)
    return BaselineRun(*context, torch.stack(logits, 1), torch.stack(tokens, 1), lengths)


def sequences_at(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    keep_last: int,
    inputs: Mapping[str, Tensor],
    keep_first: int = 0,
) -> tuple[Sequences, dict[str, Tensor]]:
    """All tokens, and the model's further inputs for the head.

    The last ``keep_last + 1`` tokens are kept, the first ``keep_first`` stay, and the others are
    absorbed.
    """
    cut = ids.shape[1] - keep_last - 1
    sequences = assemble(
        ids[:, :cut],
        ids[:, cut:],
        context_mask=mask[:, :cut],
        kept_mask=mask[:, cut:],
        keep_first=keep_first,
    )
    further = over_columns(inputs, sequences.head)
    return with_media(model, sequences, further), further


def extended(ids: Tensor, mask: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their mask (B, S) with further tokens (B, N)."""
    return torch.cat([ids, token_ids], 1), torch.cat([mask, mask.new_ones(token_ids.shape)], 1)


@torch.no_grad()
def in_one_pass(model: PreTrainedModel, run: BaselineRun) -> Tensor:
    """The logits (B, steps, V) of a run's tokens in one pass over all tokens."""
    ids, mask = extended(run.ids, run.mask, run.tokens[:, :-1])
    further = over_columns(run.inputs, ids.shape[1])
    media = media_positions(model, ids, mask, further)
    counted = (mask.long().cumsum(1) - 1).clamp(min=0)
    return forward_passes.run(
        model,
        ids,
        mask,
        counted if media is None else media.head,
        kv_cache.new_cache(model),
        longest=mask.sum(1).max(),
        last_logits=run.tokens.shape[1],
        **further,
    )
