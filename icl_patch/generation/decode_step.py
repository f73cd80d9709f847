"""One decode step: everything before the current token becomes a change of weights for it.

:func:`prefill` runs a context into a cache and returns a :class:`DecodeState`;
:func:`decode_one_token` runs one token on top of it. A step leaves the model's modules as they
were. Shapes: B rows, S tokens so far, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.generation.decode_state import (
    DecodeMode,
    DecodeState,
    StepInputs,
    StepOutput,
    maybe_infeasible,
    new_step_inputs,
    sequences_of,
)
from icl_patch.generation.decoder import Decoder
from icl_patch.generation.fused_modules import FusedModules
from icl_patch.generation.shared_cache import SharedCacheStreams, attending
from icl_patch.invariance.arithmetic import BATCH_INVARIANT, MODEL, running_in
from icl_patch.layers.attachment import one_pass
from icl_patch.layers.device_hooks import input_device
from icl_patch.models import kv_cache
from icl_patch.models.attention_mask import OneToken, restricted_attention
from icl_patch.models.forward import MediaPositions, inputs, names_of, over_columns
from icl_patch.models.forward_override import (
    Forward,
    Overrides,
    is_plain_linear,
    linear_forward,
    overridable,
    plain_linears,
)
from icl_patch.models.language_model import check_vocabulary
from icl_patch.models.positions import switch_lengths
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import AttachedBlock, Factors
from icl_patch.recording.compute import close_on
from icl_patch.recording.decode_recorder import DecodeRecorder
from icl_patch.recording.exact_decode_recorder import ExactDecodeRecorder, close_loops
from icl_patch.recording.hooks import paths_of
from icl_patch.recording.patch_assembly import layers_of_all, report_of_all, scales_of
from icl_patch.recording.record import recording
from icl_patch.recording.sequences import Sequences, absorb_all_but_last, switches


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """Both streams of one token through the model, without waiting for the device.

    Attributes:
        inputs: the tensors that the step reads.
        streams: how both streams share one cache; None if each has its own rows in the cache.
        linears: modules, each with the forward that runs its product through our ops.
        receives_norm_input: blocks whose recorder gets its input from the fused pre-MLP norm.
        patch_index: (2B,) int64, the patch of each row of both streams, -1 for none.
        arithmetic: of the step's products and activations. An exact step needs
            ``"batch_invariant"``.
        for_inductor: whether the step is written for a compiler, see :class:`DecodeRecorder`.
    """

    decoder: Decoder
    inputs: StepInputs
    streams: SharedCacheStreams | None
    linears: list[tuple[nn.Module, Forward]]
    fused: list[tuple[nn.Module, Forward]]
    receives_norm_input: frozenset[AttachedBlock]
    patch_index: Tensor
    arithmetic: str = MODEL
    for_inductor: bool = False

    @cached_property
    def _overrides(self) -> Overrides:
        return Overrides([*self.linears, *self.fused])

    def for_compiler(self) -> "DecodeStep":
        """The same step for a compiler, which fuses small operations but cannot see into ours. An
        exact step stays as it is: it has to have the bits of its replay.
        """
        if self.arithmetic == BATCH_INVARIANT:
            return self
        return replace(self, fused=[], receives_norm_input=frozenset(), for_inductor=True)

    def __call__(self, token_ids: Tensor, return_context_logits: bool) -> StepOutput:
        """Make ``token_ids`` (B,) the current token and run it."""
        attached, step_inputs = self.decoder.attached, self.inputs
        model: Any = attached.model
        step_inputs.advance(token_ids)
        exact = attached.update == "exact"
        kind = ExactDecodeRecorder if exact else DecodeRecorder
        recorders = [
            kind(
                block,
                attached.update,
                self.patch_index,
                receives_norm_input=block in self.receives_norm_input,
                for_inductor=self.for_inductor,
            )
            for block in attached.blocks
        ]
        model_inputs = inputs(
            model,
            step_inputs.current,
            step_inputs.visible,
            step_inputs.positions,
            step_inputs.cache,
            last_logits=1,
        )
        streams = self._both_streams(len(token_ids), return_context_logits, exact)
        with recording(recorders), streams, self._arithmetic():
            logits = model(**model_inputs).logits[:, -1]
        misses = close_loops(recorders)
        factors = [recorder.factors for recorder in recorders]
        diagnostics = [recorder.diagnostics for recorder in recorders]
        flag = maybe_infeasible(diagnostics, logits)
        if misses is None:
            return StepOutput(logits, flag, factors, diagnostics)
        activations = [recorder.context for recorder in recorders]
        flag = flag | misses.any()
        return StepOutput(
            logits, flag, factors, diagnostics, misses=misses, activations=activations
        )

    def _arithmetic(self) -> AbstractContextManager[None]:
        if self.streams is None or self.arithmetic == MODEL:
            return running_in(self.arithmetic)
        return self.streams.invariant_modules.run()

    @contextmanager
    def _both_streams(
        self, batch: int, return_context_logits: bool, context_only: bool
    ) -> Iterator[None]:
        """Within this context the model runs both streams of the current token; with
        ``context_only`` the head gets the context stream alone, because both have the same bits.
        """
        model = self.decoder.attached.model
        attention: AbstractContextManager[None]
        if self.streams is not None:
            attention = self.streams.run(self.inputs.slot, context_only=context_only)
        else:
            attention = _own_rows(model, batch, self.inputs.mask)
        # not by an ExitStack: an interrupt between entering and noting would leave the forwards
        with attention, self._overrides, self._head(batch, return_context_logits):
            yield

    def _head(self, batch: int, return_context_logits: bool) -> Overrides:
        """The head is the widest matrix of all: it runs only on the rows that need logits,
        (2B, 1, d) -> (B, 1, V).
        """
        head = self.decoder.attached.model.get_output_embeddings()
        if not overridable(head):
            return Overrides(())
        forward = linear_forward(head) if is_plain_linear(head) else head.forward
        reduced = forward if return_context_logits else lambda x: forward(x[-batch:])
        return Overrides([(head, reduced)])


@contextmanager
def _own_rows(model: PreTrainedModel, batch: int, mask: Tensor) -> Iterator[None]:
    """Within this context the rows without the context attend to the current token alone."""
    with (
        restricted_attention(model, OneToken(mask, batch=batch)),
        attending(lambda *_: None),
    ):
        yield


@dataclass(frozen=True, eq=False)
class DecodeResult:
    """The result of a decode step.

    Attributes:
        logits: (B, V) of the reduced stream. context_logits: (B, V) with the context, or None.
        make_patch: assembles the patch from the factors that the step left, when it is called.
        mode: how the step ran.
    """

    logits: Tensor
    context_logits: Tensor | None
    make_patch: Callable[[], ContextPatch]
    mode: DecodeMode


@one_pass
@torch.inference_mode(False)
@torch.no_grad()
def prefill(
    decoder: Decoder,
    context_ids: Tensor,
    context_mask: Tensor,
    capacity: int,
    mode: DecodeMode,
    *,
    chunk: int | None = None,
    reserve: bool = True,
    media: MediaPositions | None = None,
    **model_inputs: Any,
) -> DecodeState:
    """Run the unmodified model on all of a context but its last token.

    Args:
        context_ids, context_mask: (B, C) int64 and bool, left-padded.
        capacity: the maximum number of tokens, C included.
        mode: how the steps are to run. ``SHARED_CACHE`` needs a ``decoder.shared_cache``.
        chunk: the number of tokens per call, for long contexts; all at once by default. Not for
            recurrent models, nor with further inputs.
        reserve: whether the cache gets room for later tokens, so that few steps copy it.
        media: positions of the context if there are images in it (M-RoPE).
        model_inputs: further inputs of the model for the context.
    """
    attached, names = decoder.attached, names_of(model_inputs)
    if chunk is not None and (attached.recurrent or names):
        why = "of a recurrent model, which goes on by one token a call"
        why = f"with {', '.join(names)}" if names else why
        raise ValueError(f"expected no chunks {why}, got chunks of {chunk}")
    batch, width = context_ids.shape
    sequences = absorb_all_but_last(context_ids, context_mask)
    if media is not None:
        sequences = replace(sequences, media=media._replace(head=media.head[..., :-1]))
    check_vocabulary(attached.model, context_ids, context_mask)
    attached.check_rows(sequences)
    attached.watch_hooks(two_streams=mode is not DecodeMode.TWO_PASS)

    def fill(head: Sequences) -> Cache:
        cache = kv_cache.new_cache(attached.model)
        if columns := head.head_ids.shape[1]:
            further = over_columns(model_inputs, columns)
            forward_passes.run_head(attached.model, head, cache, chunk=chunk, **further)
        if mode is DecodeMode.TWO_STREAM:
            kv_cache.stack_cache(cache, batch)
        if reserve:
            kv_cache.reserve(cache, capacity)
        return cache

    cache = fill(sequences)
    step = None
    if mode is not DecodeMode.TWO_PASS:
        streams = 2 if mode is DecodeMode.TWO_STREAM else 1
        past, first = (x.repeat(streams, 1) for x in (context_mask, sequences.positions[:, -1:]))
        step_inputs = new_step_inputs(cache, past[:, :-1], first, capacity)
        step = _new_step(decoder, step_inputs, batch, mode)
    ids = context_ids.new_zeros(batch, capacity)
    ids[:, : width - 1] = context_ids[:, :-1]
    return DecodeState(
        decoder=decoder,
        mode=mode,
        run_step=step,
        step_inputs=None if step is None else step.inputs,
        ids=ids,
        context_mask=context_mask,
        length=width - 1,
        live=torch.ones_like(context_mask[:, :1]),
        cache=cache,
        fingerprint=attached.fingerprint,
        fill=fill,
        switches_factors=bool(switch_lengths(attached.model)),
        media=sequences.media,
    )


def _new_step(
    decoder: Decoder, step_inputs: StepInputs, batch: int, mode: DecodeMode
) -> DecodeStep:
    attached = decoder.attached
    exact = attached.update == "exact"
    if decoder.fused_modules is None:
        with torch.autocast(input_device(attached.model).type, enabled=False):
            decoder.fused_modules = FusedModules(attached.model, attached.blocks)
    streams = None
    if mode is DecodeMode.SHARED_CACHE:
        streams = decoder.shared_cache
        assert streams is not None
    # Attention output projections already run on both streams of a shared cache.
    doubled = set() if streams is None else set(streams.projections)
    linears = [
        module
        for module in plain_linears(attached.model, attached.block_specs)
        if module not in doubled
    ]
    device = step_inputs.current.device
    return DecodeStep(
        decoder,
        step_inputs,
        streams,
        [(module, linear_forward(module)) for module in linears],
        # the replay of an exact step has to run the same modules
        [] if exact else decoder.fused_modules.forwards(),
        frozenset() if exact else frozenset(decoder.fused_modules.blocks_with_norm_input()),
        torch.arange(-batch, batch, device=device).clamp(min=-1),
        BATCH_INVARIANT if exact else MODEL,
    )


@torch.inference_mode(False)  # the cache is written in place, inside inference mode and outside
@torch.no_grad()
def decode_one_token(
    state: DecodeState, token_ids: Tensor, *, return_context_logits: bool = False
) -> DecodeResult:
    """Run one token per row, with everything before it absorbed into its weights.

    Args:
        state: from :func:`prefill`; it has grown by one token afterwards.
        token_ids: (B,) int64, the current tokens: the context's last, then generated ones.
        return_context_logits: whether to compute the context stream's logits too.

    Returns:
        The logits (B, V) of the next tokens.

    Raises:
        ControllabilityError: no change of the weights can have the effect, for the block and row
            named.
        UnsupportedModelError: the model has forward hooks with which the patch would be wrong, or
            its hooks have changed since a compiled step was traced.
    """
    attached = state.decoder.attached
    with attached.attachment.one_pass():
        return attached.ranks.shared(lambda: _decode(state, token_ids, return_context_logits))


def _decode(state: DecodeState, token_ids: Tensor, return_context_logits: bool) -> DecodeResult:
    attached = state.decoder.attached
    with attached.attachment.one_pass():
        attached.require_attached()
        state.advance(token_ids)
        if state.switches_factors and state.steps > 1:
            _refill(state)
        if state.run_step is None:
            return _two_passes(state)
        hooked = attached.hooks.current()
        if state.traced_hooks is not None and hooked != state.traced_hooks:
            raise UnsupportedModelError(
                "expected the forward hooks that the step was traced with, they have changed on"
                f" {paths_of(hooked or state.traced_hooks)}: generate again"
            )
        if hooked and attached.update == "exact":  # the step was tried without hooks
            assert state.step_inputs is not None
            state.step_inputs.advance(token_ids)
            return _two_passes(state)
        output = state.run_step(token_ids, return_context_logits or bool(hooked))
        # the step's only synchronisation with the device
        if attached.ranks.any(bool(output.maybe_infeasible)):
            attached.ranks.shared(lambda: _check_feasible(state, output))
            missed = output.misses is not None and bool((output.misses * state.live.T).any())
            if attached.ranks.any(missed):
                return _closed_again(state, output)
        batch = len(state.ids)
        logits = output.logits[-batch:]
        exact = output.misses is not None  # both streams have the same logits
        context_logits = output.logits[:batch] if exact or len(output.logits) > batch else None
        make_patch = _DeferredPatch(state, output, context_logits, bool(hooked))
        if hooked:
            attached.check_step(hooked, make_patch(), logits.unsqueeze(1), state.live)
    return DecodeResult(logits, context_logits, make_patch, state.mode)


def _check_feasible(state: DecodeState, output: StepOutput) -> None:
    for diagnostics in output.diagnostics:
        diagnostics.resolve(state.live).check(start=state.steps - 1)


def _refill(state: DecodeState) -> None:
    """Fill the cache again, in place, if LongRoPE changes its factors with the current token."""
    sequences = state.sequences()
    if not switches(state.decoder.attached.model, sequences):
        return
    filled = state.fill(sequences)
    if state.cache.is_compileable:
        kv_cache.copy_cache(filled, state.cache, state.length - 1)
    else:
        state.cache.layers[:] = filled.layers


def _two_passes(state: DecodeState) -> DecodeResult:
    attached, sequences = state.decoder.attached, state.sequences()
    computation = attached.compute_from(state.cache, sequences, state.live, two_passes=True)
    patch = computation.patch
    assert patch.logits is not None
    logits = (computation.reduced_logits[:, -1], patch.logits[:, -1])
    return DecodeResult(*logits, lambda: patch, DecodeMode.TWO_PASS)


def _closed_again(state: DecodeState, output: StepOutput) -> DecodeResult:
    """Repeat an exact step if some of its factors miss their target: a pass of the reduced stream
    closes every block on the context's output again, each from the output that the block before it
    reached.
    """
    attached = state.decoder.attached
    patch = attached.empty_patch(state.sequences(), passes=2, arithmetic=BATCH_INVARIANT)
    patch = replace(patch, logits=output.logits.unsqueeze(1))
    assert output.activations is not None
    computation = close_on(attached, output.activations, patch, attached.update, state.live)
    logits = (computation.reduced_logits[:, -1], output.logits)
    return DecodeResult(*logits, lambda: computation.patch, state.mode)


class _DeferredPatch:
    """Makes the patch of one step when it is called: later, when the state has moved on."""

    def __init__(
        self, state: DecodeState, output: StepOutput, context_logits: Tensor | None, hooked: bool
    ) -> None:
        self.attached, self.fingerprint = state.decoder.attached, state.fingerprint
        self.ids, self.context_mask, self.live = state.tokens, state.context_mask, state.live
        self.media = state.media
        self.output = replace(output, activations=None)  # which only a miss needs
        self.context_logits, self.hooked = context_logits, hooked
        self.blocks = tuple(self.attached.blocks)  # also if it is detached by then

    @torch.no_grad()
    def __call__(self) -> ContextPatch:
        output = self.output
        if output.is_overwritten is not None and output.is_overwritten():
            raise ValueError(
                "expected a patch of a CUDA graph's step to be asked for before the next step"
            )
        factors = zip(self.blocks, output.factors, strict=True)
        layers = tuple(self._of_live_rows(block, layer) for block, layer in factors)
        resolved = [diagnostics.resolve(self.live) for diagnostics in output.diagnostics]
        logits = None if self.context_logits is None else self.context_logits.unsqueeze(1)
        arithmetic = MODEL if output.misses is None else BATCH_INVARIANT
        sequences = sequences_of(self.ids, self.context_mask, self.media)
        patch = self.attached.empty_patch(sequences, passes=1, arithmetic=arithmetic)
        if patch.info.fingerprint != self.fingerprint:
            raise ValueError(
                "expected the weights that the step ran with, they have changed since: ask for the"
                " patch before that"
            )
        device = self.live.device
        report = report_of_all(self.attached, [resolved], slice(None), device)
        layers = layers_of_all(self.attached, layers, device)
        return replace(patch, layers=layers, report=report, logits=logits, hooked=self.hooked)

    def _of_live_rows(self, block: AttachedBlock, layer: Factors) -> Factors:
        """A block's factors and its norms' scales; rows that had ended have no change."""
        scales = scales_of(block, layer)
        if self.output.is_overwritten is None and self.live.all():
            return layer | scales
        factors: Factors = {}
        for name, factor in layer.items():
            if not factor.is_floating_point():  # the indices of the active experts
                factors[name] = factor.clone()
                continue
            zero = torch.zeros((), device=factor.device)
            unchanged = scales.get(name.replace(".new_scale", ".scale"), zero).to(factor.dtype)
            live = self.live.to(factor.device)
            live = live.reshape(*live.shape, *[1] * (factor.dim() - 2))
            factors[name] = torch.where(live, factor, unchanged)
        return factors | scales
