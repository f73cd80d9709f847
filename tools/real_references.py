"""The runs of an untouched model that replays must equal, for each way to make a patch.

The model is another copy, which no patcher has touched, called as transformers' ``generate`` calls
it. All its runs continue from one call on the context.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from real_texts import Batch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from icl_patch import batch_invariant

ONE_PASS = "one pass"
"""A step of ``generate``. Reference: the model's step in ``batch_invariant``."""
TWO_PASSES = "two passes"
"""A step of ``generate(mode="two_pass")``. Reference: the model's step."""
COMPUTE = "compute"
"""``compute`` of all tokens at once. Reference: the model's call on all tokens."""
WAYS = (ONE_PASS, TWO_PASSES, COMPUTE)


@dataclass(frozen=True, eq=False)
class References:
    """The tokens (B, N) that follow the contexts; the current tokens, which begin with the
    context's last; and the logits (B, N, V) of every way's reference.
    """

    tokens: Tensor
    current: Tensor
    logits: dict[str, Tensor]


@torch.no_grad()
def references(model: PreTrainedModel, batch: Batch) -> References:
    """The runs of a model that nothing is attached to."""
    steps = batch.kept_mask.shape[1]
    mask = torch.cat([batch.mask, torch.ones_like(batch.kept_mask[:, 1:])], 1)
    start = batch.ids.shape[1] - 1
    cache = DynamicCache(config=model.config)
    call(model, batch.ids[:, :-1], mask[:, :start], cache, logits_to_keep=1)

    def step_by_step(tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        own, logits, current = copy.deepcopy(cache), [], [batch.ids[:, -1]]
        for step in range(steps):
            seen = mask[:, : start + step + 1]
            logits.append(call(model, current[-1][:, None], seen, own)[:, -1])
            current.append(logits[-1].argmax(-1) if tokens is None else tokens[:, step])
        return torch.stack(logits, 1), torch.stack(current, 1)

    two_passes, followed = step_by_step(batch.tokens)
    current, tokens = followed[:, :-1], followed[:, 1:]
    with batch_invariant(model, attention=False):
        one_pass, _ = step_by_step(tokens)
    kept = torch.cat([batch.mask[:, :-1], batch.kept_mask], 1)
    at_once = call(model, current, kept, copy.deepcopy(cache))
    logits = dict(zip(WAYS, (one_pass, two_passes, at_once), strict=True))
    return References(tokens, current, logits)


def call(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache, **further: Any) -> Tensor:
    """One call on tokens (B, T) over a cache, with the mask (B, S) of all tokens so far."""
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(
        ids, attention_mask=mask, position_ids=positions, past_key_values=cache, **further
    ).logits
