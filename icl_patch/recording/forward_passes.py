"""Forward passes of the model over the parts of a sequence: all of it, its head, or its tail."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel

from icl_patch.models.attention_mask import Visibility, restricted_attention
from icl_patch.models.forward import call
from icl_patch.models.kv_cache import new_cache
from icl_patch.models.positions import rotated_as_one_call
from icl_patch.recording.sequences import Sequences


def run(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor | None,
    cache: Cache,
    visibility: Visibility | None = None,
    *,
    longest: Tensor | int,
    last_logits: int = 0,
    **model_inputs: Any,
) -> Tensor:
    """One forward of the model: ids (B, T), mask over all slots of the cache (B, S), positions (B,
    T) -> logits (B, T, V).

    The cache grows by T tokens.

    visibility: restricts the attention, if given.
    longest: the number of tokens in the longest row of the whole sequences; this call may get a
        part of them.
    last_logits: compute the logits of only this many last tokens; 0 for all.
    """
    restricted = nullcontext() if visibility is None else restricted_attention(model, visibility)
    with restricted, rotated_as_one_call(model, longest):
        logits = call(model, ids, mask, positions, cache, last_logits, **model_inputs)
    if mask.shape[1] == 1:  # recurrent layers leave padding out in calls of several tokens only
        _forget(cache, ~mask[:, 0].bool())
    return logits


def _forget(cache: Cache, rows: Tensor) -> None:
    """Reset the recurrent states of rows (B,) bool."""
    states = [*getattr(cache, "linear_cache", ())]  # MiniMax: [] for a layer without
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            states += getattr(layer, name, {}).values()
    for state in states:
        if isinstance(state, Tensor):
            state.masked_fill_(rows.reshape(-1, *[1] * (state.dim() - 1)), 0)


def run_whole(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """The unmodified model on all tokens in one call: the logits (B, 1, V) of the last one."""
    tokens = (sequences.ids, sequences.mask, sequences.positions)
    return run(model, *tokens, new_cache(model), longest=sequences.longest, last_logits=1)


def run_head(
    model: PreTrainedModel, sequences: Sequences, cache: Cache, **model_inputs: Any
) -> Tensor:
    """Run the unmodified model on the head, into an empty cache: the logits (B, 1, V) of its last
    token.
    """
    ids, mask = sequences.ids[:, : sequences.head], sequences.mask[:, : sequences.head]
    tokens, longest = (ids, mask, sequences.head_positions), sequences.longest
    return run(model, *tokens, cache, longest=longest, last_logits=1, **model_inputs)


def run_tail(
    model: PreTrainedModel, sequences: Sequences, cache: Cache, columns: slice = slice(None)
) -> Tensor:
    """The model with its context: columns of the tail on top of a cache of all before them ->
    logits (B, S, V).
    """
    head = sequences.head
    start, stop, _ = columns.indices(sequences.ids.shape[1] - head)
    part = slice(head + start, head + stop)
    tokens = (sequences.ids[:, part], sequences.mask[:, : part.stop], sequences.positions[:, part])
    return run(model, *tokens, cache, longest=sequences.longest)
