"""The generation loop: every step turns the whole context into a change of weights for its token.

transformers chooses the tokens and ends the rows, with its generation configuration, logits
processors, stopping criteria and streamers. The loop is an iterator of steps
(:meth:`icl_patch.ContextPatcher.generate`), or a decoding method for
``model.generate(custom_generate=...)`` (:meth:`icl_patch.ContextPatcher.decoding_method`).
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from icl_patch.generation.compiled_step import CompileOptions, check_compilable, use_compiled_step
from icl_patch.generation.decode_state import DecodeMode, DecodeState
from icl_patch.generation.decode_step import decode_one_token, prefill
from icl_patch.generation.plans import MODES, StepPlans
from icl_patch.generation.replay_checks import ReplayChecks
from icl_patch.invariance.arithmetic import BATCH_INVARIANT, MODEL
from icl_patch.models.forward import (
    MediaPositions,
    check_last_type,
    media_positions,
    needs_media_positions,
)
from icl_patch.models.language_model import check_length, position_limit
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording.sequences import check_context

_MODES_OF_ARITHMETIC = {
    "auto": "auto",
    MODEL: DecodeMode.TWO_PASS.value,
    BATCH_INVARIANT: DecodeMode.SHARED_CACHE.value,
}
DEFAULT_NEW_TOKENS = 64


@dataclass(frozen=True, eq=False)
class GenerationStep:
    """One generated token of every row.

    Attributes:
        token_ids: (B,); a row that had ended before has the padding id.
        logits: (B, V) that were chosen from, in the model's dtype; scores: the same in fp32 after
            the logits processors.
        live: (B,) bool, the rows that had not ended before this step; ended: those that have after
            it.
        mode: how the step ran: ``"two_pass"``, ``"two_stream"`` or ``"shared_cache"``.
    """

    token_ids: Tensor
    logits: Tensor = field(repr=False)
    scores: Tensor = field(repr=False)
    live: Tensor
    ended: Tensor
    mode: str
    _make_patch: Callable[[], ContextPatch] = field(repr=False)

    @cached_property
    def patch(self) -> ContextPatch:
        """The patch of every row's current token, which gave the new tokens; made at first use.

        It has logits with the context if the step computed them: in two passes, or if the update is
        exact.
        """
        return self._make_patch()


@dataclass(frozen=True)
class Options:
    """How to generate, beside transformers' own configuration; see
    :meth:`icl_patch.ContextPatcher.generate`.
    """

    mode: str = "auto"
    compile: bool | str = False

    @property
    def compilers(self) -> CompileOptions:
        """The compilers that ``compile`` names."""
        return CompileOptions.of(self.compile)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"expected mode {', '.join(MODES)}, got {self.mode!r}")
        CompileOptions.of(self.compile)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A prompt, ids and mask (B, C), with transformers' processors and criteria for it, and the
    positions of images in it.
    """

    ids: Tensor
    mask: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_inputs: dict[str, Any]
    media: MediaPositions | None

    @property
    def capacity(self) -> int:
        """The largest number of tokens, the prompt's included."""
        return max(int(self.config.max_length), self.ids.shape[1] + 1)


def mode_of(mode: str, arithmetic: str | None, update: str) -> str:
    """The mode that ``arithmetic``, an option of earlier versions, asks for; warns of it."""
    if arithmetic is None:
        return mode
    if arithmetic not in _MODES_OF_ARITHMETIC:
        expected = ", ".join(map(repr, _MODES_OF_ARITHMETIC))
        raise ValueError(f"expected arithmetic {expected}, got {arithmetic!r}")
    if update != "exact":
        if arithmetic == BATCH_INVARIANT:
            raise ValueError(
                f"expected update 'exact' with arithmetic {arithmetic!r}, got {update!r}"
            )
        arithmetic = "auto"
    wanted = _MODES_OF_ARITHMETIC[arithmetic]
    warnings.warn(
        f"arithmetic={arithmetic!r} is deprecated: say mode={wanted!r}",
        FutureWarning,
        stacklevel=3,
    )
    if "auto" not in (mode, wanted) and mode != wanted:
        raise ValueError(f"expected mode {wanted!r} with arithmetic {arithmetic!r}, got {mode!r}")
    return wanted if mode == "auto" else mode


# Arguments that transformers' generate adds to the model's inputs.
_GENERATE_ARGUMENTS = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache_params",
    "use_cache",
    "logits_to_keep",
    "synced_gpus",
)


def _prepare(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> _Prepared:
    """A decoding method for ``model.generate`` that only returns its arguments."""
    way = str(generation_config.get_generation_mode().value)
    if way not in ("greedy_search", "sample"):
        raise ValueError(
            f"expected greedy search or sampling, got {way}: a patch belongs to one history, and"
            " to one token of it"
        )
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    cache: Any = model_kwargs.get("past_key_values")
    if cache is not None and (not isinstance(cache, DynamicCache) or cache.offloading):
        got = generation_config.cache_implementation or type(cache).__name__
        raise ValueError(f"expected a dynamic cache, got {got}: compile=True makes a static one")
    if cache is not None and cache.get_seq_length() != 0:
        raise ValueError(
            f"expected an empty cache, got one of {int(cache.get_seq_length())} tokens: the context"
            " is absorbed from its start"
        )
    model_inputs = {
        name: value
        for name, value in model_kwargs.items()
        if name not in _GENERATE_ARGUMENTS and value is not None
    }
    check_last_type(model, model_inputs)
    positions = model_kwargs.get("position_ids")
    if needs_media_positions(model, model_inputs):
        media = _media_positions(model, input_ids, mask, positions, model_inputs)
    else:
        media = None
        _check_positions(positions, mask)
    return _Prepared(
        ids=input_ids,
        mask=mask,
        processors=logits_processor,
        criteria=stopping_criteria,
        config=generation_config,
        model_inputs=model_inputs,
        media=media,
    )


def _media_positions(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor | None,
    model_inputs: dict[str, Any],
) -> MediaPositions | None:
    """The positions of a prompt with images: those that ``model.generate`` has made before it
    encodes the images, else what the model makes of the images.
    """
    if positions is None or positions.dim() != 3:
        return media_positions(model, ids, mask, model_inputs)
    planes = positions[-3:].expand(-1, len(ids), -1)  # transformers puts one that counts before
    counted = mask.long().sum(1, keepdim=True) - 1
    return MediaPositions(planes, planes[0, :, -1:] - counted)


def _check_positions(positions: Tensor | None, mask: Tensor) -> None:
    """Check that positions, (B, C) or several planes of them, count the tokens of the mask."""
    if positions is None:
        return
    rows, columns = mask.shape
    expected = mask.long().cumsum(-1) - 1
    if positions.shape[-2:] not in ((rows, columns), (1, columns)) or not bool(
        ((positions == expected) | ~mask).all()
    ):
        raise ValueError(
            "expected no position_ids, or those that count the tokens from 0, got others,"
            f" {tuple(positions.shape)}"
        )


def generate(
    plans: StepPlans,
    context_ids: Tensor,
    context_mask: Tensor | None,
    max_new_tokens: int | None,
    streamer: BaseStreamer | None,
    options: Options,
    **arguments: Any,
) -> Iterator[GenerationStep]:
    """See :meth:`icl_patch.ContextPatcher.generate`; ``arguments`` are those of
    ``model.generate``.
    """
    plans.attached.require_attached()
    if max_new_tokens is not None and max_new_tokens < 0:
        raise ValueError(f"expected max_new_tokens ≥ 0, got {max_new_tokens}")
    if "custom_generate" in arguments:
        raise TypeError("expected decoding_method, got custom_generate")
    if arguments.get("assistant_model") is not None:
        raise ValueError(
            "expected no assistant_model: each token is generated with a patch of its own"
        )
    if (cache := arguments.get("past_key_values")) is not None:
        raise ValueError(
            f"expected no cache, got a {type(cache).__name__}: every context gets a new one"
        )
    _add_stop_strings(arguments, plans.attached.tokenizer)
    ids, mask = check_context(context_ids, context_mask)
    media_positions(plans.attached.model, ids, mask, arguments)  # checks them
    if max_new_tokens == 0:
        if streamer is not None:
            streamer.put(ids.cpu())
            streamer.end()
        return iter(())
    if max_new_tokens is None and _has_no_length(plans.attached.model, arguments):
        room = position_limit(plans.attached.model) - int(mask.sum(1).max())
        max_new_tokens = max(1, min(DEFAULT_NEW_TOKENS, room))
    lengths = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    model: Any = plans.attached.model
    prepared = model.generate(
        ids,
        attention_mask=mask.long(),
        custom_generate=_prepare,
        streamer=streamer,
        **lengths,
        **arguments,
    )
    return _steps(plans, prepared, options, streamer)


def _add_stop_strings(arguments: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Replace ``stop_strings`` and ``tokenizer`` by a criterion: transformers' ``generate`` loses
    the tokenizer if it is given a decoding method.
    """
    tokenizer = arguments.pop("tokenizer", None) or tokenizer
    if (strings := arguments.pop("stop_strings", None)) is None:
        return
    if tokenizer is None:
        raise ValueError("expected a tokenizer with stop_strings, got none: pass tokenizer=...")
    others = arguments.get("stopping_criteria") or ()
    stop = StopStringCriteria(tokenizer, strings)
    arguments["stopping_criteria"] = StoppingCriteriaList([*others, stop])


def _has_no_length(model: PreTrainedModel, arguments: dict[str, Any]) -> bool:
    """Whether neither the arguments nor a configuration limits the number of tokens."""
    configs = (arguments.get("generation_config"), model.generation_config)
    lengths = [
        getattr(config, name, None)
        for config in configs
        for name in ("max_length", "max_new_tokens")
    ]
    return arguments.get("max_length") is None and all(length is None for length in lengths)


def decoding_method(
    plans: StepPlans, streamer: BaseStreamer | None, options: Options
) -> Callable[..., Any]:
    """See :meth:`icl_patch.ContextPatcher.decoding_method`."""

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        if model is not plans.attached.model:
            raise ValueError(
                "expected the model that the patcher is attached to, got another"
                f" {type(model).__name__}"
            )
        plans.attached.require_attached()
        prepared = _prepare(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        )
        check_context(prepared.ids, prepared.mask)
        asked = [
            name for name in ("scores", "logits") if getattr(generation_config, f"output_{name}")
        ]
        outputs: dict[str, Any] = {
            name: () for name in asked if generation_config.return_dict_in_generate
        }
        sequences = [input_ids]
        for step in _steps(plans, prepared, options, streamer):
            sequences.append(step.token_ids.unsqueeze(1))
            for name in outputs:
                outputs[name] += (getattr(step, name).float(),)
        outputs["sequences"] = torch.cat(sequences, 1)
        return (
            GenerateDecoderOnlyOutput(**outputs)
            if generation_config.return_dict_in_generate
            else outputs["sequences"]
        )

    return decode


@torch.inference_mode(False)  # the caches made here are written in place later
def start(plans: StepPlans, prepared: _Prepared, options: Options) -> DecodeState:
    """Put the context into a cache, ready for its last token."""
    attached, compilers = plans.attached, options.compilers
    longest, new = int(prepared.mask.sum(1).max()), prepared.capacity - prepared.ids.shape[1]
    check_length(attached.model, longest, new)
    if compilers.cuda_graph and not prepared.ids.is_cuda:
        raise ValueError(
            f"expected a CUDA device with compile={options.compile!r}, got {prepared.ids.device}"
        )
    if compilers:
        check_compilable(attached, compilers)
    plan = plans.choose(options.mode, compile=options.compile)
    return prefill(
        attached,
        plan,
        prepared.ids,
        prepared.mask,
        prepared.capacity,
        reserve=not compilers,
        media=prepared.media,
        **prepared.model_inputs,
    )


def _steps(
    plans: StepPlans, prepared: _Prepared, options: Options, streamer: BaseStreamer | None
) -> Iterator[GenerationStep]:
    """The steps; everything before the first one has been done, and its errors raised."""
    steps: Any = _loop(plans, prepared, options, streamer)
    next(steps)  # from here on the loop's `finally` runs, even if nobody takes a step
    return steps


def _loop(
    plans: StepPlans, prepared: _Prepared, options: Options, streamer: BaseStreamer | None
) -> Iterator[GenerationStep | None]:
    """The loop of transformers' ``_sample`` around our decode step; it yields None when it is ready
    for the first step.
    """
    config: Any = prepared.config
    ranks = plans.attached.ranks
    processors: Any = prepared.processors
    token_ids = prepared.ids[:, -1]
    checks = ReplayChecks(plans.attached.update == "exact")
    ends = any(hasattr(criterion, "eos_token_id") for criterion in prepared.criteria)
    live = torch.ones_like(token_ids, dtype=torch.bool)
    all_scores: Any = () if config.return_dict_in_generate and config.output_scores else None
    release = None
    try:
        with plans.attached.attachment.one_pass(), checks.timed():
            plans.attached.agree("the prompt", (prepared.ids, prepared.mask), options=options)
            state = start(plans, prepared, options)
            if options.compilers:
                release = use_compiled_step(plans, state, options.compilers)
        yield None
        while live.any():
            with checks.timed():
                result = decode_one_token(state, token_ids)
                checks.after(state, result)
            so_far = state.tokens
            scores = processors(so_far, result.logits.to(torch.float32, copy=True))
            chosen = (
                ranks.same(torch.multinomial(scores.softmax(-1), 1).squeeze(1))
                if config.do_sample
                else scores.argmax(-1)
            )
            token_ids = torch.where(live, chosen, config._pad_token_tensor) if ends else chosen
            longer = torch.cat([so_far, token_ids.unsqueeze(1)], 1)
            if all_scores is not None:
                all_scores += (scores,)
            ended = ~live | prepared.criteria(longer, all_scores)
            if streamer is not None:
                streamer.put(token_ids.cpu())
            mode, make_patch = result.mode.value, result.make_patch
            yield GenerationStep(token_ids, result.logits, scores, live, ended, mode, make_patch)
            live = ~ended
            state.keep_live(live)
    finally:
        if release is not None:
            release()
        if streamer is not None:  # also after an error: a consumer may be waiting for the text
            streamer.end()
