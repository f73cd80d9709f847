"""One decode step: everything before the current token, as a change of weights for it.

:func:`prefill` puts a context into a cache, :func:`decode_one_token` runs one token on top of it;
all that they need is in a
:class:`Decoding`, and a pass leaves nothing in the model. B rows, S tokens so far, V ids.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from icl_patch import metrics
from icl_patch.errors import ControllabilityError, UnsupportedModelError
from icl_patch.generation.fused_modules import FusedModules
from icl_patch.generation.shared_cache import SharedCacheStreams
from icl_patch.layers.attachment import one_pass
from icl_patch.models import kv_cache
from icl_patch.models.attention_mask import OneToken, restricted_attention
from icl_patch.models.forward import inputs, names_of
from icl_patch.models.forward_override import (
    Forward,
    is_plain_linear,
    linear_forward,
    overridable,
    overriding,
    plain_linears,
)
from icl_patch.models.language_model import check_vocabulary, random_tokens
from icl_patch.models.positions import switch_lengths
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import AttachedBlock, Factors
from icl_patch.recording.block_recorder import BlockRecorder, recording
from icl_patch.recording.diagnostics import BlockDiagnostics
from icl_patch.recording.passes import report_of
from icl_patch.recording.sequences import Sequences, absorb_all_but_last, switches

if TYPE_CHECKING:
    from icl_patch.patcher import ContextPatcher


class DecodeMode(Enum):
    """How a step gets both streams through the model."""

    # the untouched model, then the kept token alone in the shapes of its replay
    TWO_PASS = "two passes"
    TWO_STREAM = "two streams"  # one pass of 2B rows over a cache of 2B
    # one pass of B rows over a cache of B, doubled from the attention's output to the block's end
    SHARED_CACHE = "fast"


@dataclass(eq=False)
class StepInputs:
    """What a pass over the current token reads, and moves on to the next one.

    Attributes:
        current, positions: (rows, 1) int64, the current token and its position; rows is B, or 2B
            where the streams are stacked.
        mask: (rows, capacity) int64, 1 = token.
        cache: all tokens but the current one, rows of them.
        slot: (1,) int64, the current token's column in a static cache; None for a dynamic one.
        length: in a dynamic one, the tokens up to the current one.
    """

    current: Tensor
    positions: Tensor
    mask: Tensor
    cache: Cache
    slot: Tensor | None
    length: int

    def push(self, token_ids: Tensor) -> None:
        """Make ``token_ids`` (B,) the current token; the one before joins the context. No buffer
        moves, and the host is not waited for.
        """
        self.current.copy_(token_ids.repeat(len(self.current) // len(token_ids)).unsqueeze(1))
        self.positions += 1
        if self.slot is not None:
            self.slot += 1
            self.mask.index_fill_(1, self.slot, 1)
        else:
            self.mask[:, self.length] = 1
            self.length += 1

    @property
    def visible(self) -> Tensor:
        """The mask over the columns of the cache, the current token's included."""
        return self.mask if self.slot is not None else self.mask[:, : self.length]


@dataclass(frozen=True, eq=False)
class Pass:
    """What a pass over the current token leaves: logits (B, V), or (2B, V) of both streams; whether
    a block may have refused, () bool; the blocks' factors and notes; and, where another pass will
    overwrite them, whether one has.
    """

    logits: Tensor
    maybe_infeasible: Tensor
    factors: list[Factors]
    diagnostics: list[BlockDiagnostics]
    overwritten: Callable[[], bool] | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """Both streams of a token through the model, over a feed; nothing here waits for the device.

    Attributes:
        folded: how they share one cache, or None where they are stacked.
        forwards: the modules that run another function, and that; fused: the same, of several
            operations in one launch.
        told: the blocks whose recorders the norm before their MLP tells, which is one of the fused.
        patches: (2B,) int64, which patch each row of both streams has, -1 for none. for_inductor:
            as a recorder has it.
    """

    patcher: "ContextPatcher"
    step_inputs: StepInputs
    folded: SharedCacheStreams | None
    forwards: list[tuple[nn.Module, Forward]]
    fused: list[tuple[nn.Module, Forward]]
    receives_norm_input: frozenset[AttachedBlock]
    patches: Tensor
    for_inductor: bool = False

    def for_compiler(self) -> "Step":
        """The same for a compiler, which fuses small operations itself and sees into none of
        ours.
        """
        return replace(self, fused=[], receives_norm_input=frozenset(), for_inductor=True)

    def __call__(self, token_ids: Tensor, both: bool) -> Pass:
        """Make ``token_ids`` (B,) the current token and run it; ``both``: the head on both streams,
        or the reduced one alone.
        """
        patcher, step_inputs, batch = self.patcher, self.step_inputs, len(token_ids)
        model: Any = patcher.model
        step_inputs.push(token_ids)
        recorders = [
            BlockRecorder(
                block,
                patcher.update,
                patches=self.patches,
                receives_norm_input=block in self.receives_norm_input,
                for_inductor=self.for_inductor,
            )
            for block in patcher.blocks
        ]
        with recording(recorders), self._streams(batch, both):
            logits = model(
                **inputs(
                    model,
                    step_inputs.current,
                    step_inputs.visible,
                    step_inputs.positions,
                    step_inputs.cache,
                    1,
                )
            ).logits[:, -1]
            factors = [block.factors() for block in patcher.blocks]
        diagnostics = [recorder.diagnostics for recorder in recorders]
        return Pass(logits, _maybe_infeasible(diagnostics, logits), factors, diagnostics)

    @contextmanager
    def _streams(self, batch: int, both: bool) -> Iterator[None]:
        """Within this context the model runs both streams of the current token; its head one of
        them, or both.
        """
        model = self.patcher.model
        with ExitStack() as stack:
            if self.folded is not None:
                stack.enter_context(self.folded.run(self.step_inputs.slot))
            else:
                stack.enter_context(
                    restricted_attention(model, OneToken(self.step_inputs.mask, batch=batch))
                )
            stack.enter_context(overriding([*self.forwards, *self.fused]))
            head = model.get_output_embeddings()
            if overridable(head):
                # (2B, 1, d) -> (B, 1, V): the widest matrix of all, on the stream whose logits are
                # wanted
                forward = linear_forward(head) if is_plain_linear(head) else head.forward
                stack.enter_context(
                    overriding([(head, forward if both else lambda x: forward(x[-batch:]))])
                )
            yield


def _maybe_infeasible(diagnostics: list[BlockDiagnostics], like: Tensor) -> Tensor:
    """Whether a block may have refused a row, () bool: in a few launches for all of them."""
    feasibility_checks = [block.feasibility_checks() for block in diagnostics]
    refused, inverses = (
        [x for parts in feasibility_checks for x in parts[kind]] for kind in (0, 1)
    )
    found = [torch.cat(refused).any()] if refused else []
    found += [(torch.cat(inverses) == 0).any()] if inverses else []
    return torch.stack(found).any() if found else like.new_zeros((), dtype=torch.bool)


@dataclass(eq=False)
class Decoding:
    """A growing context.

    Attributes:
        patcher: the attached model. way: how its streams run; step: what runs them, None in two
            passes.
        ids: (B, capacity) int64; context_mask: (B, C) bool, of the context that it started with:
            what came then are tokens.
        length: the tokens that ids hold, the current one included; steps: the decode steps taken.
        live: (B, 1) bool, the rows that still generate: the others get no patch, and nothing is
            said about them.
        cache: all tokens but the current one.
        fingerprint: of the weights at the start.
        fill: puts a head into the given empty cache, or into a new one, with the rows of a step.
        switching: whether the model takes other rotary factors from some length on (LongRoPE).
    """

    patcher: "ContextPatcher"
    way: DecodeMode
    step: Callable[[Tensor, bool], Pass] | None
    ids: Tensor
    context_mask: Tensor
    length: int
    live: Tensor
    cache: Cache
    fingerprint: str
    fill: Callable[[Sequences, Cache | None], Cache]
    switching: bool
    steps: int = 0

    def append(self, token_ids: Tensor) -> None:
        """Note ``token_ids`` (B,) as the current token."""
        self.ids[:, self.length] = token_ids
        self.length += 1
        self.steps += 1

    def end(self, live: Tensor) -> None:
        """Say which rows still generate, (B,) bool."""
        self.live = live.unsqueeze(1)


def _sequences(ids: Tensor, context_mask: Tensor) -> Sequences:
    """The tokens so far, ids (B, S) with a mask (B, C) of those they began with: all but the last
    of them absorbed.
    """
    return absorb_all_but_last(
        ids, F.pad(context_mask, (0, ids.shape[1] - context_mask.shape[1]), value=True)
    )


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a decode step gives: the reduced stream's logits (B, V), those with the context where
    they were computed, and the patch.

    ``make_patch()`` assembles the patch from the factors that the step left behind, whenever it is
    asked for.
    """

    logits: Tensor
    context_logits: Tensor | None
    make_patch: Callable[[], ContextPatch]


@one_pass
def shared_cache_streams(patcher: "ContextPatcher") -> SharedCacheStreams:
    """How a model runs both streams over one cache: traced when it is first asked for, and tried on
    random tokens by replays.

    Raises:
        UnsupportedModelError: it cannot, or it does not say without the context what it says with
            it.
    """
    if patcher.folded is None or not patcher.folded.fresh:
        # whose rounding would hide what is looked for
        with torch.autocast(patcher.model.device.type, enabled=False):
            patcher.folded = _folded(patcher)
    return patcher.folded


def _folded(patcher: "ContextPatcher") -> SharedCacheStreams:
    patcher.folded, name = (
        SharedCacheStreams(patcher.model, patcher.blocks),
        type(patcher.model).__name__,
    )
    try:
        error = _trial_error(patcher)
    # weights of zero have no patch for these tokens, and will say so for the user's
    except ControllabilityError:
        error = 0.0
    except Exception as cause:  # of the model's own code, which nobody here has seen
        patcher.folded = None
        raise UnsupportedModelError(f"fast=True does not cover {name}: {cause}") from cause
    if not error <= metrics.rounding_limit(patcher.model.dtype):
        patcher.folded = None
        raise UnsupportedModelError(
            f"fast=True does not cover {name}: replays of its steps are off by {error:.1g}"
        )
    return patcher.folded


def has_ties(patcher: "ContextPatcher") -> bool:
    """Whether rounding decides which experts a token goes to: a replay that rounds otherwise may
    choose some that have no factors.
    """
    return patcher.model.dtype in (torch.bfloat16, torch.float16) and any(
        block.experts is not None for block in patcher.blocks
    )


def _trial_error(patcher: "ContextPatcher") -> float:
    """How far the replays of fast steps are off: at worst, or in the middle where a tie may send a
    token elsewhere.
    """
    errors = torch.tensor(list(_replay_errors(patcher)))
    if has_ties(patcher) and not errors.isnan().any():
        return float(errors.sort().values[len(errors) // 2])
    return float(errors.max())


def _replay_errors(patcher: "ContextPatcher") -> Iterator[float]:
    ids = random_tokens(patcher.model, 9, seed=1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :3] = False
    state = prefill(patcher, ids[:, :7], mask[:, :7], 9, DecodeMode.SHARED_CACHE)
    for column in (6, 7, 8):
        decoded = decode_one_token(state, ids[:, column])
        yield from metrics.linf(
            patcher.replay(decoded.make_patch())[0][:, -1], decoded.logits
        ).tolist()


@torch.inference_mode(False)
@torch.no_grad()
@one_pass
def prefill(
    patcher: "ContextPatcher",
    context_ids: Tensor,
    context_mask: Tensor,
    capacity: int,
    way: DecodeMode,
    *,
    chunk: int | None = None,
    cache: Cache | None = None,
    reserve: bool = True,
    **model_inputs: Any,
) -> Decoding:
    """Put all of a context but its last token into a cache, as the untouched model does.

    Args:
        context_ids, context_mask: (B, C) int64 and bool, left-padded.
        capacity: the largest number of tokens there will be, C included.
        way: how the steps are to run.
        chunk: so many tokens a call, for contexts whose activations are too large at once; all in
            one by default. Not for recurrent models, nor with further inputs.
        cache: an empty cache; a dynamic one by default.
        reserve: whether a dynamic cache gets room for tokens to come, so that few steps have to
            copy it.
        model_inputs: further inputs of the model for this pass.
    """
    given = names_of(model_inputs)
    if chunk is not None and (patcher.recurrent or given):
        why = (
            f"with {', '.join(given)}"
            if given
            else "of a recurrent model, which goes on by one token a call"
        )
        raise ValueError(f"expected no chunks {why}, got chunks of {chunk}")
    batch, width = context_ids.shape
    sequences = absorb_all_but_last(context_ids, context_mask)
    check_vocabulary(patcher.model, context_ids, context_mask)

    def fill(head: Sequences, cache: Cache | None) -> Cache:
        cache = kv_cache.new_cache(patcher.model) if cache is None else cache
        if head.head_ids.shape[1]:
            forward_passes.run_head(patcher.model, head, cache, chunk=chunk, **model_inputs)
        if way is DecodeMode.TWO_STREAM:
            kv_cache.stack_cache(cache, batch)
        if reserve:
            kv_cache.reserve(cache, capacity)
        return cache

    cache = fill(sequences, cache)
    ids = context_ids.new_zeros(batch, capacity)
    ids[:, : width - 1] = context_ids[:, :-1]
    return Decoding(
        patcher=patcher,
        way=way,
        step=(
            None
            if way is DecodeMode.TWO_PASS
            else _first_step(patcher, cache, context_mask[:, :-1], capacity, way)
        ),
        ids=ids,
        context_mask=context_mask,
        length=width - 1,
        live=torch.ones_like(context_mask[:, :1]),
        cache=cache,
        fingerprint=patcher.fingerprint,
        fill=fill,
        switching=bool(switch_lengths(patcher.model)),
    )


def _first_step(
    patcher: "ContextPatcher", cache: Cache, past: Tensor, capacity: int, way: DecodeMode
) -> Step:
    """What runs the tokens after those in the cache, (B, S) bool."""
    past = past.long().repeat(2 if way is DecodeMode.TWO_STREAM else 1, 1)
    rows, width = past.shape
    step_inputs = StepInputs(
        current=past.new_zeros(rows, 1),
        positions=past.sum(1, keepdim=True) - 1,
        mask=F.pad(past, (0, capacity - width)),
        cache=cache,
        slot=past.new_tensor([width - 1]) if cache.is_compileable else None,
        length=width,
    )
    batch = len(past) if way is DecodeMode.SHARED_CACHE else len(past) // 2
    patches = torch.arange(-batch, batch, device=past.device).clamp(min=-1)
    if patcher.fused_modules is None:
        with torch.autocast(patcher.model.device.type, enabled=False):
            patcher.fused_modules = FusedModules(patcher.model, patcher.blocks)
    fused_modules = patcher.fused_modules
    folded = shared_cache_streams(patcher) if way is DecodeMode.SHARED_CACHE else None
    return Step(
        patcher,
        step_inputs,
        folded,
        _linears(patcher, way),
        fused_modules.forwards(),
        frozenset(fused_modules.receives_norm_input()),
        patches,
    )


def _linears(patcher: "ContextPatcher", way: DecodeMode) -> list[tuple[nn.Module, Forward]]:
    """The linear maps that are not patched, through our ops, which read their weights once for the
    few rows of a decode step.
    """
    doubled = (
        set(shared_cache_streams(patcher).projections) if way is DecodeMode.SHARED_CACHE else set()
    )
    return [
        (module, linear_forward(module))
        for module in plain_linears(patcher.model, patcher.block_specs)
        if module not in doubled
    ]


@torch.inference_mode(False)  # a cache that is written in place may be used inside it and outside
@torch.no_grad()
def decode_one_token(state: Decoding, token_ids: Tensor, *, both: bool = False) -> Decoded:
    """One token a row, everything before it absorbed into its weights.

    Args:
        state: from :func:`prefill`; it has grown by one token afterwards.
        token_ids: (B,) int64, the current tokens: the context's last, then what was generated.
        both: whether the context stream's logits are wanted too.

    Returns:
        The logits (B, V) of the next tokens.

    Raises:
        ControllabilityError: no change of the weights can have the effect, for the block and row
            named.
    """
    with state.patcher.attachment.one_pass():
        state.patcher.require_attached()
        state.append(token_ids)
        if state.switching and state.steps > 1:
            _renew(state)
        if state.step is None:
            return _close(state)
        made = state.step(token_ids, both)
    if made.maybe_infeasible:  # the step's one look at the device
        for diagnostics in made.diagnostics:
            diagnostics.resolve(state.live).check(start=state.steps - 1)
    batch = len(state.ids)
    return Decoded(
        made.logits[-batch:], made.logits[:batch] if both else None, _Recorded(state, made, both)
    )


def _renew(state: Decoding) -> None:
    """Fill the cache again, in place, if with the current token LongRoPE changes its factors."""
    sequences = _sequences(state.ids[:, : state.length], state.context_mask)
    if not switches(state.patcher.model, sequences):
        return
    made = state.fill(sequences, None)
    if state.cache.is_compileable:
        kv_cache.copy_cache(made, state.cache, state.length - 1)
    else:
        state.cache.layers[:] = made.layers


class _Recorded:
    """The factors of one step, and how a patch is made of them: later, when the state is steps
    ahead and its cache perhaps gone.
    """

    def __init__(self, state: Decoding, made: Pass, both: bool) -> None:
        self.patcher, self.fingerprint = state.patcher, state.fingerprint
        self.ids, self.context_mask = state.ids[:, : state.length], state.context_mask
        self.made, self.both, self.live = made, both, state.live
        self.blocks = tuple(state.patcher.blocks)  # also when it has been detached

    @torch.no_grad()
    def __call__(self) -> ContextPatch:
        if self.made.overwritten is not None and self.made.overwritten():
            raise ValueError(
                "expected a patch of a CUDA graph's step to be asked for before the next step"
            )
        layers = [
            self._of_live_rows(block, held)
            for block, held in zip(self.blocks, self.made.factors, strict=True)
        ]
        report = report_of(
            [[diagnostics.resolve(self.live) for diagnostics in self.made.diagnostics]], slice(None)
        )
        logits = self.made.logits[: len(self.ids)].unsqueeze(1) if self.both else None
        patch = self.patcher.patch_of(
            _sequences(self.ids, self.context_mask), tuple(layers), report, logits
        )
        if patch.info.fingerprint != self.fingerprint:
            raise ValueError(
                "expected the weights that the step ran with, they have changed since: ask for the"
                " patch before that"
            )
        return patch

    def _of_live_rows(self, block: AttachedBlock, held: Factors) -> Factors:
        """A block's factors, and its norms' scales beside their changes; the rows that had ended
        have no change.
        """
        scales = {
            f"{name}.scale": norm.scale
            for name, norm in block.norms.items()
            if f"{name}.new_scale" in held
        }
        if self.made.overwritten is None and self.live.all():
            return held | scales
        found = {}
        for name, factor in held.items():
            if not factor.is_floating_point():  # which experts were chosen
                found[name] = factor.clone()
                continue
            without = scales.get(
                name.replace(".new_scale", ".scale"), torch.zeros((), device=factor.device)
            ).to(factor.dtype)
            live = self.live.reshape(*self.live.shape, *[1] * (factor.dim() - 2))
            found[name] = torch.where(live, factor, without)
        return found | scales


def _close(state: Decoding) -> Decoded:
    sequences = _sequences(state.ids[:, : state.length], state.context_mask)
    computation = state.patcher.compute_from(state.cache, sequences, state.live)
    patch = computation.patch
    assert patch.logits is not None
    return Decoded(computation.reduced_logits[:, -1], patch.logits[:, -1], lambda: patch)
