"""Computing a patch: a pass of the unmodified model, then a closing pass without the context."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import Cache

from icl_patch.invariance.arithmetic import running_in
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording import forward_passes
from icl_patch.recording.activation_capture import observe
from icl_patch.recording.attached_block import BlockActivations, Factors, HasBlocks
from icl_patch.recording.closing_recorder import ClosingRecorder
from icl_patch.recording.diagnostics import BlockDiagnostics
from icl_patch.recording.patch_assembly import (
    Violations,
    factors_of,
    joined_layers,
    layers_of_all,
    report_of_all,
    violations_of,
)
from icl_patch.recording.record import recording
from icl_patch.recording.replay import calls_of, prefix_cache, run_kept
from icl_patch.recording.sequences import Sequences


@dataclass(frozen=True, eq=False)
class Computation:
    """A computed patch, and everything observed on the way.

    Attributes:
        patch: the patch.
        reduced_logits: (B, T, V) of the reduced stream.
        activations: of every block, with the context.
        violations: of every block, the conditions that were looked at.
    """

    patch: ContextPatch
    reduced_logits: Tensor
    activations: list[BlockActivations]
    violations: Violations


def compute_closing(
    attached: HasBlocks, cache: Cache, sequences: Sequences, live: Tensor | None = None
) -> Computation:
    """The patch from a pass of the unmodified model over the tail and a closing pass, which runs
    the kept tokens in the shapes of their replay and chooses the factors.

    live: (B, 1) bool, the rows that get a patch; all by default.
    """
    logits, activations = _observe_tail(attached, cache, sequences)
    patch = attached.empty_patch(sequences, passes=2)
    patch = replace(patch, logits=logits[:, sequences.kept_columns])
    return close_on(attached, activations, patch, attached.update, live)


def close_on(
    attached: HasBlocks,
    activations: list[BlockActivations],
    patch: ContextPatch,
    update: str,
    live: Tensor | None = None,
) -> Computation:
    """The closing pass alone: fills ``patch`` from the blocks' activations with the context."""
    blocks, recurrent = attached.blocks, attached.recurrent
    prefix = prefix_cache(attached.model, patch)
    calls: list[list[BlockDiagnostics]] = []
    layers: list[tuple[Factors, ...]] = []
    reduced: list[Tensor] = []
    for part in calls_of(patch.kept_ids.shape[1], recurrent):
        valid = patch.kept_mask[:, part] if live is None else patch.kept_mask[:, part] & live
        recorders = [
            ClosingRecorder(block, update, valid, context.part(part))
            for block, context in zip(blocks, activations, strict=True)
        ]
        with running_in(patch.info.arithmetic), recording(recorders):
            reduced.append(run_kept(attached.model, patch, prefix, part))
        layers.append(factors_of(recorders))
        calls.append([recorder.diagnostics for recorder in recorders])
    device = patch.kept_ids.device
    report = report_of_all(attached, calls, device)
    return Computation(
        replace(
            patch, layers=layers_of_all(attached, joined_layers(layers), device), report=report
        ),
        torch.cat(reduced, 1),
        activations,
        violations_of(calls, device),
    )


def _observe_tail(
    attached: HasBlocks, cache: Cache, sequences: Sequences
) -> tuple[Tensor, list[BlockActivations]]:
    """Run the unmodified model on the tail: logits (B, S, V), and every block's activations of the
    kept tokens.
    """
    logits, calls = [], []
    for part in calls_of(sequences.tail_ids.shape[1], attached.recurrent):
        with observe(attached.blocks) as observed:
            logits.append(forward_passes.run_tail(attached.model, sequences, cache, part))
        calls.append(observed)
    kept = sequences.kept_columns
    joined = [BlockActivations.joined(parts).part(kept) for parts in zip(*calls, strict=True)]
    return torch.cat(logits, 1), joined
