"""Running a model so that a row's bits do not depend on the other rows."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.invariance.arithmetic import BATCH_INVARIANT, reason_against, running_in
from icl_patch.layers.device_hooks import input_device
from icl_patch.models.forward import by_name, cache_in, call, needs_media_positions, position_input
from icl_patch.models.forward_override import ForwardOverrides
from icl_patch.models.kv_cache import new_cache
from icl_patch.models.language_model import check_length, position_limit
from icl_patch.models.model_checks import check_language_model, require_finite
from icl_patch.models.positions import NO_LIMIT, rotated_by_row, steady_length, switch_lengths
from icl_patch.models.trial_tokens import trial_tokens


@contextmanager
def batch_invariant(model: PreTrainedModel, *, attention: bool = True) -> Iterator[None]:
    """Within this context the bits of a row's logits depend on the row alone: on its tokens, the
    calls that they come in, and the weights; not on the other rows, their number, the row's place,
    its padding or the room in its cache.

    Padding is where ``attention_mask`` (B, S) is 0. Without ``position_ids`` a row's tokens are
    counted by it, as ``model.generate`` counts them.

    A prompt that is run in parts may have other bits than one that is run at once: attention then
    adds up in another order. The logits are as near to the fp32 model as those of the unmodified
    model, but not the same bits.

    The context covers calls of the model in this thread; those of several threads take turns. A few
    trial tokens are run first, alone and in batches, and compared bit for bit. A copy of the model
    that is made within is a plain model.

    Args:
        model: a causal language model of transformers in fp32, bf16 or fp16, with attention
            ``"sdpa"``. A patcher may be attached to it.
        attention: whether attention is replaced for several tokens a row too. Without it, only
            products, activations, norms and attention of one token a row do not depend on the
            batch. Exact decode steps run so: if a patch says ``info.arithmetic ==
            "batch_invariant"``, its logits are those of the model's own step within
            ``batch_invariant(model, attention=False)``, after a prompt outside.

    Raises:
        UnsupportedModelError: the model's rows depend on each other beyond the functions that
            :mod:`icl_patch.invariance.functions` replaces.
        NonFiniteError: the model's dtype cannot hold its activations.
        ValueError: in a call, gradients are enabled or autocast is.
    """
    check_language_model(model)
    if reason := reason_against(model):
        raise UnsupportedModelError(f"expected a model that can be batch-invariant, {reason}")
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation != "sdpa":
        raise UnsupportedModelError(
            f"expected attention 'sdpa', got {implementation!r}: load the model with"
            " attn_implementation='sdpa'"
        )
    with ForwardOverrides([(model, partial(_run, model, model.forward, attention))]):
        _self_check(model, attention)
        yield


def _run(
    model: PreTrainedModel, own: Callable[..., Any], attention: bool, *args: Any, **kwargs: Any
) -> Any:
    """The model's forward ``own`` on batch-invariant functions."""
    if torch.is_grad_enabled():
        raise ValueError("expected a call within torch.no_grad(), got one with gradients enabled")
    if torch.is_autocast_enabled(input_device(model).type):
        raise ValueError("expected a call without torch.autocast, got one within it")
    given = by_name(own, args, kwargs)
    if counted := _counted(model, given):
        given |= counted
        args, kwargs = (), given
    with running_in(BATCH_INVARIANT, model, attention=attention), _rotated_by_row(model, given):
        return own(*args, **kwargs)


def _counted(model: PreTrainedModel, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The input for the positions of a call with padding and without positions: most models would
    count the padding too.
    """
    tokens, mask, positions = _tokens_of(given)
    if tokens is None or mask is None or positions is not None:
        return {}
    if mask.dim() != 2 or bool(mask.all()) or needs_media_positions(model, given):
        return {}
    return position_input(model, _positions(mask != 0)[:, -tokens.shape[1] :])


def _tokens_of(given: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The ids or embeddings, the mask and the positions among a model's inputs."""
    ids, mask, positions = map(given.get, ("input_ids", "attention_mask", "position_ids"))
    return given.get("inputs_embeds") if ids is None else ids, mask, positions


def _rotated_by_row(
    model: PreTrainedModel, given: Mapping[str, Any]
) -> AbstractContextManager[object]:
    """A context in which a call with these inputs rotates each row as the row alone.

    Raises:
        ValueError: dynamic NTK rotates a call of this length by the calls before.
    """
    limit, switches = steady_length(model), switch_lengths(model)
    tokens, mask, positions = _tokens_of(given)
    if tokens is None or not (switches or limit < NO_LIMIT):
        return nullcontext()
    width = tokens.shape[1]
    if positions is None:
        past = 0 if (cache := cache_in(given)) is None else cache.get_seq_length()
        positions = past + torch.arange(width, device=tokens.device)[None]
    if (longest := int(positions.max()) + 1) > limit:
        check_length(model, longest)
    if mask is None or mask.dim() != 2:
        mask = torch.ones_like(positions)
    lengths = torch.where(mask[:, -width:] != 0, positions + 1, 1).amax(-1)
    if all(bool(((lengths > switch) == (longest > switch)).all()) for switch in switches):
        return nullcontext()
    return rotated_by_row(model, lengths)


def _self_check(model: PreTrainedModel, attention: bool) -> None:
    """Compare rows alone with the same rows in batches, bit for bit, with padding before and
    behind. Without batch-invariant attention these are rows of one token, which attends to itself
    alone.
    """
    width = min(67, position_limit(model), *switch_lengths(model)) if attention else 1
    lengths = [max(1, n) for n in (width, width - 2, width, width // 2 + 1, width - 1)]
    starts = [width - length for length in lengths]
    ids = trial_tokens(model, width, seed=0, starts=starts)
    if not attention:  # the tokens of one text, each by itself
        ids = trial_tokens(model, len(lengths), seed=0, starts=[0]).T
    mask = torch.arange(width) >= torch.tensor(starts)[:, None]
    mask = mask.to(ids.device)
    alone = [_logits(model, ids[row : row + 1, start:]) for row, start in enumerate(starts)]
    require_finite(model, torch.cat(alone), partial(_logits, model, ids, mask))
    for rows in ([0, 1, 2, 3, 4], [4, 3, 0], [1, 2]):
        together = _logits(model, ids[rows], mask[rows])
        for place, row in enumerate(rows):
            _check_equal(model, together[place], alone[row][0], f"row {place} of {len(rows)}")
    if (first := lengths[1] - 2) > 0:  # the tokens in the first of the row's calls alone
        behind = ids[1].roll(lengths[1]), torch.arange(width, device=ids.device) < first
        ids, mask = (torch.stack([x[0], y]) for x, y in zip((ids, mask), behind, strict=True))
        with torch.no_grad():
            logits = call(model, ids, mask, _positions(mask), new_cache(model))
        _check_equal(model, logits[1, first - 1], alone[1][0, 0], "a row before padding")


def _check_equal(model: PreTrainedModel, together: Tensor, alone: Tensor, row: str) -> None:
    if not torch.equal(together, alone):
        raise UnsupportedModelError(
            f"{type(model).__name__} has rows that depend on their batch: {row} differs from the"
            f" same row alone by up to {(together - alone).abs().max():.1g}"
        )


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of a prompt's last token and of two tokens after it, one a call, (B, 3, V); of a
    prompt of one token, (B, 1, V).
    """
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    positions, cache = _positions(mask), new_cache(model)
    width = ids.shape[1]
    ends = range(max(1, width - 2), width + 1)
    parts = [slice(start, end) for start, end in zip((0, *ends), ends, strict=False)]
    logits = [
        call(model, ids[:, part], mask[:, : part.stop], positions[:, part], cache, last_logits=1)
        for part in parts
    ]
    return torch.cat(logits, 1)


def _positions(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(1) - 1).clamp(min=0)
