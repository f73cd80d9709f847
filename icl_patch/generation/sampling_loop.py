"""The generation loop: every step turns the whole context into a change of weights for its token.

transformers chooses the tokens and ends the rows, with its generation configuration, logits
processors, stopping criteria and streamers. Its ``generate`` prepares them and runs the loop, an
iterator of steps, as its ``custom_generate``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from icl_patch.generation.decode_mode import AUTO_MODE, TWO_PASS
from icl_patch.generation.decoding import decode_one_token, start_decoding
from icl_patch.generation.plans import StepPlans
from icl_patch.generation.reusable_step import (
    check_compilable,
    use_program,
    use_reusable_step,
)
from icl_patch.generation.settings import context_of, prepare, setting
from icl_patch.models.forward import (
    CACHE_NAMES,
    OUTPUTS,
    MediaPositions,
    check_last_type,
    media_positions,
    needs_media_positions,
)
from icl_patch.models.language_model import check_length, position_limit
from icl_patch.models.positions import check_one_side
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording.sequences import behind_first, check_context

DEFAULT_NEW_TOKENS = 64
REPLAY_EVERY = (
    64  # the first exact step is replayed, and then every 64th: less than 2 % of the time
)


@dataclass(frozen=True, eq=False)
class GenerationStep:
    """One generated token of every row.

    Attributes:
        token_ids: (B,); a row that had ended before has the padding id, or if the model has no
            end-of-sequence token, its next token.
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


# Arguments that transformers' generate has among the model's inputs, and that are none of ours.
_GENERATE_ARGUMENTS = (
    *CACHE_NAMES,
    *OUTPUTS,
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "synced_gpus",
)


def _checked(
    model: PreTrainedModel, ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> tuple[Tensor, MediaPositions | None, dict[str, Any]]:
    """The mask (B, C) of a prompt that transformers has prepared, the positions of images in it and
    further inputs of the model.
    """
    way = str(config.get_generation_mode().value)
    if way not in ("greedy_search", "sample"):  # a way that is newer than our list of them
        raise ValueError(f"expected settings of greedy search or sampling, got those of {way}")
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    model_inputs = {
        name: value
        for name, value in model_kwargs.items()
        if name not in _GENERATE_ARGUMENTS and value is not None
    }
    check_last_type(model, model_inputs)
    check_context(ids, mask)
    positions = model_kwargs.get("position_ids")
    if needs_media_positions(model, model_inputs):
        return mask, _media_positions(model, ids, mask, positions, model_inputs), model_inputs
    _check_positions(positions, mask)
    return mask, None, model_inputs


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
            "expected no position_ids, or those that count the tokens from 0, got other positions,"
            f" {tuple(positions.shape)}: leave them out"
        )


def generate(
    plans: StepPlans,
    context_ids: Tensor,
    context_mask: Tensor | None,
    max_new_tokens: int | None,
    streamer: BaseStreamer | None,
    mode: str = "auto",
    compile: bool | str = False,
    keep_first: int = 0,
    **arguments: Any,
) -> Iterator[GenerationStep]:
    """See :meth:`icl_patch.ContextPatcher.generate`; ``arguments`` are those of
    ``model.generate``.
    """
    plans.attached.require_attached()
    model: Any = plans.attached.model
    prepare(model, arguments, plans.attached.tokenizer)
    ids, mask = context_of(model, arguments, context_ids, context_mask)
    mode = _mode_of(mode, compile, mask, keep_first)
    media_positions(model, ids, mask, arguments)  # checks them
    lengths = [setting(model, arguments, name) for name in ("max_length", "max_new_tokens")]
    if max_new_tokens is None and lengths == [None, None]:
        room = position_limit(model) - int(mask.sum(1).max()) + 1  # the last token is not run
        max_new_tokens = max(1, min(DEFAULT_NEW_TOKENS, room))
    if max_new_tokens is not None:
        arguments["max_new_tokens"] = max_new_tokens
    steps: Iterator[GenerationStep] = model.generate(
        ids,
        attention_mask=mask.long(),
        custom_generate=partial(_steps, plans, mode, compile, keep_first, streamer),
        streamer=streamer,
        **arguments,
    )
    return steps


def _mode_of(mode: str, compile: bool | str, mask: Tensor, keep_first: int) -> str:
    """The mode: with tokens that stay in front two passes, as a step of one pass absorbs all.

    Raises:
        ValueError: another mode, or a compiled step; or a row has no token to absorb.
    """
    if not behind_first(mask[:, :-1], keep_first).any(1).all() and keep_first:
        raise ValueError(
            f"expected more than {keep_first + 1} tokens in every row with {keep_first=}, got"
            f" {int(mask.sum(1).min())}"
        )
    if keep_first and (compile is True or mode not in (AUTO_MODE, TWO_PASS)):
        asked = "compile=True" if compile is True else f"mode={mode!r}"
        raise ValueError(
            f"expected mode={TWO_PASS!r} with {keep_first=}, as steps of one pass absorb every"
            f" token, got {asked}: leave it out, or take keep_first=0"
        )
    return TWO_PASS if keep_first else mode


def _steps(*arguments: Any, **prepared: Any) -> Iterator[GenerationStep]:
    """The steps of :func:`_loop`; everything before the first one has been done, and its errors
    raised.
    """
    steps: Any = _loop(*arguments, **prepared)
    next(steps)  # from here on the loop's `finally` runs, even if nobody takes a step
    return steps


def _loop(
    plans: StepPlans,
    mode: str,
    compile: bool | str,
    keep_first: int,
    streamer: BaseStreamer | None,
    model: PreTrainedModel,
    ids: Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    **model_kwargs: Any,
) -> Iterator[GenerationStep | None]:
    """The loop of transformers' ``_sample`` around our decode step, with the arguments of a
    decoding method; it yields None when it is ready for the first step.
    """
    attached, config, token_ids = plans.attached, generation_config, ids[:, -1]
    ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    live = torch.ones_like(token_ids, dtype=torch.bool)
    all_scores: Any = () if config.return_dict_in_generate and config.output_scores else None
    release = None
    try:
        mask, media, model_inputs = _checked(model, ids, config, model_kwargs)
        with attached.attachment.exclusive():
            attached.agree("the prompt", (ids, mask), options=(mode, compile, keep_first))
            capacity = max(int(config.max_length), ids.shape[1] + 1)
            lengths, new = mask.sum(1), capacity - ids.shape[1] - 1  # the last token is not run
            check_length(model, int(lengths.max()), new)
            check_one_side(model, lengths, new)
            if compile is True:
                check_compilable(attached)
            plan = plans.choose(mode, one_pass=compile is True)
            state = start_decoding(
                attached,
                plan,
                ids,
                mask,
                capacity,
                reserve=not compile,
                media=media,
                keep_first=keep_first,
                **model_inputs,
            )
            if compile is True:
                release = use_reusable_step(plans, state, compiled=True)
            elif compile:
                release = use_program(plans, state)
        yield None
        while live.any():
            result = decode_one_token(state, token_ids)
            if attached.update == "exact" and state.steps % REPLAY_EVERY == 1:
                replayed = attached.replay_logits(result.make_patch())[:, -1:]
                name, logits = f"step {state.steps} of this generation", result.logits.unsqueeze(1)
                attached.warn_unless_exact(name, replayed, logits, state.live)
            so_far = state.tokens
            scores = logits_processor(so_far, result.logits.to(torch.float32, copy=True))
            chosen = (
                attached.ranks.same(torch.multinomial(scores.softmax(-1), 1).squeeze(1))
                if config.do_sample
                else scores.argmax(-1)
            )
            token_ids = torch.where(live, chosen, config._pad_token_tensor) if ends else chosen
            longer = torch.cat([so_far, token_ids.unsqueeze(1)], 1)
            if all_scores is not None:
                all_scores += (scores,)
            ended = ~live | stopping_criteria(longer, all_scores)
            if streamer is not None:
                streamer.put(token_ids.cpu())
            yield GenerationStep(
                token_ids, result.logits, scores, live, ended, state.mode.value, result.make_patch
            )
            live = ~ended
            if ends:  # else transformers goes on with rows that have ended, and so do we
                state.live = live.unsqueeze(1)
    finally:
        if release is not None:
            release()
        if streamer is not None:  # also after an error: a consumer may be waiting for the text
            streamer.end()
