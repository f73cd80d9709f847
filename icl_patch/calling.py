"""One forward of a model, whatever its class calls its inputs."""

import inspect
from collections.abc import Callable
from functools import cache as memoize
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel

from icl_patch.states import module_states


@memoize
def _inputs_of(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def call(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    cache: Cache,
    last_logits: int = 0,
    **model_inputs: Any,
) -> Tensor:
    """One forward: ids (B, T), mask over all slots of the cache (B, S), positions (B, T) -> logits (B, T, V); the cache grows by T.

    ``last_logits``: how many of the last tokens' logits are wanted, 0 for all.
    """
    given = inputs(model, ids, mask, positions, cache, last_logits)
    with module_states(model, cache):
        logits: Tensor = model(**given, **model_inputs).logits
    return logits[:, -last_logits:]


def inputs(model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache, last_logits: int = 0) -> dict[str, Any]:
    """What a model's forward is given for :func:`call`, by its own names."""
    names = _inputs_of(type(model).forward)
    attentionless = "cache_params" in names  # it masks the tokens it is given, not those before
    given: dict[str, Any] = {"input_ids": ids, "use_cache": True}
    given["attention_mask"] = (mask[:, -ids.shape[1] :] if attentionless else mask).long()
    given["cache_params" if attentionless else "past_key_values"] = cache
    return given | {name: value for name, value in (("position_ids", positions), ("logits_to_keep", last_logits)) if name in names}
