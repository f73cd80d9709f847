"""One forward of a model of any class, under the class's own names of its inputs."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache as memoize
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedModel

from icl_patch.models.kv_cache import holds_states_alone
from icl_patch.models.positions import first_position
from icl_patch.models.recurrent_state import is_recurrent, module_states

# What a model calls its cache of the tokens before, as an input and as an output: the first name
# since transformers 5.24, the others before it and in classes of remote code.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")

# Options that let a model return more than its logits.
OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
# Inputs that we give ourselves or that exclude ids, and options that change the output.
_OURS = {
    *CACHE_NAMES,
    "input_ids",
    "inputs",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "cache_position",
    "use_cache",
    "logits_to_keep",
    "labels",
    "return_dict",
    "self",
    *OUTPUTS,
}


@memoize
def _inputs_of(forward: Callable[..., Any]) -> frozenset[str]:
    parameters = inspect.signature(forward).parameters.values()
    return frozenset(
        given.name
        for given in parameters
        if given.kind in (given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY)
    )


def _all_inputs(model: PreTrainedModel) -> frozenset[str]:
    """The inputs of the model or of its base model."""
    return _inputs_of(type(model).forward) | _inputs_of(type(model.base_model).forward)


def further_inputs(model: PreTrainedModel) -> frozenset[str]:
    """The inputs that we do not give ourselves."""
    return _all_inputs(model) - _OURS


def check_inputs(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Raises TypeError unless the model, or the base model that it passes them to, has further
    inputs of these names.

    Many classes accept any name and ignore unknown ones.
    """
    known = further_inputs(model)
    unknown = [name for name in names if name not in known]
    if unknown:
        further = ", ".join(sorted(known)) or "none"
        raise TypeError(
            f"expected no further inputs of {type(model).__name__} but its own ({further}), got"
            f" {', '.join(unknown)}, which is unsupported: {_instead(unknown[0])}"
        )


def _instead(name: str) -> str:
    """The advice to a user who gave a patcher an input of this name."""
    if name in OUTPUTS:
        return (
            f"leave it out, or pass {name}=False if the generation configuration asks for it."
            f" patcher.model(ids, {name}=True), on the context and all that follows it, returns"
            " those with the context. With a patch in its place, with patcher.applied(patch,"
            f" token=None): model(patch.kept_ids, position_ids=patch.position_ids, {name}=True)"
            " returns them"
        )
    if name in ("prefix_ids", "prefix_mask"):
        return "give these tokens as the first ones of the context, and their number as keep_first"
    if name == "inputs_embeds":
        return (
            "a patch names its tokens, so give input_ids. Put a vector that belongs to no token"
            " into a new row of the embeddings (resize_token_embeddings) before attaching"
        )
    if name == "inputs":
        return "give the ids as context_ids or input_ids"
    return "leave it out, the patcher gives it itself" if name in _OURS else "check its name"


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether the model takes a cache of the tokens before."""
    return bool({*CACHE_NAMES, "state"} & _all_inputs(model))


def cache_name(model: PreTrainedModel) -> str:
    """The name of the model's input for the cache of the tokens before."""
    names = _all_inputs(model)
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])


def cache_in(values: Mapping[str, Any]) -> Any:
    """The cache among a model's inputs or outputs, by any of its names; None if there is none."""
    return next((values[name] for name in CACHE_NAMES if name in values), None)


def by_name(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs of a call of a model's ``forward``, those given by position too."""
    names = inspect.signature(forward).parameters if args else ()
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def drafts_for_another(model: PreTrainedModel) -> bool:
    """Whether the model starts from the cache of another one: the draft heads of Gemma 4."""
    return "shared_kv_states" in _inputs_of(type(model).forward)


def counts_slots(model: PreTrainedModel) -> bool:
    """Whether the model numbers its tokens by their slots in the cache.

    Such a model takes no positions, and does not build alibi from its mask. A replay then leaves
    the context's slots empty, and every row must begin in the first slot.
    """
    positions = "position_ids" in _inputs_of(type(model).forward)
    return not (positions or _builds_alibi(model) or is_recurrent(model))


def _builds_alibi(model: PreTrainedModel) -> bool:
    """Whether the model's attention has alibi, built from its mask."""
    return hasattr(sys.modules[type(model).__module__], "build_alibi_tensor")


def names_of(given: Mapping[str, Any]) -> list[str]:
    """The names of further inputs that hold something."""
    return [
        name
        for name, value in given.items()
        if value is not None and not (isinstance(value, dict) and not value)
    ]


def _media(model: PreTrainedModel, given: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The part of the model that gives images, videos or sound positions of three numbers (M-RoPE),
    and the names of such inputs; None and no names if there is nothing to number so.
    """
    known = further_inputs(model)
    media = [name for name in names_of(given) if name in known and not name.endswith("type_ids")]
    parts = [part for part in (model, model.base_model) if hasattr(part, "get_rope_index")]
    return (parts[-1], media) if media and parts else (None, [])


def over_columns(inputs: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Further model inputs for the first ``width`` columns.

    ``*_type_ids`` have one entry a token: they are cut, or padded with 0, which means text.
    """
    return {
        name: F.pad(x, (0, width - x.shape[1]))
        if isinstance(x, Tensor) and name.endswith("type_ids")
        else x
        for name, x in inputs.items()
    }


def check_last_type(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Raises ValueError unless the last token of ``*_type_ids``, and so each token behind it, has
    the type that a token has without them: it runs without them.
    """
    takes_images = any("pixel_values" in name for name in further_inputs(model))
    for name, types in given.items():
        if not (isinstance(types, Tensor) and name.endswith("type_ids")):
            continue
        if types[:, -1].any():
            raise ValueError(
                f"expected type 0 in {name} for the context's last token, which is text and runs"
                f" without the context, got {types[:, -1].tolist()}: let the context end in text"
            )
        if name == "token_type_ids" and not takes_images:
            modules = (path for path, _ in model.named_modules())
            if not any(path.endswith("token_type_embeddings") for path in modules):
                raise ValueError(
                    f"expected no {name} for {type(model).__name__}, which has no type 0 that"
                    " tokens without types would have: leave them out"
                )


class MediaPositions(NamedTuple):
    """Positions of tokens with images among them, by M-RoPE.

    head: (3, B, T) int64. shift: (B, 1) int64, added to the number of tokens before for the text
    that follows.
    """

    head: Tensor
    shift: Tensor


def needs_media_positions(model: PreTrainedModel, given: Mapping[str, Any]) -> bool:
    """Whether ``given`` holds images, videos or sound with positions of three numbers (M-RoPE)."""
    return _media(model, given)[0] is not None


def media_positions(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, given: Mapping[str, Any]
) -> MediaPositions | None:
    """The positions that the model itself computes for ids (B, T) with further inputs ``given``;
    None if all of its positions are single numbers.

    Raises:
        ValueError: an input is missing that the positions depend on, or has other columns.
    """
    part, media = _media(model, given)
    if part is None:
        return None
    accepted = inspect.signature(part.get_rope_index).parameters
    known = {**given, "input_ids": ids, "attention_mask": mask.long()}
    for name, parameter in accepted.items():
        needed = (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        )
        if needed and known.get(name) is None:
            raise ValueError(
                f"expected {name} beside {', '.join(media)}: the processor returns it, and"
                f" {type(model).__name__} numbers its tokens by it"
            )
        if name.endswith("type_ids") and name in known and known[name].shape != ids.shape:
            raise ValueError(
                f"expected {name} {tuple(ids.shape)}, of the tokens up to the end of the first"
                f" absorbed span, got {tuple(known[name].shape)}"
            )
    head, shift = part.get_rope_index(**{k: v for k, v in known.items() if k in accepted})
    return MediaPositions(head, shift)


def position_input(model: PreTrainedModel, positions: Tensor) -> dict[str, Tensor]:
    """The model's input for positions that count the tokens of a row from 0; none if its class
    takes none.
    """
    if "position_ids" not in _inputs_of(type(model).forward):
        return {}
    first = first_position(model)
    return {"position_ids": positions + first if first else positions}


def call(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor | None,
    cache: Cache,
    last_logits: int = 0,
    **model_inputs: Any,
) -> Tensor:
    """One forward: ids (B, T), mask over all slots of the cache (B, S), positions (B, T) -> logits
    (B, T, V); the cache grows by T.

    ``positions`` count the tokens of a row from 0; :func:`first_position` is added for the model.
    With None the model numbers its tokens itself. With images they may be (3, B, T), see
    :func:`media_positions`.

    ``last_logits``: compute the logits of only this many last tokens, 0 for all.
    """
    given = inputs(model, ids, mask, positions, cache, last_logits)
    with module_states(model, cache):
        logits: Tensor = model(**given, **model_inputs).logits
    return logits[:, -last_logits:]


def inputs(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor | None,
    cache: Cache,
    last_logits: int = 0,
) -> dict[str, Any]:
    """The inputs of a model's forward for :func:`call`, by the names of its class."""
    if holds_states_alone(cache):  # it masks the tokens it is given, not those before
        mask = mask[:, -ids.shape[1] :]
    elif cache.is_compileable and _builds_alibi(model):
        width = max(getattr(layer, "max_cache_len", 0) for layer in cache.layers)
        # alibi has a number for every place in a static cache
        mask = F.pad(mask, (0, width - mask.shape[1]))
    given: dict[str, Any] = {"input_ids": ids, "use_cache": True, "attention_mask": mask.long()}
    given[cache_name(model)] = cache
    if positions is not None:
        given |= position_input(model, positions)
    if "logits_to_keep" in _inputs_of(type(model).forward):
        given["logits_to_keep"] = last_logits
    return given
