"""The settings of a generation, wherever they stand: among the arguments of ``generate``, in a
generation configuration among them, or in the model's own.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from icl_patch.models.forward import OUTPUTS, cache_in, check_inputs
from icl_patch.recording.sequences import check_context

# Settings with which transformers chooses tokens in another way, and the values without.
_OTHER_WAYS: dict[str, Any] = {
    "num_beams": 1,
    "penalty_alpha": None,
    "constraints": None,
    "force_words_ids": None,
    "dola_layers": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": False,
    "is_assistant": False,
    "token_healing": False,
}
# How transformers' own loop saves memory or time: no token depends on it.
_OF_THEIR_LOOP = ("cache_implementation", "prefill_chunk_size", "compile_config")
_OTHER_LOOPS = ("assistant_model", "custom_generate")


def prepare(
    model: PreTrainedModel, arguments: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Change arguments for ``model.generate``, in place, to those that our loop needs.

    tokenizer: for stop strings, if none is among the arguments.

    Raises:
        ValueError: a setting is not served, there is a cache, or there are stop strings and no
            tokenizer.
        TypeError: embeddings in place of tokens, or an output of the model, are asked for.
    """
    for name in _OTHER_LOOPS:
        if arguments.get(name) is not None:  # transformers would ignore the first
            raise ValueError(
                f"expected no {name}, got {type(arguments[name]).__name__}: the patcher's own loop"
                " computes a patch for each token. Leave it out"
            )
    for name, off in _OTHER_WAYS.items():
        if (value := setting(model, arguments, name)) not in (None, False, off):
            raise ValueError(
                f"expected greedy search or sampling after the unchanged prompt, got {name}="
                f"{value!r} (an argument, or of the generation configuration): a patch belongs to"
                f" one token and its history. Pass {name}={off}"
            )
    asked = [name for name in OUTPUTS if setting(model, arguments, name)]
    given = [name for name in ("inputs", "inputs_embeds") if arguments.get(name) is not None]
    check_inputs(model, asked + given)
    if (cache := cache_in(arguments)) is not None:
        raise ValueError(
            f"expected no cache, got {type(cache).__name__}: leave it out. The patch absorbs the"
            " context from its first token on, and the patcher has its own cache, a static one with"
            " compile=True"
        )
    _leave_out_their_loop(model, arguments)
    _add_stop_strings(model, arguments, tokenizer)


def switched_off(model: PreTrainedModel) -> dict[str, Any]:
    """The arguments that switch off what a model's generation configuration asks for and our loop
    refuses; and of several answers all but one.
    """
    off = _OTHER_WAYS | dict.fromkeys(OUTPUTS, False) | {"num_return_sequences": 1}
    return {
        name: value
        for name, value in off.items()
        if setting(model, {}, name) not in (None, False, value)
    }


def context_of(
    model: PreTrainedModel, arguments: dict[str, Any], ids: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A context as int64 ids and bool mask; without a mask it has the one that transformers
    infers: the padding id is no token, unless it also ends a row.

    Raises:
        ValueError: as :func:`icl_patch.recording.sequences.check_context`.
    """
    ids, given = check_context(ids, mask)
    padding, ends = (setting(model, arguments, f"{name}_token_id") for name in ("pad", "eos"))
    if mask is not None or padding is None:
        return ids, given
    padding = int(padding)
    if ends is not None and padding in torch.as_tensor(ends).flatten().tolist():
        return ids, given
    try:
        return check_context(ids, ids != padding)
    except ValueError as error:
        raise ValueError(
            f"{error}. Without context_mask the id {padding} is padding, as pad_token_id={padding}"
            " says, and as in model.generate: give the mask, or pass pad_token_id=None"
        ) from error


def setting(model: PreTrainedModel, arguments: dict[str, Any], name: str) -> Any:
    """The value of a setting in ``model.generate(**arguments)``; None for transformers' default."""
    value = _asked(arguments, name)
    own = value is None and name not in arguments
    return getattr(model.generation_config, name, None) if own else value


def _asked(arguments: dict[str, Any], name: str) -> Any:
    """The value of a setting that this call asks for."""
    config = arguments.get("generation_config")
    return arguments[name] if name in arguments else getattr(config, name, None)


def _leave_out_their_loop(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Drop the model's own settings of transformers' loop, and refuse those of this call."""
    for name in _OF_THEIR_LOOP:
        if (value := _asked(arguments, name)) not in (None, "dynamic"):
            raise ValueError(
                f"expected no {name}, got {value!r}: the patcher runs its own loop over a dynamic"
                f" cache, or a static one with compile=True. Pass {name}=None"
            )
        if getattr(model.generation_config, name, None) is not None:
            arguments[name] = None


def _add_stop_strings(
    model: PreTrainedModel, arguments: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Replace ``stop_strings`` and ``tokenizer`` by a criterion: transformers' ``generate`` loses
    the tokenizer if it is given a decoding method. A criterion of the same type that the user gives
    takes precedence, as there.
    """
    tokenizer = arguments.pop("tokenizer", None) or tokenizer
    if (strings := setting(model, arguments, "stop_strings")) is None:
        return
    if tokenizer is None:
        raise ValueError(
            f"expected a tokenizer with stop_strings={strings!r} (an argument, or of the"
            " generation configuration), got none: pass tokenizer=..., or stop_strings=None"
        )
    arguments["stop_strings"] = None
    others = arguments.get("stopping_criteria") or ()
    if any(type(other) is StopStringCriteria for other in others):
        warnings.warn(
            f"expected either stop_strings or a StopStringCriteria, got both: the criterion takes"
            f" precedence, as in model.generate, and stop_strings={strings!r} have no effect",
            stacklevel=2,
        )
        return
    stop = StopStringCriteria(tokenizer, strings)
    arguments["stopping_criteria"] = StoppingCriteriaList([*others, stop])
