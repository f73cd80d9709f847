"""Replay: the kept tokens with a patch, over a cache of the prefix, without the context."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from icl_patch.invariance.arithmetic import running_in
from icl_patch.models import kv_cache
from icl_patch.models.attention_mask import Visibility
from icl_patch.models.forward import counts_slots
from icl_patch.models.pipeline import stage_of
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording import forward_passes
from icl_patch.recording.activation_capture import observe
from icl_patch.recording.attached_block import BlockActivations, HasBlocks, replaying


def calls_of(tokens: int, recurrent: bool) -> list[slice]:
    """The columns of each call of the model: all at once, or one by one for a recurrent model,
    because its class continues from a state with one token a call only.
    """
    if recurrent:
        return [slice(token, token + 1) for token in range(tokens)]
    return [slice(0, tokens)]


def replay_logits(attached: HasBlocks, patch: ContextPatch) -> Tensor:
    """Replay a patch: logits (B, T, V)."""
    cache = prefix_cache(attached.model, patch)
    parts = calls_of(patch.kept_ids.shape[1], attached.recurrent)
    return torch.cat([_replay_part(attached, patch, cache, part) for part in parts], 1)


def replay_observed(
    attached: HasBlocks, patch: ContextPatch
) -> tuple[Tensor, list[BlockActivations]]:
    """Replay a patch: logits (B, T, V), and every block's activations."""
    logits, activations, cache = [], [], prefix_cache(attached.model, patch)
    for part in calls_of(patch.kept_ids.shape[1], attached.recurrent):
        with observe(attached.blocks) as observed:
            logits.append(_replay_part(attached, patch, cache, part))
        activations.append(observed)
    joined = [BlockActivations.joined(parts) for parts in zip(*activations, strict=True)]
    return torch.cat(logits, 1), joined


def replay_compared(
    attached: HasBlocks, patch: ContextPatch, outputs: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Replay a patch and compare every block's sum with ``outputs``, (B, T, d) each: logits (B, T,
    V), and how many elements differ, (L, B, T) int64.

    NaN counts as equal to NaN; columns of padding count as equal.
    """
    misses = torch.zeros(
        len(outputs), *patch.kept_mask.shape, dtype=torch.int64, device=patch.kept_mask.device
    )
    logits, cache = [], prefix_cache(attached.model, patch)
    for part in calls_of(patch.kept_ids.shape[1], attached.recurrent):

        def compare(total: Tensor, layer: int, part: slice = part) -> None:
            output = outputs[layer]
            assert output is not None
            target = output[:, part]
            total = total.as_subclass(Tensor).reshape(target.shape)
            differs = (total != target) & ~(total.isnan() & target.isnan())
            missed = differs.sum(-1).to(misses.device)
            misses[layer, :, part] = missed * patch.kept_mask[:, part]

        with ExitStack() as hooks:
            for layer, block in enumerate(attached.blocks):
                block.on_end(hooks, lambda total, layer=layer: compare(total, layer))
            logits.append(_replay_part(attached, patch, cache, part))
    if stage_of(attached.model) is not None:
        parts = attached.ranks.joined([{"misses": misses}], misses.device)
        misses = torch.cat([part["misses"] for part in parts])
    return torch.cat(logits, 1), misses


def _replay_part(attached: HasBlocks, patch: ContextPatch, cache: Cache, part: slice) -> Tensor:
    """Replay the kept tokens in the columns ``part``, on top of those before them."""
    layers = [
        {name: x if x.dim() == 1 else x[:, part] for name, x in patch.layers[place].items()}
        for place in attached.places
    ]
    with running_in(patch.info.arithmetic), replaying(attached.blocks, layers):
        return run_kept(attached.model, patch, cache, part)


def prefix_cache(model: PreTrainedModel, patch: ContextPatch) -> DynamicCache:
    """A cache of the prefix alone, from the unmodified model, with :func:`empty_slots`."""
    cache, count = kv_cache.new_cache(model), empty_slots(model, patch)
    start = patch.prefix_ids.shape[1]
    tokens = (patch.prefix_ids, patch.prefix_mask, patch.prefix_positions)
    if count and not start:  # the empty slots need the shapes of some token's
        tokens = (patch.kept_ids[:, :1], patch.kept_mask[:, :1], patch.position_ids[:, :1])
    if start or count:
        forward_passes.run(model, *tokens, cache, longest=patch.info.longest, last_logits=1)
    if count:
        kv_cache.append_empty(cache, start, count)
    return cache


def empty_slots(model: PreTrainedModel, patch: ContextPatch) -> int:
    """How many slots of the cache a replay leaves empty where the context was: none, unless the
    model numbers its tokens by slots.
    """
    if not counts_slots(model):
        return 0
    return int(patch.kept_slots[0, 0]) - patch.prefix_ids.shape[1]


def run_kept(
    model: PreTrainedModel, patch: ContextPatch, cache: Cache, part: slice = slice(None)
) -> Tensor:
    """Run kept tokens on top of the prefix and the kept tokens before them, masked as if the
    context stood between: logits (B, T, V).
    """
    empty = patch.kept_mask.new_zeros(len(patch.kept_mask), empty_slots(model, patch))
    mask = torch.cat([patch.prefix_mask, empty, patch.kept_mask], 1)
    positions = torch.cat([patch.prefix_positions, empty.long(), patch.position_ids], 1)
    slots = torch.cat([patch.prefix_slots, empty.long(), patch.kept_slots], 1)
    # Chunks are counted from a row's first token, which has another column in the whole sequence.
    moved = (~patch.prefix_mask).sum(1) - (patch.kept_slots - patch.position_ids)[:, 0]
    slots = slots + moved.unsqueeze(1)
    part = slice(*part.indices(patch.kept_ids.shape[1]))
    until = slice(0, mask.shape[1] - patch.kept_ids.shape[1] + part.stop)
    visibility = Visibility(torch.ones_like(mask)[:, until], slots[:, until], positions[:, until])
    return forward_passes.run(
        model,
        patch.kept_ids[:, part],
        mask[:, until],
        patch.position_ids[:, part],
        cache,
        visibility,
        longest=patch.info.longest,
    )
