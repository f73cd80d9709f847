"""One decode step: everything before the current token, as a change of weights for it.

:func:`prefill` puts a context into a cache, :func:`decode_one_token` runs one token on top of it; all that they need is in a
:class:`Decoding`, and a pass leaves nothing in the model. B rows, S tokens so far, V ids.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from icl_patch import fingerprints, metrics, streams
from icl_patch.attention import OneToken, restricted_attention
from icl_patch.calling import inputs
from icl_patch.errors import ControllabilityError, UnsupportedModelError
from icl_patch.families import vocabulary
from icl_patch.fast import FoldedStreams
from icl_patch.overriding import Forward, is_plain_linear, linear_forward, overridable, overriding, plain_linears
from icl_patch.patch import ContextPatch, PatchReport, blank_report
from icl_patch.recording import BlockRecorder, recording
from icl_patch.streams import Sequences

if TYPE_CHECKING:
    from icl_patch.patcher import ContextPatcher


class Way(Enum):
    """How a step gets both streams through the model."""

    CLOSING = "two passes"  # the untouched model, then the kept token alone in the shapes of its replay
    STACKED = "two streams"  # one pass of 2B rows over a cache of 2B
    FOLDED = "fast"  # one pass of B rows over a cache of B, doubled from the attention's output to the block's end


@dataclass(eq=False)
class Decoding:
    """A growing context and its cache.

    Attributes:
        patcher: the attached model. way: how its streams run.
        ids: (B, capacity) int64; mask: (rows, capacity) int64, 1 = token; positions: (rows, 1) int64, of the current token. rows is B,
            or 2B where the streams are stacked.
        current: (rows, 1) int64, the current token; slot: (1,) int64, its column in a static cache, None for a dynamic one.
        length: the tokens that ids hold, the current one included; steps: the decode steps taken.
        live: (B, 1) bool, the rows that still generate: the others get no patch, and nothing is said about them; all_live: whether they
            all do. blank: what nothing has been observed of yet.
        cache: all tokens but the current one, rows of them.
        weights: the state of the patched weights at the start.
    """

    patcher: "ContextPatcher"
    way: Way
    ids: Tensor
    mask: Tensor
    positions: Tensor
    current: Tensor
    slot: Tensor | None
    length: int
    live: Tensor
    cache: Cache
    folded: FoldedStreams | None
    forwards: list[tuple[nn.Module, Forward]]
    weights: list[Any]
    blank: PatchReport
    all_live: bool = True
    steps: int = 0
    captured: "Captured | None" = None

    def sequences_at(self, length: int) -> Sequences:
        """The first so many tokens, all but the last of them absorbed."""
        mask = self.mask[: len(self.ids), :length].bool()
        return Sequences(
            head_ids=self.ids[:, : length - 1],
            head_mask=mask[:, :-1],
            head_absorbed=mask[:, :-1],
            tail_ids=self.ids[:, length - 1 : length],
            tail_mask=mask[:, -1:],
            tail_absorbed=torch.zeros_like(mask[0, -1:]),
        )

    def push(self, token_ids: Tensor) -> None:
        """Make ``token_ids`` (B,) the current token; the one before joins the context. No buffer moves, and the host is not waited for."""
        self.current.copy_(token_ids.repeat(len(self.mask) // len(self.ids)).unsqueeze(1))
        self.positions += 1
        if self.slot is not None:
            self.slot += 1
            self.ids.index_copy_(1, self.slot, token_ids.unsqueeze(1))
            self.mask.index_fill_(1, self.slot, 1)
        else:
            self.ids[:, self.length - 1] = token_ids
            self.mask[:, self.length - 1] = 1

    def end(self, live: Tensor) -> None:
        """Say which rows still generate, (B,) bool."""
        self.all_live = bool(live.all())
        if self.captured is None:
            self.live = live.unsqueeze(1)  # a new tensor: earlier steps have the one before
        else:
            self.live.copy_(live.unsqueeze(1))


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a decode step gives: the reduced stream's logits (B, V), those with the context where they were computed, and the patch.

    ``make_patch()`` assembles the patch from the factors that the step left behind, whenever it is asked for.
    """

    logits: Tensor
    context_logits: Tensor | None
    make_patch: Callable[[], ContextPatch]


# Of a replay against the fast step it is of, relative to max |logit|: a stream that saw too much or too little is off by far more.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def fold(patcher: "ContextPatcher") -> FoldedStreams:
    """How a model runs both streams over one cache: traced when it is first asked for, and tried on random tokens by replays.

    Raises:
        UnsupportedModelError: it cannot, or it does not say without the context what it says with it.
    """
    if patcher.folded is not None:
        return patcher.folded
    patcher.folded, name = FoldedStreams(patcher.model, patcher.blocks), type(patcher.model).__name__
    try:
        error = max(_replay_errors(patcher))
    except ControllabilityError:  # weights of zero have no patch for these tokens, and will say so for the user's
        error = 0.0
    except Exception as cause:  # of the model's own code, which nobody here has seen
        patcher.folded = None
        raise UnsupportedModelError(f"fast=True does not cover {name}: {cause}") from cause
    if not error <= _TOLERANCE[patcher.model.dtype]:
        patcher.folded = None
        raise UnsupportedModelError(f"fast=True does not cover {name}: replays of its steps are off by {error:.1g}")
    return patcher.folded


def _replay_errors(patcher: "ContextPatcher") -> Iterator[float]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary(patcher.model), (2, 9), generator=generator).to(patcher.model.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :3] = False
    state = prefill(patcher, ids[:, :7], mask[:, :7], 9, Way.FOLDED)
    for column in (6, 7, 8):
        decoded = decode_one_token(state, ids[:, column])
        yield float(metrics.linf(patcher.replay(decoded.make_patch())[0][:, -1], decoded.logits).max())


@torch.no_grad()
def prefill(
    patcher: "ContextPatcher",
    context_ids: Tensor,
    context_mask: Tensor,
    capacity: int,
    way: Way,
    *,
    chunk: int | None = None,
    cache: Cache | None = None,
    **model_inputs: Any,
) -> Decoding:
    """Put all of a context but its last token into a cache, as the untouched model does.

    Args:
        context_ids, context_mask: (B, C) int64 and bool, left-padded.
        capacity: the largest number of tokens there will be, C included.
        way: how the steps are to run.
        chunk: so many tokens a call, for contexts whose activations are too large at once; all in one by default.
        cache: an empty cache; a dynamic one by default.
        model_inputs: further inputs of the model for this pass.
    """
    batch, width = context_ids.shape
    sequences = streams.absorb_all_but_last(context_ids, context_mask)
    patcher.check_vocabulary(sequences)
    cache = streams.new_cache(patcher.model) if cache is None else cache
    if width > 1:
        streams.run_head(patcher.model, sequences, cache, chunk=chunk, **model_inputs)
    if way is Way.STACKED:
        streams.stack_cache(cache, batch)
    streams.reserve(cache, capacity)
    rows = 2 if way is Way.STACKED else 1
    ids, mask = (context_ids.new_zeros(batch * n, capacity) for n in (1, rows))
    ids[:, : width - 1] = context_ids[:, :-1]
    mask[:, : width - 1] = context_mask[:, :-1].repeat(rows, 1)
    return Decoding(
        patcher=patcher,
        way=way,
        ids=ids,
        mask=mask,
        positions=context_mask[:, :-1].sum(1, keepdim=True).repeat(rows, 1) - 1,
        current=context_ids.new_zeros(batch * rows, 1),
        slot=context_ids.new_tensor([width - 2]) if cache.is_compileable else None,
        length=width - 1,
        live=torch.ones_like(context_mask[:, :1]),
        cache=cache,
        folded=fold(patcher) if way is Way.FOLDED else None,
        forwards=[] if way is Way.CLOSING else _forwards(patcher, way),
        weights=fingerprints.weight_state(patcher.model, patcher.forms),
        blank=blank_report(context_mask[:, :1]),
    )


def _forwards(patcher: "ContextPatcher", way: Way) -> list[tuple[nn.Module, Forward]]:
    """The linear maps that are not patched, through our ops, which read their weights once for the few rows of a decode step."""
    doubled = set(fold(patcher).projections) if way is Way.FOLDED else set()
    return [(module, linear_forward(module)) for module in plain_linears(patcher.model, patcher.forms) if module not in doubled]


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
        ControllabilityError: no change of the weights can have the effect, for the block and row named.
    """
    state.patcher.require_attached()
    state.length += 1
    state.steps += 1
    if state.way is Way.CLOSING:
        state.push(token_ids)
        return _close(state)
    if state.captured is not None:
        made = state.captured.run(state, token_ids, both)
    else:
        state.push(token_ids)
        made = run_pass(state, both)
    if made.suspect:  # the step's one look at the device
        for recorder in made.recorders:
            recorder.settle()
            recorder.check(slice(None), state.steps - 1)
    batch = len(state.ids)
    return Decoded(made.logits[-batch:], made.logits[:batch] if both else None, _Recorded(state, made, made.logits if both else None))


@dataclass(frozen=True, eq=False)
class Pass:
    """What a pass over the current token leaves: logits (B, V), or (2B, V) of both streams; the blocks' recorders and factors; whether
    one of them may have refused, () bool."""

    logits: Tensor
    recorders: list[BlockRecorder]
    factors: list[dict[str, Tensor]]
    suspect: Tensor


def run_pass(state: Decoding, both: bool) -> Pass:
    """Both streams of the current token through the model; nothing here waits for the device."""
    update, full = state.patcher.update, state.all_live and state.captured is None
    recorders = [BlockRecorder(block, update, state.live, None, blank=state.blank, full=full) for block in state.patcher.blocks]
    model: Any = state.patcher.model
    mask = state.mask if state.slot is not None else state.mask[:, : state.length]  # (rows, capacity) or (rows, S)
    with recording(recorders), _streams(state, both):
        given = inputs(model, state.current, mask, state.positions, state.cache, 1)
        logits = model(**given).logits[:, -1]
        factors = [block.factors() for block in state.patcher.blocks]
    # a few launches for all blocks: an input of 0 is not refused yet, but without one, or a row refused outright, none is
    outright = [rows.flatten() for recorder in recorders for rows in recorder.uncontrollable.values()]
    inverses = [inverse.flatten() for recorder in recorders for _, inverse, *_ in recorder.at_zero]
    suspect = [torch.cat(outright).any()] if outright else []
    suspect += [(torch.cat(inverses) == 0).any()] if inverses else []
    slim = [recorder.slim() for recorder in recorders]
    return Pass(logits, slim, factors, torch.stack(suspect).any() if suspect else logits.new_zeros((), dtype=torch.bool))


class Captured:
    """A decode step as a CUDA graph: captured once, after two steps that warm up what is made at first use, and launched from then on.

    Its tensors are the same at every step: a step's patch must be asked for before the next step is taken.

    Raises:
        ValueError: the state's cache is not static, or has windows that move.
    """

    def __init__(self, state: Decoding) -> None:
        layers: list[Any] = state.cache.layers
        if state.slot is None:
            raise ValueError("expected a static cache for a CUDA graph: cache_implementation='static'")
        if any(layer.is_sliding and layer.max_cache_len < state.ids.shape[1] for layer in layers):
            raise ValueError("expected no window shorter than the sequence in a CUDA graph: the host decides where it moves")
        self._graph: torch.cuda.CUDAGraph | None = None
        self._token_ids = torch.zeros_like(state.ids[:, 0])
        self._pass: Pass | None = None
        self._both: bool | None = None

    def run(self, state: Decoding, token_ids: Tensor, both: bool) -> Pass:
        """The current token's pass."""
        self._token_ids.copy_(token_ids)
        if state.steps <= 2:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                state.push(self._token_ids)
                made = run_pass(state, both)
            torch.cuda.current_stream().wait_stream(stream)
            return made
        if self._graph is None:
            self._graph, self._both = torch.cuda.CUDAGraph(), both
            with torch.cuda.graph(self._graph):
                state.push(self._token_ids)
                self._pass = run_pass(state, both)
        assert self._pass is not None and both == self._both
        self._graph.replay()
        return self._pass


@contextmanager
def _streams(state: Decoding, both: bool) -> Iterator[None]:
    """Within this context the model runs both streams of the current token; its head one of them, or both."""
    model, batch = state.patcher.model, len(state.ids)
    with ExitStack() as stack:
        if state.folded is not None:
            stack.enter_context(state.folded.run(state.slot))
        else:
            stack.enter_context(restricted_attention(model, OneToken(state.mask, batch=batch)))
        stack.enter_context(overriding(state.forwards))
        head = model.get_output_embeddings()
        if overridable(head):
            # (2B, 1, d) -> (B, 1, V): the widest matrix of all, on the stream whose logits are wanted
            forward = linear_forward(head) if is_plain_linear(head) else head.forward
            stack.enter_context(overriding([(head, forward if both else lambda x: forward(x[-batch:]))]))
        yield


class _Recorded:
    """The factors of one step, and how a patch is made of them."""

    def __init__(self, state: Decoding, made: Pass, logits: Tensor | None) -> None:
        self.state, self.length, self.logits = state, state.length, logits
        self.factors, self.recorders = made.factors, made.recorders

    @torch.no_grad()
    def __call__(self) -> ContextPatch:
        patcher = self.state.patcher
        if fingerprints.weight_state(patcher.model, patcher.forms) != self.state.weights:
            raise ValueError("expected the weights that the step ran with, they have changed since: ask for the patch before that")
        captured = self.state.captured is not None
        if captured and self.length != self.state.length:
            raise ValueError("expected a patch of a CUDA graph's step to be asked for before the next step")
        layers = []
        for held, recorder in zip(self.factors, self.recorders, strict=True):
            factors = {name: factor.clone() for name, factor in held.items()} if captured else held
            norms = recorder.block.norms
            layers.append(factors | {f"{name}.scale": norm.scale for name, norm in norms.items() if f"{name}.new_scale" in factors})
            recorder.settle()
        seen = {entry.name: [getattr(recorder, entry.name) for recorder in self.recorders] for entry in fields(PatchReport)}
        report = PatchReport(**{name: torch.stack(parts) for name, parts in seen.items()})
        logits = None if self.logits is None else self.logits[: len(self.state.ids)].unsqueeze(1)
        return patcher.patch_of(self.state.sequences_at(self.length), tuple(layers), report, logits)


def _close(state: Decoding) -> Decoded:
    computation = state.patcher.compute_from(state.cache, state.sequences_at(state.length), state.live)
    patch = computation.patch
    assert patch.logits is not None
    return Decoded(computation.reduced_logits[:, -1], patch.logits[:, -1], lambda: patch)
