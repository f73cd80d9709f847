"""Checks, before the first step, whether a model can be run in a decode mode."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icl_patch import metrics
from icl_patch.errors import ControllabilityError, RankError, UnsupportedModelError
from icl_patch.generation.decode_state import DecodeMode
from icl_patch.generation.decode_step import decode_one_token, prefill
from icl_patch.generation.decoder import Decoder
from icl_patch.generation.shared_cache import SharedCacheStreams
from icl_patch.invariance.arithmetic import reason_against
from icl_patch.layers.device_hooks import input_device
from icl_patch.layers.experts import PatchedScaledExperts
from icl_patch.layers.patched_module import PatchedModule
from icl_patch.layers.router import PatchedRouter
from icl_patch.models.forward_override import overridable
from icl_patch.models.language_model import random_tokens
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.tolerances import rounding_limit


def require_shared_cache(decoder: Decoder) -> None:
    """Make ``decoder.shared_cache``, unless it is there and the model still runs the same.

    The model is traced, then steps on random tokens are compared with their replays.

    Raises:
        UnsupportedModelError: the model's blocks do not allow it, or the replays differ.
    """
    attached = decoder.attached
    known = decoder.shared_cache is not None and decoder.shared_cache.fresh
    if not attached.ranks.any(not known):
        return
    model, name = attached.model, type(attached.model).__name__
    # autocast's rounding would hide the errors that this check looks for
    with attached.attachment.one_pass(), torch.autocast(input_device(model).type, enabled=False):
        streams = attached.ranks.shared(lambda: SharedCacheStreams(model, attached.blocks))
        decoder.shared_cache = streams
        try:
            error = _replay_error(decoder)
        except ControllabilityError:
            # Weights of zero have no patch for these tokens. Steps on the user's tokens raise this
            # again.
            if attached.update == "exact":
                decoder.shared_cache = None
                raise UnsupportedModelError(
                    f"mode='shared_cache' cannot be tried on {name}: no patch serves random tokens"
                ) from None
            return
        except RankError:
            raise
        except Exception as cause:  # also an error of the model's own code
            decoder.shared_cache = None
            raise UnsupportedModelError(
                f"mode='shared_cache' does not cover {name}: {cause}"
            ) from cause
    exact = attached.update == "exact"
    if not error <= (0 if exact else rounding_limit(model.dtype)):
        decoder.shared_cache = None
        raise UnsupportedModelError(
            f"mode='shared_cache' does not cover {name}: replays of its steps are off by"
            f" {error:.1g}"
        )


def require_batch_invariant_steps(decoder: Decoder) -> None:
    """:func:`require_shared_cache` for exact steps, which have to be their replays bit for bit.

    Raises:
        UnsupportedModelError: as there, or something in the model has no batch-invariant form.
    """
    attached = decoder.attached
    attached.ranks.shared(lambda: _check_batch_invariance(attached))
    require_shared_cache(decoder)


def _check_batch_invariance(attached: AttachedModel) -> None:
    if reason := _reason_against_batch_invariance(attached):
        raise UnsupportedModelError(
            f"mode='shared_cache' does not cover {type(attached.model).__name__}: {reason};"
            " mode='two_pass' does"
        )


def _reason_against_batch_invariance(attached: AttachedModel) -> str | None:
    model = attached.model
    if reason := reason_against(model):
        return reason
    others = [
        path
        for path, module in model.named_modules()
        if _multiplies(module) and not _is_plain(module)
    ]
    reasons = {
        "its experts scale their input": any(
            isinstance(block.experts, PatchedScaledExperts) for block in attached.blocks
        ),
        "it has forward hooks": bool(attached.hooks.current()),
        f"{', '.join(others[:1])} is no plain linear map": bool(others),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _multiplies(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
    return is_matrix and not isinstance(module, nn.Embedding)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear map of torch or transformers, or a router, that nobody has
    touched.
    """
    base = module.base_layer if isinstance(module, PatchedModule) else module
    if isinstance(module, PatchedRouter):
        return overridable(base)
    plain = type(base) in (nn.Linear, Conv1D) and type(base.weight) is nn.Parameter
    return plain and overridable(base)


def _replay_error(decoder: Decoder) -> float:
    """The error of replays: the largest, or the median if a tie may change a token's experts."""
    errors = torch.tensor(list(_replay_errors(decoder)))
    ties = decoder.attached.has_ties and decoder.attached.update != "exact"
    if ties and not errors.isnan().any():
        return float(errors.sort().values[len(errors) // 2])
    return float(errors.max())


def _replay_errors(decoder: Decoder) -> Iterator[float]:
    model = decoder.attached.model
    ids = random_tokens(model, 9, seed=1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, : 3 if decoder.attached.takes_padding else 0] = False
    state = prefill(decoder, ids[:, :7], mask[:, :7], 9, DecodeMode.SHARED_CACHE)
    for column in (6, 7, 8):
        result = decode_one_token(state, ids[:, column])
        replayed = decoder.attached.replay_logits(result.make_patch())[:, -1]
        yield from metrics.linf(replayed, result.logits).tolist()
