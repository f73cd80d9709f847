"""Why a model cannot be attached to, when its own code fails on the tokens that attaching tries."""

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.models.forward import call
from icl_patch.models.kv_cache import new_cache
from icl_patch.models.language_model import random_tokens
from icl_patch.tolerances import rounding_limit


@torch.no_grad()
def explain_failure(model: PreTrainedModel, error: Exception) -> str:
    """Why attaching failed with ``error``, for a user: a property of the model's class that rules
    it out, the refusal as it was, or the model's own words.

    Runs the model on a few random tokens. Only a failure calls for this.
    """
    name, own_words = type(model).__name__, " ".join(str(error).split())
    refusal = str(error) if isinstance(error, UnsupportedModelError) else None
    raw = (
        f"{name} fails on the tokens that attaching tries, two rows in several calls over a"
        f" {type(new_cache(model)).__name__}: {own_words}"
    )
    ids = random_tokens(model, 6, seed=2)
    try:
        logits: Tensor = model(ids).logits
        if _depends_on_later(model, ids, logits):
            return reads_ahead(name)
        cache = _own_cache(model, ids)
    except Exception:  # what it said first says more
        return refusal or f"{raw} (it fails on token ids alone: choose a model that needs no more)"
    if refusal is not None:
        return refusal
    if cache is not None and not isinstance(cache, Cache):
        return (
            f"expected a model with a cache of transformers, but {name} keeps its state in a class"
            f" of its own, {type(cache).__name__}, which cannot be masked or joined with another:"
            " choose a model of another class"
        )
    if not _continues(model, ids):
        return (
            f"expected a model that goes on from its cache by several tokens in one call, but"
            f" {name} does not ({own_words}): choose a model of another class"
        )
    return raw


def reads_ahead(name: str) -> str:
    """The refusal of a model of class ``name`` whose tokens attend to later ones."""
    return (
        f"expected a causal language model, but in {name} a token's logits depend on the tokens"
        " after it: it reads in both directions. Choose another model; one that was trained as a"
        " decoder needs is_decoder=True in its configuration (BERT and its relatives)"
    )


def _continues(model: PreTrainedModel, ids: Tensor) -> bool:
    """Whether the model runs ids (B, 6) in two calls over one cache."""
    cache = new_cache(model)
    whole = torch.ones_like(ids)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    try:
        for part, stop in ((slice(0, 3), 3), (slice(3, 6), 6)):
            call(model, ids[:, part], whole[:, :stop], positions[:, part], cache)
    except Exception:
        return False
    return True


def _own_cache(model: PreTrainedModel, ids: Tensor) -> object:
    """The cache that the model makes itself, under either of its names."""
    output = model(ids, use_cache=True)
    return output.get("past_key_values", output.get("cache_params"))


def _depends_on_later(model: PreTrainedModel, ids: Tensor, logits: Tensor) -> bool:
    """Whether another last token changes the logits (B, T, V) of the tokens before it."""
    other = ids.clone()
    other[:, -1] = ids[:, 0]
    changed = (model(other).logits - logits)[:, :-1].abs().max()
    return bool(changed > rounding_limit(logits.dtype) * logits.abs().max())
