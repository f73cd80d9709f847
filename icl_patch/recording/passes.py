"""The passes over an attached model: observed, recording, replaying.

A patch is computed (:func:`compute_in_two_passes`) by a pass of the unmodified model, which is
observed, and a closing pass of the kept tokens without the context, in which the recorders choose
the factors. A replay runs the kept tokens with a patch, over a cache of its prefix.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from icl_patch.invariance.arithmetic import BATCH_INVARIANT, NATIVE, running_in
from icl_patch.layers.router import PatchedRouter
from icl_patch.models import kv_cache
from icl_patch.models.attention_mask import Visibility
from icl_patch.models.forward import counts_slots
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import (
    AttachedBlock,
    BlockActivations,
    Factors,
    HasBlocks,
    joined,
    replaying,
)
from icl_patch.recording.block_recorder import BlockRecorder
from icl_patch.recording.diagnostics import BlockDiagnostics
from icl_patch.recording.expert_recorder import record_experts, record_scaled_experts
from icl_patch.recording.patch_assembly import Violations, filled, scales_of
from icl_patch.recording.sequences import Sequences


def token_slices(tokens: int, recurrent: bool) -> list[slice]:
    """The columns of each call of the model: all tokens at once. A recurrent model takes one token
    a call, because its class continues from a state with one token only.
    """
    if recurrent:
        return [slice(token, token + 1) for token in range(tokens)]
    return [slice(0, tokens)]


# -- observing


@contextmanager
def observe(blocks: Sequence[AttachedBlock]) -> Iterator[list[BlockActivations]]:
    """Within this context each call of a block appends its activations to the list; the pass is as
    without it.
    """
    found: list[BlockActivations] = []
    with ExitStack() as hooks:
        for block in blocks:
            _observe_block(block, found, hooks)
        yield found


def _observe_block(block: AttachedBlock, found: list[BlockActivations], hooks: ExitStack) -> None:
    rows: Any = None  # (B, T) of the call

    def kept(x: Tensor) -> Tensor:
        return x.reshape(*rows, -1).clone()

    def on_start(x: Tensor) -> None:
        nonlocal rows
        rows = x.shape[-3:-1]
        found.append(BlockActivations())

    def on_residual(x: Tensor) -> None:
        x, hidden = kept(x).to(torch.promote_types(x.dtype, torch.float32)), found[-1].hidden
        found[-1].hidden = x if hidden is None else hidden + x

    def on_reader(name: str, out: Tensor) -> None:
        found[-1].readers[name] = kept(out)

    def on_choice(z: Tensor, index: Tensor) -> None:
        found[-1].experts = (kept(z), kept(index))

    def on_written(out: Tensor) -> None:
        found[-1].written = kept(out)

    def on_end(total: Tensor) -> None:
        found[-1].output = kept(total)

    block.hook_input(hooks, block.module, on_start)
    block.hook_residual(hooks, on_residual)
    for name, reader in block.readers.items():
        if isinstance(reader, PatchedRouter):
            reader.observer = partial(on_reader, name)
            hooks.callback(setattr, reader, "observer", None)
        else:
            block.hook_output(hooks, reader, partial(on_reader, name))
    if block.experts is not None:
        block.experts.observer = on_choice
        hooks.callback(setattr, block.experts, "observer", None)
    if block.spec.mixer and block.down is not None:
        block.hook_output(hooks, block.down, on_written)
    block.hook_end(hooks, on_end)


def _of_blocks(found: list[BlockActivations], blocks: int) -> list[BlockActivations]:
    """Each block's activations, of all calls of the model together."""
    return [joined(found[block::blocks]) for block in range(blocks)]


# -- recording


@contextmanager
def computing_factors(recorders: Sequence[BlockRecorder]) -> Iterator[None]:
    """Within this context the recorders compute their blocks' factors."""
    with ExitStack() as stack:
        for recorder in recorders:
            stack.callback(recorder.block.off)
            _set_modes(recorder, stack)
            recorder.hook(stack)
        yield


def _set_modes(recorder: BlockRecorder, stack: ExitStack) -> None:
    """Let the block's patched modules hand their inputs to the recorder."""
    block = recorder.block
    for name, reader in block.readers.items():
        record = recorder.router if isinstance(reader, PatchedRouter) else recorder.reader
        reader.record(partial(record, name))
    if block.experts is not None:
        scaled = block.spec.experts_scale_input
        block.experts.record(partial(record_scaled_experts if scaled else record_experts, recorder))
    if block.down is not None:
        block.down.record(recorder.down)
    if block.post_norm is not None:
        block.post_norm.record(recorder.norm)
    if block.inner_norm is not None:
        block.inner_norm.record(recorder.inner_norm)
    if block.spec.addend is not None:
        addend = block.module.get_submodule(block.spec.addend)
        block.hook_output(stack, addend, recorder.on_addend)


@dataclass(frozen=True, eq=False)
class Computation:
    """A computed patch, and everything observed on the way.

    Attributes:
        patch: the patch.
        valid: (B, T) bool, the tokens that have a patch.
        reduced_logits: (B, T, V) of the reduced stream.
        activations: of every block, with the context.
        violations: of every block, the conditions that were looked at.
    """

    patch: ContextPatch
    valid: Tensor
    reduced_logits: Tensor
    activations: list[BlockActivations]
    violations: Violations


def compute_in_two_passes(
    attached: HasBlocks, cache: Cache, sequences: Sequences, live: Tensor | None = None
) -> Computation:
    """The patch from a pass of the unmodified model over the tail and a closing pass, which runs
    the kept tokens in the shapes of their replay and chooses the factors.

    live: (B, 1) bool, the rows that get a patch; all by default.
    """
    kept = sequences.kept_columns.tolist()
    parts = token_slices(sequences.ids.shape[1] - sequences.head, attached.recurrent)
    with observe(attached.blocks) as found:
        logits = [forward_passes.run_tail(attached.model, sequences, cache, x) for x in parts]
    patch = attached.empty_patch(sequences, passes=2)
    patch = replace(patch, logits=torch.cat(logits, 1)[:, kept])
    of_kept = [block.part(kept) for block in _of_blocks(found, len(attached.blocks))]
    return run_closing_pass(attached, of_kept, patch, attached.update, live)


def run_closing_pass(
    attached: HasBlocks,
    activations: list[BlockActivations],
    patch: ContextPatch,
    update: str,
    live: Tensor | None = None,
    prefix: Cache | None = None,
) -> Computation:
    """The closing pass alone: fills ``patch`` from the blocks' activations with the context.

    prefix: as :func:`prefix_cache`, which is run by default.
    """
    blocks, recurrent = attached.blocks, attached.recurrent
    prefix = prefix_cache(attached.model, patch) if prefix is None else prefix
    valid = patch.kept_mask if live is None else patch.kept_mask & live
    calls: list[list[BlockDiagnostics]] = []
    layers: list[tuple[Factors, ...]] = []
    reduced: list[Tensor] = []
    for part in token_slices(patch.kept_ids.shape[1], recurrent):
        recorders = [
            BlockRecorder(block, update, valid[:, part], context.part(part))
            for block, context in zip(blocks, activations, strict=True)
        ]
        with running_in(patch.info.arithmetic, attached.model), computing_factors(recorders):
            reduced.append(run_kept(attached.model, patch, prefix, part))
        factors = [(recorder.block, recorder.factors) for recorder in recorders]
        layers.append(tuple(layer | scales_of(block, layer) for block, layer in factors))
        calls.append([recorder.diagnostics for recorder in recorders])
    logits, exact = torch.cat(reduced, 1), update == "exact"
    patch, violations = filled(
        attached, patch, joined(layers), calls, logits, valid, identical=exact
    )
    return Computation(patch, valid, logits, activations, violations)


# -- replaying


def replay_logits(attached: HasBlocks, patch: ContextPatch, prefix: Cache | None = None) -> Tensor:
    """Replay a patch: logits (B, T, V). prefix: as in :func:`run_closing_pass`."""
    cache = prefix_cache(attached.model, patch) if prefix is None else prefix
    logits = []
    for part in token_slices(patch.kept_ids.shape[1], attached.recurrent):
        layers = [
            {name: x if x.dim() == 1 else x[:, part] for name, x in patch.layers[place].items()}
            for place in attached.places
        ]
        in_arithmetic = running_in(patch.info.arithmetic, attached.model)
        with in_arithmetic, replaying(attached.blocks, layers):
            logits.append(run_kept(attached.model, patch, cache, part))
    return torch.cat(logits, 1)


def call_logits(attached: HasBlocks, patch: ContextPatch) -> Tensor:
    """The logits (B, T, V) of a plain call of the model with the patch: the kept tokens at their
    positions, over a cache of the prefix. A replay also masks as if the context stood between.
    """
    model, cache, layers = attached.model, kv_cache.new_cache(attached.model), patch.layers
    mask = torch.cat([patch.prefix_mask, patch.kept_mask], 1)
    longest, width = mask.sum(1).max(), patch.prefix_ids.shape[1]
    if width:
        prefix = patch.prefix_ids, patch.prefix_mask, patch.prefix_positions
        forward_passes.run(model, *prefix, cache, longest=longest, last_logits=1)
    kept = patch.kept_ids, mask, patch.position_ids
    with replaying(attached.blocks, [layers[place] for place in attached.places]):
        return forward_passes.run(model, *kept, cache, longest=longest)


def replay_observed(
    attached: HasBlocks, patch: ContextPatch
) -> tuple[Tensor, list[BlockActivations]]:
    """Replay a patch: logits (B, T, V), and every block's activations."""
    prefix = prefix_cache(attached.model, patch)
    with observe(attached.blocks) as found:
        logits = replay_logits(attached, patch, prefix)
    return logits, _of_blocks(found, len(attached.blocks))


def replay_compared(
    attached: HasBlocks, patch: ContextPatch, outputs: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Replay an exact patch and compare every block's sum with ``outputs``, (B, T, d) each: logits
    (B, T, V), and how many elements differ, (L, B, T) int64.

    Columns of padding count as equal.
    """
    mask, prefix = patch.kept_mask, prefix_cache(attached.model, patch)
    missed: list[list[Tensor]] = [[] for _ in outputs]  # (B, columns) of each call, by block

    def compare(layer: int, total: Tensor) -> None:
        output, start = outputs[layer], sum(x.shape[1] for x in missed[layer])
        assert output is not None
        total = total.as_subclass(Tensor).reshape(len(output), -1, output.shape[-1])
        target = output[:, start : start + total.shape[1]]
        missed[layer].append((total != target).sum(-1).to(mask.device))

    with ExitStack() as hooks:
        for layer, block in enumerate(attached.blocks):
            block.hook_end(hooks, partial(compare, layer))
        logits = replay_logits(attached, patch, prefix)
    misses = torch.stack([torch.cat(parts, 1) for parts in missed]) * mask
    of_ranks = attached.ranks.joined([{"misses": misses}], misses.device)
    return logits, torch.cat([part["misses"] for part in of_ranks])


def prefix_cache(model: PreTrainedModel, patch: ContextPatch) -> DynamicCache:
    """A cache of the prefix alone, from the unmodified model, with :func:`empty_slots`."""
    cache, count = kv_cache.new_cache(model), empty_slots(model, patch)
    start = patch.prefix_ids.shape[1]
    tokens = (patch.prefix_ids, patch.prefix_mask, patch.prefix_positions)
    if count and not start:  # the empty slots need the shapes of some token's
        tokens = (patch.kept_ids[:, :1], patch.kept_mask[:, :1], patch.position_ids[:, :1])
    if start or count:
        own = patch.info.arithmetic
        with running_in(NATIVE if own == BATCH_INVARIANT else own, model):
            forward_passes.run(model, *tokens, cache, longest=patch.info.longest, last_logits=1)
    if count:
        kv_cache.append_empty(cache, start, count)
    return cache


def empty_slots(model: PreTrainedModel, patch: ContextPatch) -> int:
    """How many slots of the cache a replay leaves empty where the context was: none, unless the
    model numbers its tokens by slots.
    """
    if not counts_slots(model):
        return 0
    return int(patch.kept_slots[0, 0]) - patch.prefix_ids.shape[1]


def run_kept(
    model: PreTrainedModel, patch: ContextPatch, cache: Cache, part: slice = slice(None)
) -> Tensor:
    """Run kept tokens on top of the prefix and the kept tokens before them, masked as if the
    context stood between: logits (B, T, V).
    """
    empty = patch.kept_mask.new_zeros(len(patch.kept_mask), empty_slots(model, patch))
    mask = torch.cat([patch.prefix_mask, empty, patch.kept_mask], 1)
    positions = torch.cat([patch.prefix_positions, empty.long(), patch.position_ids], 1)
    slots = torch.cat([patch.prefix_slots, empty.long(), patch.kept_slots], 1)
    # Chunks are counted from a row's first token, which has another column in the whole sequence.
    moved = (~patch.prefix_mask).sum(1) - (patch.kept_slots - patch.position_ids)[:, 0]
    slots = slots + moved.unsqueeze(1)
    part = slice(*part.indices(patch.kept_ids.shape[1]))
    until = slice(0, mask.shape[1] - patch.kept_ids.shape[1] + part.stop)
    visibility = Visibility(torch.ones_like(mask)[:, until], slots[:, until], positions[:, until])
    return forward_passes.run(
        model,
        patch.kept_ids[:, part],
        mask[:, until],
        patch.position_ids[:, part],
        cache,
        visibility,
        longest=patch.info.longest,
    )
