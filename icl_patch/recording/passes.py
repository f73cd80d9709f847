"""The passes that a patch takes: both streams at once, or the untouched model and then a closing
pass; and its replay.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from icl_patch.errors import ControllabilityError
from icl_patch.layers.attachment import Attachment, one_pass
from icl_patch.models import kv_cache
from icl_patch.models.attention_mask import Visibility
from icl_patch.patch.context_patch import ContextPatch, PatchReport
from icl_patch.recording import forward_passes
from icl_patch.recording.activation_capture import observe
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations, Factors, replaying
from icl_patch.recording.block_recorder import BlockRecorder, recording
from icl_patch.recording.diagnostics import BlockDiagnostics, ControllabilityViolation
from icl_patch.recording.sequences import Sequences


@dataclass(frozen=True, eq=False)
class Computation:
    """A computed patch, the reduced stream's logits (B, T, V), what the blocks did with the context
    (one tape a block), and obstacles.
    """

    patch: ContextPatch
    reduced_logits: Tensor
    all_activations: list[BlockActivations]
    violations: tuple[tuple[ControllabilityViolation, ...], ...] = ()


class Passes(ABC):
    """A model with its attached blocks, run for a patch.

    Attributes:
        model: the model. attachment: its lock. blocks: its attached blocks, in order. update:
            "direct", "stable" or "exact".
        recurrent: whether some layer's state sums up the tokens before; the model then takes one
            token a call.
    """

    model: PreTrainedModel
    attachment: Attachment
    blocks: list[AttachedBlock]
    update: str
    recurrent: bool

    @abstractmethod
    def _empty_patch(
        self, sequences: Sequences, logits: Tensor | None, passes: int
    ) -> ContextPatch:
        """A patch of these sequences without factors."""

    def _compute_two_stream(self, cache: Cache, sequences: Sequences) -> Computation:
        """Both streams in one pass of 2B rows."""
        batch, columns = len(sequences.tail_ids), sequences.kept_columns
        valid = sequences.tail_mask & ~sequences.tail_absorbed
        recorders = [BlockRecorder(block, self.update, valid) for block in self.blocks]
        with recording(recorders):
            logits = forward_passes.run_two_streams(self.model, sequences, cache)[:, columns]
            layers = self._factors(columns)
        diagnostics = [[recorder.diagnostics for recorder in recorders]]
        patch = self.patch_of(sequences, layers, report_of(diagnostics, columns), logits[:batch])
        return Computation(
            patch,
            logits[batch:],
            [recorder.seen for recorder in recorders],
            _violations(diagnostics, columns),
        )

    def patch_of(
        self,
        sequences: Sequences,
        layers: tuple[Factors, ...],
        report: PatchReport,
        logits: Tensor | None,
    ) -> ContextPatch:
        """The patch of one pass of both streams, from its parts."""
        return replace(self._empty_patch(sequences, logits, passes=1), layers=layers, report=report)

    def _compute_closing(
        self, cache: Cache, sequences: Sequences, update: str, live: Tensor | None = None
    ) -> Computation:
        """A pass of the untouched model over the tail, then one over the kept tokens alone that
        chooses the factors.

        live: (B, 1) bool, the rows that are to get a patch; all by default.
        """
        columns = sequences.kept_columns
        logits, all_activations = self._observe_tail(cache, sequences)
        patch = self._empty_patch(sequences, logits[:, columns], passes=2)
        prefix = self._prefix_cache(patch)
        diagnostics: list[list[BlockDiagnostics]] = []
        layers: list[tuple[Factors, ...]] = []
        reduced: list[Tensor] = []
        for part in self._calls(patch.kept_ids.shape[1]):
            mask = patch.kept_mask[:, part] if live is None else patch.kept_mask[:, part] & live
            recorders = [
                BlockRecorder(block, update, mask, activations.part(part))
                for block, activations in zip(self.blocks, all_activations, strict=True)
            ]
            with recording(recorders):
                reduced.append(self._run_kept(patch, prefix, part))
                layers.append(self._factors(slice(None)))
            diagnostics.append([recorder.diagnostics for recorder in recorders])
        patch = replace(
            patch, layers=_joined_layers(layers), report=report_of(diagnostics, slice(None))
        )
        return Computation(
            patch, torch.cat(reduced, 1), all_activations, _violations(diagnostics, slice(None))
        )

    def _calls(self, tokens: int) -> list[slice]:
        """The columns of each call of the model: all in one, but token by token for a recurrent
        model, whose classes continue so only.
        """
        return (
            [slice(token, token + 1) for token in range(tokens)]
            if self.recurrent
            else [slice(0, tokens)]
        )

    def _observe_tail(
        self, cache: Cache, sequences: Sequences
    ) -> tuple[Tensor, list[BlockActivations]]:
        """The untouched model on the tail: its logits (B, S, V), and one tape a block of the kept
        tokens.
        """
        logits, all_activations = [], []
        for part in self._calls(sequences.tail_ids.shape[1]):
            with observe(self.blocks) as seen:
                logits.append(forward_passes.run_tail(self.model, sequences, cache, part))
            all_activations.append(seen)
        kept = sequences.kept_columns
        return torch.cat(logits, 1), [
            BlockActivations.joined(parts).part(kept)
            for parts in zip(*all_activations, strict=True)
        ]

    def _factors(self, columns: Tensor | slice) -> tuple[dict[str, Tensor], ...]:
        layers = []
        for block in self.blocks:
            layer = {name: factor[:, columns] for name, factor in block.factors().items()}
            layer |= {
                f"{name}.scale": norm.scale
                for name, norm in block.norms.items()
                if f"{name}.new_scale" in layer
            }
            layers.append(layer)
        return tuple(layers)

    @one_pass
    @torch.no_grad()
    def replay(self, patch: ContextPatch) -> tuple[Tensor, list[BlockActivations]]:
        """The kept tokens with the patch's factors, unchecked, and what the blocks did: logits (B,
        T, V) and one tape a block.
        """
        logits, all_activations = [], []
        for made, seen in self._replay(patch, observe):
            logits.append(made)
            all_activations.append(seen)
        return torch.cat(logits, 1), [
            BlockActivations.joined(parts) for parts in zip(*all_activations, strict=True)
        ]

    def _replay(
        self,
        patch: ContextPatch,
        watching: Callable[[list[AttachedBlock]], AbstractContextManager[list[BlockActivations]]],
    ) -> Iterator[tuple[Tensor, list[BlockActivations]]]:
        """Every call of the replay: its logits, and what ``watching`` the blocks gave."""
        cache = self._prefix_cache(patch)
        for part in self._calls(patch.kept_ids.shape[1]):
            layers = [
                {name: x if x.dim() == 1 else x[:, part] for name, x in layer.items()}
                for layer in patch.layers
            ]
            with watching(self.blocks) as seen, replaying(self.blocks, layers):
                logits = self._run_kept(patch, cache, part)
            yield logits, seen

    def _prefix_cache(self, patch: ContextPatch) -> DynamicCache:
        """A cache of the prefix alone, as the untouched model makes it."""
        cache = kv_cache.new_cache(self.model)
        if patch.prefix_ids.shape[1]:
            given = (patch.prefix_ids, patch.prefix_mask, patch.prefix_positions)
            forward_passes.run(self.model, *given, cache, longest=patch.info.longest, last_logits=1)
        return cache

    def _run_kept(self, patch: ContextPatch, cache: Cache, part: slice = slice(None)) -> Tensor:
        """Kept tokens on top of the prefix and the kept tokens before them, masked as if the
        context stood between.
        """
        mask = torch.cat([patch.prefix_mask, patch.kept_mask], 1)
        positions = torch.cat([patch.prefix_positions, patch.position_ids], 1)
        slots = torch.cat([patch.prefix_slots, patch.kept_slots], 1)
        # chunks are counted from the first token that is not padding: in the whole sequence it
        # stood elsewhere
        moved = (~patch.prefix_mask).sum(1) - (patch.kept_slots - patch.position_ids)[:, 0]
        slots = slots + moved.unsqueeze(1)
        part = slice(*part.indices(patch.kept_ids.shape[1]))
        until = slice(0, patch.prefix_mask.shape[1] + part.stop)
        visibility = Visibility(
            torch.ones_like(mask)[:, until], slots[:, until], positions[:, until]
        )
        given = (patch.kept_ids[:, part], mask[:, until], patch.position_ids[:, part])
        return forward_passes.run(self.model, *given, cache, visibility, longest=patch.info.longest)


def _joined_layers(parts: list[tuple[Factors, ...]]) -> tuple[Factors, ...]:
    """The factors of all calls, token after token."""
    return tuple(
        {
            name: (
                x
                if x.dim() == 1 or len(parts) == 1
                else torch.cat([part[i][name] for part in parts], 1)
            )
            for name, x in layer.items()
        }
        for i, layer in enumerate(parts[0])
    )


def report_of(diagnostics: list[list[BlockDiagnostics]], columns: Tensor | slice) -> PatchReport:
    """What was noted of every block in every call; raises ControllabilityError if no patch can do
    what is wanted.
    """
    try:
        for token, call in enumerate(diagnostics):
            for block in call:
                block.check(columns, token)
    except ControllabilityError as error:
        error.violations = _violations(diagnostics, columns)
        raise

    def stack(name: str) -> Tensor:
        return torch.cat(
            [
                torch.stack([getattr(block.report, name)[:, columns] for block in call])
                for call in diagnostics
            ],
            2,
        )

    return PatchReport(**{entry.name: stack(entry.name) for entry in fields(PatchReport)})


def _violations(
    diagnostics: list[list[BlockDiagnostics]], columns: Tensor | slice
) -> tuple[tuple[ControllabilityViolation, ...], ...]:
    """What every block noted, whether or not it is in the way of this patch: call after call, token
    after token.
    """

    def joined(parts: tuple[ControllabilityViolation, ...]) -> ControllabilityViolation:
        rows, always = (
            torch.cat([getattr(part, name)[:, columns] for part in parts], 1)
            for name in ("rows", "always")
        )
        return replace(parts[0], rows=rows, always=always)

    return tuple(
        tuple(
            joined(parts)
            for parts in zip(*(call.violations.values() for call in block), strict=True)
        )
        for block in zip(*diagnostics, strict=True)
    )
