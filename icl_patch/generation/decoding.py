"""Decoding: in each step everything before the current token becomes a change of weights for it.

:func:`start_decoding` runs a context into a cache and returns a :class:`DecodeState`;
:func:`decode_one_token` runs one token on top of it. A step leaves the model's modules as they
were. Shapes: B rows, S tokens so far, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from icl_patch.errors import UnsupportedModelError
from icl_patch.generation.decode_mode import DecodeMode
from icl_patch.generation.decode_step import DecodeStep, RunStep, StepDetails, StepOutput
from icl_patch.generation.one_pass_plan import OnePassPlan
from icl_patch.generation.step_inputs import StepInputs
from icl_patch.invariance.arithmetic import BATCH_INVARIANT, NATIVE, arithmetic_here
from icl_patch.layers.attachment import as_pass
from icl_patch.models import kv_cache
from icl_patch.models.forward import MediaPositions, over_columns
from icl_patch.models.model_checks import require_finite
from icl_patch.models.positions import switch_lengths
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import AttachedBlock, Factors
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.recording.diagnostics import BlockDiagnostics
from icl_patch.recording.hooks import paths_of
from icl_patch.recording.passes import Computation, run_closing_pass
from icl_patch.recording.patch_assembly import agree_on_violations, filled, scales_of
from icl_patch.recording.sequences import Sequences, absorb_all_but_last, switches


@dataclass(eq=False)
class DecodeState:
    """A growing context: its tokens, its cache, and how its steps run.

    Attributes:
        attached: the model. mode, arithmetic: how the steps run.
        inputs: the current token, its place and the cache, which a step of one pass reads.
        run: a step of one pass on ``inputs``, eager, compiled or captured; None in two passes.
        ids: (B, capacity) int64. context_mask: (B, C) bool, of the first C columns; the later ones
            hold tokens.
        live: (B, 1) bool, the rows that still generate. The others get no patch.
        fingerprint: of the weights at the start. weights, code: the counts of the model's watch
            then.
        fill: runs the model on a head; returns a new cache. None unless the rotary factors change
            at some length (LongRoPE).
        media: positions of the context with its images (M-RoPE).
        keep_first: how many of every row's first tokens stay, in two passes only.
    """

    attached: AttachedModel
    mode: DecodeMode
    arithmetic: str
    inputs: StepInputs
    run: RunStep | None
    ids: Tensor
    context_mask: Tensor
    live: Tensor
    fingerprint: str
    weights: tuple[int, int]
    code: int
    fill: Callable[[Sequences], Cache] | None
    media: MediaPositions | None
    keep_first: int

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return 1 + self.inputs.length - self.context_mask.shape[1]

    def advance(self, token_ids: Tensor) -> None:
        """Make ``token_ids`` (B,) the current token; the one before joins the context."""
        self.ids[:, self.inputs.length] = token_ids
        self.inputs.advance(token_ids)

    @property
    def tokens(self) -> Tensor:
        """(B, S), the context so far, including the current token."""
        return self.ids[:, : self.inputs.length]

    def sequences(self) -> Sequences:
        """The tokens so far: all but the current one and the first ones absorbed."""
        return sequences_of(self.tokens, self.context_mask, self.media, self.keep_first)


def sequences_of(
    ids: Tensor, context_mask: Tensor, media: MediaPositions | None, keep_first: int
) -> Sequences:
    """Tokens (B, S) that began with a context of mask (B, C), and perhaps with images: all but the
    last one and the first ``keep_first`` absorbed.
    """
    mask = F.pad(context_mask, (0, ids.shape[1] - context_mask.shape[1]), value=True)
    return replace(absorb_all_but_last(ids, mask, keep_first), media=media)


@dataclass(frozen=True, eq=False)
class DecodeResult:
    """The result of a decode step.

    Attributes:
        logits: (B, V) of the reduced stream.
        make_patch: assembles the patch from the factors that the step left, when it is called.
    """

    logits: Tensor
    make_patch: Callable[[], ContextPatch]


@as_pass
def start_decoding(
    attached: AttachedModel,
    plan: OnePassPlan | None,
    context_ids: Tensor,
    context_mask: Tensor,
    capacity: int,
    *,
    reserve: bool = True,
    media: MediaPositions | None = None,
    keep_first: int = 0,
    **model_inputs: Any,
) -> DecodeState:
    """Run the unmodified model on all of a context but its last token.

    Args:
        plan: how the steps run both streams in one pass; None for two passes.
        context_ids, context_mask: (B, C) int64 and bool, left-padded.
        capacity: the maximum number of tokens, C included.
        reserve: whether the cache gets room for later tokens, so that few steps copy it.
        media: positions of the context if there are images in it (M-RoPE).
        keep_first: how many of every row's first tokens stay; without a plan only.
        model_inputs: further inputs of the model for the context.
    """
    batch, width = context_ids.shape
    mode = DecodeMode.TWO_PASS if plan is None else plan.mode
    sequences = absorb_all_but_last(context_ids, context_mask, keep_first)
    if media is not None:
        sequences = replace(sequences, media=media._replace(head=media.head[..., :-1]))

    def fill(head: Sequences) -> Cache:
        cache = attached.prefill(head, **over_columns(model_inputs, head.head))
        if reserve:
            kv_cache.reserve(cache, capacity)
        return cache

    cache = fill(sequences)
    rows = 1 if plan is None else plan.layout.rows
    past, first = (x.repeat(rows, 1) for x in (context_mask, sequences.positions[:, -1:]))
    past = past[:, :-1].long()
    inputs = StepInputs(
        current=torch.zeros_like(first),
        positions=first - 1,
        mask=F.pad(past, (0, capacity - past.shape[1])),
        cache=cache,
        slot=None,
        length=past.shape[1],
    )
    ids, watch = context_ids.new_zeros(batch, capacity), attached.watch
    ids[:, : width - 1] = context_ids[:, :-1]
    return DecodeState(
        attached=attached,
        mode=mode,
        arithmetic=NATIVE if plan is None else plan.arithmetic,
        inputs=inputs,
        run=None if plan is None else DecodeStep(plan, inputs, batch),
        ids=ids,
        context_mask=context_mask,
        live=torch.ones_like(context_mask[:, :1]),
        fingerprint=attached.weights.fingerprint,
        weights=(watch.weights, watch.numbers),
        code=watch.code,
        fill=fill if switch_lengths(attached.model) else None,
        media=sequences.media,
        keep_first=keep_first,
    )


@torch.inference_mode(False)  # the cache is written in place, inside inference mode and outside
@torch.no_grad()
def decode_one_token(state: DecodeState, token_ids: Tensor) -> DecodeResult:
    """Run one token per row, with everything before it absorbed into its weights.

    Args:
        state: from :func:`start_decoding`; it has grown by one token afterwards.
        token_ids: (B,) int64, the current tokens: the context's last, then generated ones.

    Returns:
        The logits of the next tokens, and what makes the patch.

    Raises:
        ControllabilityError: no change of the weights can have the effect, for the block and row
            named.
        NonFiniteError: a logit of a live row is not finite.
        UnsupportedModelError: the model has forward hooks with which the patch would be wrong; or
            it got some, or other modules or settings, since the first step, and its steps run in
            one pass.
    """
    attached = state.attached
    with attached.attachment.exclusive():
        return attached.ranks.shared(lambda: _decode(state, token_ids))


def _decode(state: DecodeState, token_ids: Tensor) -> DecodeResult:
    attached = state.attached
    attached.require_attached()
    if state.run is not None and (hooked := attached.hooks.new()):
        raise UnsupportedModelError(
            "expected the model without forward hooks, as at the first step, got new ones"
            f" on {paths_of(hooked)}: generate again, with mode='two_pass'"
        )
    if state.run is not None and attached.watch.code != state.code:
        raise UnsupportedModelError(
            f"expected {type(attached.model).__name__} with the modules and settings that it had at"
            " the first step, they have changed: generate again, or take mode='two_pass'"
        )
    state.advance(token_ids)
    if state.fill is not None and state.steps > 1:
        _refill(state, state.fill)
    if state.run is None:
        return _result_of(attached.compute_from(state.inputs.cache, state.sequences(), state.live))
    output = state.run()
    # the step's only synchronisation with the device
    if attached.ranks.any(bool(output.maybe_infeasible)):
        attached.ranks.shared(lambda: _check_feasible(state, output))
        misses = output.details().misses
        missed = misses is not None and bool((misses * state.live.T).any())
        if attached.ranks.any(missed):
            return _result_of(_closed_again(state, output))
    return DecodeResult(output.logits, _deferred_patch(state, output))


def _check_feasible(state: DecodeState, output: StepOutput) -> None:
    resolved = _diagnostics(state.attached.blocks, output.details(), state.live)
    agree_on_violations(state.attached, resolved)
    for diagnostics in resolved:
        diagnostics.check(start=state.steps - 1)
    model = state.attached.model
    run_whole = partial(forward_passes.run_whole, model, state.sequences())
    require_finite(model, output.logits.unsqueeze(1), run_whole, state.live)


def _diagnostics(
    blocks: Sequence[AttachedBlock], details: StepDetails, live: Tensor
) -> list[BlockDiagnostics]:
    """The diagnostics of a step, of the rows that were live."""
    return [
        BlockDiagnostics.of(block.path, live.to(block.device), notes)
        for block, notes in zip(blocks, details.notes, strict=True)
    ]


def _refill(state: DecodeState, fill: Callable[[Sequences], Cache]) -> None:
    """Fill the cache again, in place, if LongRoPE changes its factors with the current token."""
    sequences = state.sequences()
    if not switches(state.attached.model, sequences):
        return
    filled, cache = fill(sequences), state.inputs.cache
    if cache.is_compileable:
        kv_cache.copy_cache(filled, cache, state.inputs.length - 1)
    else:
        cache.layers[:] = filled.layers


def _result_of(computation: Computation) -> DecodeResult:
    patch = computation.patch
    return DecodeResult(computation.reduced_logits[:, -1], lambda: patch)


def _closed_again(state: DecodeState, output: StepOutput) -> Computation:
    """Repeat an exact step if some of its factors miss their target: a pass of the reduced stream
    closes every block on the context's output again, each from the output that the block before it
    reached.
    """
    attached = state.attached
    patch = attached.empty_patch(state.sequences(), passes=2, arithmetic=BATCH_INVARIANT)
    patch = replace(patch, logits=output.logits.unsqueeze(1))
    activations = output.details().activations
    assert activations is not None
    return run_closing_pass(attached, activations, patch, attached.update, state.live)


def _deferred_patch(state: DecodeState, output: StepOutput) -> Callable[[], ContextPatch]:
    """Makes the patch of a step when it is called: later, when the state has moved on."""
    attached, watch = state.attached, state.attached.watch
    same_weights = state.weights == (watch.weights, watch.numbers)
    fingerprint = state.fingerprint if same_weights else attached.weights.fingerprint
    arithmetic = arithmetic_here(attached.model) if state.arithmetic == NATIVE else state.arithmetic
    ids, context_mask, live, media = state.tokens, state.context_mask, state.live, state.media
    blocks = tuple(attached.blocks)  # also if it is detached by then

    @torch.no_grad()
    def make() -> ContextPatch:
        details = output.details()
        layers = tuple(
            _of_live_rows(block, layer, live)
            for block, layer in zip(blocks, details.factors, strict=True)
        )
        exact = details.misses is not None  # both streams have the same logits
        logits = output.logits.unsqueeze(1) if exact else None
        sequences = sequences_of(ids, context_mask, media, 0)  # one pass absorbs all
        patch = attached.empty_patch(sequences, passes=1, arithmetic=arithmetic)
        if patch.info.fingerprint != fingerprint:
            raise ValueError(
                "expected the weights that the step ran with, they have changed since: read the"
                " step's patch before you change weights"
            )
        calls = [_diagnostics(blocks, details, live)]
        patch, _ = filled(
            attached,
            replace(patch, logits=logits),
            layers,
            calls,
            logits,
            patch.kept_mask & live,
            identical=exact,
        )
        return patch

    return make


def _of_live_rows(block: AttachedBlock, layer: Factors, live: Tensor) -> Factors:
    """A copy of a block's factors, with its norms' scales; rows that had ended have no change."""
    scales = scales_of(block, layer)
    factors: Factors = {}
    for name, factor in layer.items():
        # the indices of the active experts stay
        none = torch.zeros_like(factor) if factor.is_floating_point() else factor
        unchanged = scales.get(name.replace(".new_scale", ".scale"), none).to(factor.dtype)
        rows = live.to(factor.device)
        rows = rows.reshape(*rows.shape, *[1] * (factor.dim() - 2))
        factors[name] = torch.where(rows, factor, unchanged)
    return factors | scales
