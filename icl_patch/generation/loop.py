"""The per-token loop: at every step the context, all of it, becomes a change of weights for the
current token.

What is chosen from the logits, and when a row ends, is transformers' own: its generation
configuration, logits processors, stopping criteria and streamers. The loop is an iterator of steps
(:meth:`icl_patch.ContextPatcher.generate`), or a decoding method for
``model.generate(custom_generate=...)`` (:meth:`icl_patch.ContextPatcher.decoding_method`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    QuantizedCache,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from icl_patch import metrics
from icl_patch.errors import UnsupportedModelError
from icl_patch.generation.compiled_step import check_compilable, fix
from icl_patch.generation.decode_step import (
    Decoded,
    DecodeMode,
    Decoding,
    decode_one_token,
    has_ties,
    prefill,
    shared_cache_streams,
)
from icl_patch.models.language_model import check_length, check_vocabulary, position_limit
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patcher import ContextPatcher
from icl_patch.recording.passes import Computation
from icl_patch.recording.sequences import absorb_all_but_last, check_context, switches

LOGITS = ("reduced", "context", "replay")
DEFAULT_NEW_TOKENS = 64


@dataclass(frozen=True)
class ReplayCheck:
    """A step against the replay of its patch, without context: the logits' distance relative to max
    |logit|, and the same choice, (B,).

    Of rows that had ended nothing is said: 0 and True.
    """

    linf: Tensor
    same_argmax: Tensor


@dataclass(frozen=True, eq=False)
class GenerationStep:
    """One generated token of every row.

    Attributes:
        token_ids: (B,); a row that had ended before has the padding id.
        logits: (B, V) that were chosen from, in the model's dtype; scores: the same in fp32 after
            the logits processors.
        live: (B,) bool, the rows that had not ended before this step; ended: those that have after
            it.
        way: how the step ran: ``"two streams"``, ``"fast"``, or ``"two passes"``.
        check: the step against its replay, where one was asked for.
    """

    token_ids: Tensor
    logits: Tensor = field(repr=False)
    scores: Tensor = field(repr=False)
    live: Tensor
    ended: Tensor
    way: str
    check: ReplayCheck | None
    _make_patch: Callable[[], ContextPatch] | None = field(repr=False)

    @cached_property
    def patch(self) -> ContextPatch:
        """The patch that the tokens came from, of the current token of every row; made when it is
        first asked for.

        It has logits with the context where the step computed them: in two passes, or where the
        choice is made from them.
        """
        if self._make_patch is None:
            raise ValueError(
                "expected patches=True, these steps were generated without their patches"
            )
        return self._make_patch()


class History:
    """A growing context with its cache: at each step, everything before the current token is
    absorbed.

    ``model_inputs`` are further inputs of the model for the pass over all of the context but its
    last token. Several histories on one patcher do not mix: all their state is here, and a pass
    leaves none in the model.
    """

    def __init__(
        self,
        patcher: ContextPatcher,
        context_ids: Tensor,
        context_mask: Tensor | None,
        **model_inputs: Any,
    ) -> None:
        patcher.require_attached()
        ids, mask = check_context(context_ids, context_mask)
        self._patcher = patcher
        self._sequences = absorb_all_but_last(ids, mask)
        check_vocabulary(patcher.model, ids, mask)
        self._model_inputs = model_inputs
        with torch.inference_mode(False), torch.no_grad():
            self._cache = patcher.prefill(self._sequences, **model_inputs)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> Computation:
        """The patch for the current token; call once a token."""
        self._patcher.require_attached()
        if switches(self._patcher.model, self._sequences):
            self._cache = self._patcher.prefill(self._sequences, **self._model_inputs)
        return self._patcher.compute_from(self._cache, self._sequences)

    def append(self, token_ids: Tensor) -> None:
        """Make ``token_ids`` (B,) the current token; the one before joins the context."""
        self._sequences = self._sequences.advanced(token_ids)


@dataclass(frozen=True)
class Options:
    """How to generate, beside what transformers' configuration says; see
    :meth:`icl_patch.ContextPatcher.generate`.
    """

    logits: str = "reduced"
    fast: bool | None = False
    patches: bool = True
    check_every: int = 0
    prefill_chunk: int | None = None
    compiled: bool = False
    graph: bool = False

    @property
    def fixed(self) -> bool:
        """Whether the step runs on buffers that never move."""
        return self.compiled or self.graph

    def __post_init__(self) -> None:
        if self.logits not in LOGITS:
            raise ValueError(f"expected logits {', '.join(LOGITS)}, got {self.logits!r}")
        if self.check_every < 0:
            raise ValueError(f"expected check_every ≥ 0, got {self.check_every}")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ValueError(f"expected prefill_chunk ≥ 1, got {self.prefill_chunk}")


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What transformers makes of a generation configuration for a prompt: ids (B, C), mask (B, C)
    bool.
    """

    ids: Tensor
    mask: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    cache: Cache | None
    model_inputs: dict[str, Any]

    @property
    def capacity(self) -> int:
        """The most tokens that there can be."""
        return max(int(self.config.max_length), self.ids.shape[1] + 1)


# What transformers' generate hands to a decoding method beside the model's inputs.
_ITS_OWN = (
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
    """A decoding method for transformers' generate that only hands back what it was given."""
    if generation_config.num_beams > 1:
        raise ValueError(
            f"expected num_beams = 1, got {generation_config.num_beams}: a patch belongs to one"
            " history"
        )
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    _check_positions(model_kwargs.get("position_ids"), mask)
    cache = model_kwargs.get("past_key_values")
    if getattr(cache, "offloading", False) or isinstance(cache, QuantizedCache):
        raise ValueError(
            "expected a dynamic or a static cache, got"
            f" {generation_config.cache_implementation or type(cache).__name__}"
        )
    if cache is not None and cache.get_seq_length() != 0:
        raise ValueError(
            f"expected an empty cache, got one of {int(cache.get_seq_length())} tokens: the context"
            " is absorbed from its start"
        )
    return _Prepared(
        ids=input_ids,
        mask=mask,
        processors=logits_processor,
        criteria=stopping_criteria,
        config=generation_config,
        cache=cache if cache is not None and cache.is_compileable else None,
        model_inputs={
            name: value
            for name, value in model_kwargs.items()
            if name not in _ITS_OWN and value is not None
        },
    )


def _check_positions(positions: Tensor | None, mask: Tensor) -> None:
    """That given positions, (B, C) or several planes of them, are those that count the tokens of
    the mask, as ours do.
    """
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
    patcher: ContextPatcher,
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
    patcher.require_attached()
    if max_new_tokens is not None and max_new_tokens < 0:
        raise ValueError(f"expected max_new_tokens ≥ 0, got {max_new_tokens}")
    for name, ours in (("attention_mask", "context_mask"), ("custom_generate", "decoding_method")):
        if name in arguments:
            raise TypeError(f"expected {ours}, got {name}")
    if arguments.get("assistant_model") is not None:
        raise ValueError(
            "expected no assistant_model: each token is generated with a patch of its own"
        )
    cache = arguments.get("past_key_values")
    if cache is not None and not cache.is_compileable:
        raise ValueError(
            f"expected a static cache or none, got a {type(cache).__name__}: a dynamic one is made"
            " for every context"
        )
    ids, mask = check_context(context_ids, context_mask)
    check_vocabulary(patcher.model, ids, mask)
    if max_new_tokens == 0:
        if streamer is not None:
            streamer.put(ids.cpu())
            streamer.end()
        return iter(())
    if max_new_tokens is None and _has_no_length(patcher.model, arguments):
        room = position_limit(patcher.model) - int(mask.sum(1).max())
        max_new_tokens = max(1, min(DEFAULT_NEW_TOKENS, room))
    lengths = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    model: Any = patcher.model
    prepared = model.generate(
        ids,
        attention_mask=mask.long(),
        custom_generate=_prepare,
        streamer=streamer,
        **lengths,
        **arguments,
    )
    return _steps(patcher, prepared, options, streamer)


def _has_no_length(model: PreTrainedModel, arguments: dict[str, Any]) -> bool:
    """Whether nothing that ``model.generate`` would see says how much to generate."""
    configs = (arguments.get("generation_config"), model.generation_config)
    given = [
        getattr(config, name, None)
        for config in configs
        for name in ("max_length", "max_new_tokens")
    ]
    return arguments.get("max_length") is None and all(length is None for length in given)


def decoding_method(
    patcher: ContextPatcher, streamer: BaseStreamer | None, options: Options
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
        if model is not patcher.model:
            raise ValueError(
                "expected the model that the patcher is attached to, got another"
                f" {type(model).__name__}"
            )
        patcher.require_attached()
        prepared = _prepare(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        )
        check_vocabulary(model, *check_context(prepared.ids, prepared.mask))
        asked = [
            name for name in ("scores", "logits") if getattr(generation_config, f"output_{name}")
        ]
        found: dict[str, Any] = {
            name: () for name in asked if generation_config.return_dict_in_generate
        }
        sequences = [input_ids]
        for step in _steps(patcher, prepared, options, streamer):
            sequences.append(step.token_ids.unsqueeze(1))
            for name in found:
                found[name] += (getattr(step, name).float(),)
        found["sequences"] = torch.cat(sequences, 1)
        return (
            GenerateDecoderOnlyOutput(**found)
            if generation_config.return_dict_in_generate
            else found["sequences"]
        )

    return decode


@torch.inference_mode(False)  # what is made here is written in place, by whoever takes the steps
def start(patcher: ContextPatcher, prepared: _Prepared, options: Options) -> Decoding:
    """The context in a cache, ready for its last token."""
    longest, new = int(prepared.mask.sum(1).max()), prepared.capacity - prepared.ids.shape[1]
    check_length(patcher.model, longest, new)
    if options.graph and not prepared.ids.is_cuda:
        raise ValueError(f"expected a CUDA device with graph=True, got {prepared.ids.device}")
    if options.fixed:
        check_compilable(patcher.model, patcher.blocks)
    return prefill(
        patcher,
        prepared.ids,
        prepared.mask,
        prepared.capacity,
        _decode_mode(patcher, options),
        chunk=options.prefill_chunk,
        cache=None if options.fixed else prepared.cache,
        reserve=not options.fixed,
        **prepared.model_inputs,
    )


def _decode_mode(patcher: ContextPatcher, options: Options) -> DecodeMode:
    if patcher.closes:
        for name, wanted in (
            ("fast", options.fast),
            ("compiled", options.compiled),
            ("graph", options.graph),
        ):
            if wanted:
                raise ValueError(
                    f"expected an update of one pass with {name}=True, {patcher.update!r} takes two"
                    " passes on this model"
                )
        return DecodeMode.TWO_PASS
    if options.fast or (options.fast is None and not has_ties(patcher)):
        try:
            shared_cache_streams(patcher)
        except UnsupportedModelError:
            if options.fast:
                raise
        else:
            return DecodeMode.SHARED_CACHE
    return DecodeMode.TWO_STREAM


@torch.no_grad()
def _next(
    state: Decoding, token_ids: Tensor, options: Options, number: int
) -> tuple[Decoded, Tensor, ReplayCheck | None]:
    """The ``number``-th step: what was decoded, the logits to choose from, and the check if it is
    due.
    """
    decoded = decode_one_token(state, token_ids, both=options.logits == "context")
    logits = decoded.logits
    if options.logits == "context":
        assert decoded.context_logits is not None
        logits = decoded.context_logits
    due = options.check_every and number % options.check_every == 0
    if not due and options.logits != "replay":
        return decoded, logits, None
    replayed = state.patcher.replay(decoded.make_patch())[0][:, -1]
    logits = replayed if options.logits == "replay" else logits
    if not due:
        return decoded, logits, None
    ended = ~state.live[:, 0]  # they have no patch
    linf, same = (
        metrics.linf(replayed, decoded.logits),
        metrics.same_argmax(replayed, decoded.logits),
    )
    return decoded, logits, ReplayCheck(linf.masked_fill(ended, 0), same | ended)


def _steps(
    patcher: ContextPatcher, prepared: _Prepared, options: Options, streamer: BaseStreamer | None
) -> Iterator[GenerationStep]:
    """The steps, up to the first of which everything is ready, and errors have been raised."""
    steps: Any = _loop(patcher, prepared, options, streamer)
    next(steps)  # what has begun is ended, also where nobody asks for a step
    return steps


def _loop(
    patcher: ContextPatcher, prepared: _Prepared, options: Options, streamer: BaseStreamer | None
) -> Iterator[GenerationStep | None]:
    """The loop of transformers' ``_sample`` around our decode step; first it gives None, when it is
    ready.
    """
    config: Any = prepared.config
    processors: Any = prepared.processors
    token_ids, number = prepared.ids[:, -1], 0
    ends = any(hasattr(criterion, "eos_token_id") for criterion in prepared.criteria)
    live = torch.ones_like(token_ids, dtype=torch.bool)
    all_scores: Any = () if config.return_dict_in_generate and config.output_scores else None
    release = None
    try:
        with patcher.attachment.one_pass():
            state = start(patcher, prepared, options)
            if options.fixed:
                release = fix(
                    state,
                    both=options.logits == "context",
                    compiled=options.compiled,
                    graph=options.graph,
                )
        yield None
        while live.any():
            number += 1
            decoded, logits, check = _next(state, token_ids, options, number)
            so_far = state.ids[:, : state.length]  # (B, S)
            scores = processors(so_far, logits.to(torch.float32, copy=True))
            chosen = (
                torch.multinomial(scores.softmax(-1), 1).squeeze(1)
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
            make_patch = decoded.make_patch if options.patches else None
            yield GenerationStep(
                token_ids, logits, scores, live, ended, state.way.value, check, make_patch
            )
            live = ~ended
            state.end(live)
    finally:
        if release is not None:
            release()
        if streamer is not None:  # whoever waits for the text has waited enough, however it ended
            streamer.end()
