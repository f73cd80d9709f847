"""ContextPatcher: attach to a model, compute a context's patch, replay it, generate with it, detach."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from icl_patch import patch as patch_format
from icl_patch import streams
from icl_patch.families import Writer, blocks_of, family_of
from icl_patch.modules import PatchedModule
from icl_patch.patch import UPDATES, ContextPatch, PatchInfo, PatchReport
from icl_patch.probe import Probe
from icl_patch.recording import AttachedBlock, BlockRecorder, BlockTape, observe, recording, replaying
from icl_patch.streams import Sequences, Visibility

if TYPE_CHECKING:
    from icl_patch.generation import GenerationStep


@dataclass(frozen=True, eq=False)
class Computation:
    """A computed patch, the reduced stream's logits (B, T, V), and what the blocks did with the context (one tape a block)."""

    patch: ContextPatch
    reduced_logits: Tensor
    tapes: list[BlockTape]


class ContextPatcher:
    """Turns contexts into changes of a model's weights.

    Attaching swaps the readers and writers of every block for patched modules, in place; ``detach`` (or leaving the ``with`` block)
    puts the originals back, and the model is bit-identical to what came in::

        with ContextPatcher(model) as patcher:
            patch = patcher.compute(context_ids, kept_ids)
            logits = patcher.forward(kept_ids, patch)      # no context anywhere

    Args:
        model: a Hugging Face causal language model of a known family.
        update: ``"direct"`` (Theorem 1: closed form), ``"stable"`` (Appendix B: RMSNorm inversion) or ``"exact"`` (closed on the
            rounded block output: bit-identical).
        tokenizer: recorded in patches, and compared with that of patches that are replayed.

    Raises:
        UnsupportedModelError: the model has blocks of an unknown form, or does not behave as its family says.
        ValueError: ``update`` is unknown, or the model is attached already, or it is training with attention dropout.

    Source: Goldwaser et al. (2025), Theorem 2 and Algorithm 1.
    """

    def __init__(self, model: PreTrainedModel, update: str = "exact", *, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if update not in UPDATES:
            raise ValueError(f"expected update {', '.join(UPDATES)}, got {update!r}")
        self.model, self.update, self.tokenizer = model, update, tokenizer
        self.family = family_of(model)
        streams.check_attention(model)
        if any(isinstance(module, PatchedModule) for module in model.modules()):
            raise ValueError(f"expected a model without patched modules, {type(model).__name__} has some: detach the other patcher first")
        if model.training and float(getattr(model.config, "attention_dropout", False)):
            raise ValueError("expected a model in eval mode, got one that is training with attention dropout")
        self.blocks: list[AttachedBlock] = []
        self._fingerprint: tuple[list[tuple[int, int, torch.dtype]], str] | None = None
        try:
            probe = Probe(model)
            for block in blocks_of(model):
                self.blocks.append(AttachedBlock(model, block))
            probe.check(self.blocks, self._probe_correction)
        except BaseException:
            self.detach()
            raise

    def __enter__(self) -> "ContextPatcher":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()

    @property
    def attached(self) -> bool:
        """Whether the model's modules are swapped."""
        return bool(self.blocks)

    def detach(self) -> None:
        """Put the model's own modules back. The model is bit-identical to what came in; detaching twice is fine."""
        while self.blocks:
            self.blocks.pop().detach()

    # -- compute

    @torch.no_grad()
    def compute(
        self,
        context_ids: Tensor,
        kept_ids: Tensor,
        *,
        prefix_ids: Tensor | None = None,
        context_mask: Tensor | None = None,
        kept_mask: Tensor | None = None,
        prefix_mask: Tensor | None = None,
        absorbed: list[tuple[int, int]] | None = None,
        **model_inputs: Any,
    ) -> ContextPatch:
        """The change of weights that makes the model on ``[prefix, kept]`` do what it does on ``[prefix, context, kept]``.

        Args:
            context_ids: (B, C) int64, left-padded.
            kept_ids: (B, T) int64, right-padded: the tokens that run without the context; each gets its own patch.
            prefix_ids: (B, P) int64: tokens before the context that stay.
            context_mask, kept_mask, prefix_mask: bool, True = token.
            absorbed: [(start, stop)] columns of ``context_ids`` to absorb, by default all. Tokens before the first absorbed one join
                the prefix; those after it that are not absorbed are kept tokens, before ``kept_ids``.
            model_inputs: further inputs of the model for the pass over what stands before the first kept token.

        Returns:
            The patch of all kept tokens; ``patch.logits`` are the logits with the context.

        Raises:
            ControllabilityError: no change of the weights can have the effect, for the layer and token named.
            ValueError: a shape, a mask or a span does not fit.
        """
        self.require_attached()
        sequences = streams.assemble(
            context_ids,
            kept_ids,
            prefix_ids=prefix_ids,
            context_mask=context_mask,
            kept_mask=kept_mask,
            prefix_mask=prefix_mask,
            absorbed=absorbed,
        )
        return self.compute_sequences(sequences, **model_inputs).patch

    @torch.no_grad()
    def compute_sequences(self, sequences: Sequences, **model_inputs: Any) -> Computation:
        """:meth:`compute` on sequences that are laid out already, with all that was observed on the way."""
        self.check_vocabulary(sequences)
        cache = self.prefill(sequences, **model_inputs)
        return self.compute_from(cache, sequences)

    def check_vocabulary(self, sequences: Sequences) -> None:
        """Raises ValueError if an id is not one of the model's."""
        size = int(self.model.config.vocab_size)
        for ids in (sequences.head_ids, sequences.tail_ids):
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
                raise ValueError(f"expected ids from 0 to {size - 1}, got {int(ids.min())} to {int(ids.max())}")

    @property
    def _closes(self) -> bool:
        """Whether the factors are computed in a pass of their own, in the shapes of the replay, after one of the untouched model.

        The exact update must: its loop closes on rounding, which depends on the shapes. So does the direct update of a scale writer: it
        divides by activations and so magnifies any difference in rounding between its recording and its replay.
        """
        return self.update == "exact" or (self.update == "direct" and self.family.writer is Writer.SCALE)

    def prefill(self, sequences: Sequences, **model_inputs: Any) -> DynamicCache:
        """A cache of the head, as the untouched model makes it, with the rows that the pass over the tail needs."""
        cache = streams.new_cache(self.model)
        if sequences.head_ids.shape[1]:
            streams.run_head(self.model, sequences, cache, **model_inputs)
            if not self._closes:
                streams.stack_cache(cache, len(sequences.head_ids))
        return cache

    def compute_from(self, cache: DynamicCache, sequences: Sequences) -> Computation:
        """The patch of the tail's kept tokens; ``cache`` holds the head (:meth:`prefill`), and the tail too afterwards."""
        if self._closes:
            return self._compute_closing(cache, sequences, self.update)
        return self._compute_two_stream(cache, sequences)

    def _probe_correction(self, sequences: Sequences) -> Tensor:
        cache = streams.new_cache(self.model)
        streams.run_head(self.model, sequences, cache)
        report = self._compute_closing(cache, sequences, "exact").patch.report
        assert report is not None
        return report.correction

    def _compute_two_stream(self, cache: DynamicCache, sequences: Sequences) -> Computation:
        """Both streams in one pass of 2B rows."""
        batch, columns = len(sequences.tail_ids), sequences.kept_columns
        valid = sequences.tail_mask & ~sequences.tail_absorbed
        recorders = [BlockRecorder(block, self.update, valid, None) for block in self.blocks]
        with recording(recorders):
            logits = streams.run_two_streams(self.model, sequences, cache)[:, columns]
            layers = self._factors(columns)
        patch = self._empty_patch(sequences, logits[:batch], passes=1)
        patch = replace(patch, layers=layers, report=_report(recorders, columns))
        return Computation(patch, logits[batch:], [recorder.seen for recorder in recorders if recorder.seen is not None])

    def _compute_closing(self, cache: DynamicCache, sequences: Sequences, update: str) -> Computation:
        """A pass of the untouched model over the tail, then one over the kept tokens alone that chooses the factors."""
        columns = sequences.kept_columns
        with observe(self.blocks, columns) as tapes:
            logits = streams.run_tail(self.model, sequences, cache)
        patch = self._empty_patch(sequences, logits[:, columns], passes=2)
        recorders = [BlockRecorder(block, update, patch.kept_mask, tape) for block, tape in zip(self.blocks, tapes, strict=True)]
        prefix = self._prefix_cache(patch)
        with recording(recorders):
            reduced_logits = self._run_kept(patch, prefix)
            layers = self._factors(slice(None))
        patch = replace(patch, layers=layers, report=_report(recorders, slice(None)))
        return Computation(patch, reduced_logits, tapes)

    def _factors(self, columns: Tensor | slice) -> tuple[dict[str, Tensor], ...]:
        layers = []
        for block in self.blocks:
            layer = {name: factor[:, columns] for name, factor in block.factors().items()}
            if block.post_norm is not None:
                layer[f"{self.family.post_norm}.scale"] = block.post_norm.scale
            layers.append(layer)
        return tuple(layers)

    def _empty_patch(self, sequences: Sequences, logits: Tensor, passes: int) -> ContextPatch:
        """The patch of the kept tokens, without any factors yet."""
        positions, mask, slots = sequences.positions, sequences.mask, sequences.kept_slots
        prefix = sequences.head_mask & ~sequences.head_absorbed
        width = int(prefix.sum(1).max()) if prefix.shape[1] else 0
        # a stable sort moves the prefix to the right end, in order
        prefix_slots = prefix.long().sort(dim=1, stable=True).indices[:, prefix.shape[1] - width :]
        return ContextPatch(
            info=self._info(passes),
            layers=(),
            layer_indices=tuple(range(len(self.blocks))),
            kept_ids=sequences.tail_ids[:, sequences.kept_columns],
            kept_mask=mask[:, slots],
            position_ids=positions[:, slots],
            kept_slots=slots.expand(len(mask), -1),
            prefix_ids=sequences.head_ids.gather(1, prefix_slots),
            prefix_mask=prefix.gather(1, prefix_slots),
            prefix_positions=positions.gather(1, prefix_slots),
            prefix_slots=prefix_slots,
            logits=logits,
        )

    def _info(self, passes: int) -> PatchInfo:
        config = self.model.config
        return PatchInfo(
            model=getattr(config, "_name_or_path", "") or type(self.model).__name__,
            revision=getattr(config, "_commit_hash", None),
            fingerprint=self.fingerprint,
            tokenizer=self.tokenizer_fingerprint,
            family=self.family.name,
            update=self.update,
            dtype=str(self.model.dtype),
            passes=passes,
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the weights that are patched, taken when it is first needed and again after any of them has changed."""
        parameters = [parameter for block in self.blocks for module in block.patched for parameter in module.parameters()]
        state = [(parameter.data_ptr(), parameter._version, parameter.dtype) for parameter in parameters]
        if self._fingerprint is None or self._fingerprint[0] != state:
            self._fingerprint = (state, patch_format.weight_fingerprint(self.model))
        return self._fingerprint[1]

    @cached_property
    def tokenizer_fingerprint(self) -> str | None:
        """SHA-256 of the tokenizer, if one was given; taken once, a vocabulary is long."""
        return None if self.tokenizer is None else patch_format.tokenizer_fingerprint(self.tokenizer)

    # -- replay

    @torch.no_grad()
    def forward(self, kept_ids: Tensor, patch: ContextPatch, *, kept_mask: Tensor | None = None) -> Tensor:
        """Replay: run the kept tokens with the patch's weights and no context anywhere.

        Positions and prefix come from the patch. No second stream, no cache but the prefix's own.

        Args:
            kept_ids: (B, T), the patch's kept tokens.
            patch: from :meth:`compute` or :meth:`ContextPatch.load`, on this model.
            kept_mask: (B, T) bool; the patch's by default.

        Returns:
            Logits (B, T, V) in the model's dtype.

        Raises:
            FingerprintMismatch: the patch is of another model or tokenizer.
            ValueError: the tokens are not those the patch is for, or the patch is a part that cannot be replayed.
        """
        self.require_attached()
        patch.check_model(self.model, self.fingerprint)
        if self.tokenizer_fingerprint is not None:
            patch.check_tokenizer(self.tokenizer_fingerprint)
        if not patch.info.replayable or len(patch.layers) != len(self.blocks):
            raise ValueError("expected a patch with all its layers and its first tokens, got a part of one")
        if kept_mask is not None and not torch.equal(kept_mask.bool(), patch.kept_mask):
            raise ValueError("expected the kept_mask that the patch was computed for, got another one")
        if kept_ids.shape != patch.kept_ids.shape or ((kept_ids != patch.kept_ids) & patch.kept_mask).any():
            raise ValueError(
                f"expected the kept tokens that the patch was computed for, {tuple(patch.kept_ids.shape)}, "
                f"got others, {tuple(kept_ids.shape)}"
            )
        cache = self._prefix_cache(patch)
        with replaying(self.blocks, patch.layers, self.model.dtype):
            return self._run_kept(patch, cache)

    def _prefix_cache(self, patch: ContextPatch) -> DynamicCache:
        """A cache of the prefix alone, as the untouched model makes it."""
        cache = streams.new_cache(self.model)
        if patch.prefix_ids.shape[1]:
            streams.run(self.model, patch.prefix_ids, patch.prefix_mask, patch.prefix_positions, cache, logits_to_keep=1)
        return cache

    def _run_kept(self, patch: ContextPatch, cache: DynamicCache) -> Tensor:
        """The kept tokens on top of the prefix, masked as if the context stood between them."""
        mask = torch.cat([patch.prefix_mask, patch.kept_mask], 1)
        visibility = Visibility(torch.ones_like(mask), torch.cat([patch.prefix_slots, patch.kept_slots], 1))
        return streams.run(self.model, patch.kept_ids, mask, patch.position_ids, cache, visibility)

    # -- generation

    def generate(self, context_ids: Tensor, *, context_mask: Tensor | None = None, max_new_tokens: int = 64) -> "Iterator[GenerationStep]":
        """Greedy generation in which every token is produced by freshly patched weights on that token alone.

        At each step everything before the current token is absorbed into the weights; the choice is made from the reduced stream's
        logits. The first current token is the context's last.

        Args:
            context_ids: (B, C) int64, left-padded. context_mask: (B, C) bool. max_new_tokens: number of steps.

        Returns:
            An iterator of :class:`icl_patch.generation.GenerationStep`, one for every new token.

        Raises:
            ValueError, ControllabilityError: as :meth:`compute`.
        """
        from icl_patch.generation import History, generate  # they stand above this module

        return generate(History(self, context_ids, context_mask), max_new_tokens)

    def require_attached(self) -> None:
        """Raises ValueError after :meth:`detach`."""
        if not self.attached:
            raise ValueError("expected an attached patcher, this one has been detached")


def _report(recorders: list[BlockRecorder], columns: Tensor | slice) -> PatchReport:
    """What the recorders observed; raises ControllabilityError if no patch can do what is wanted."""
    for recorder in recorders:
        recorder.check(columns)

    def stack(name: str) -> Tensor:
        return torch.stack([getattr(recorder, name)[:, columns] for recorder in recorders])

    return PatchReport(stack("reader_error"), stack("status"), stack("misses"), stack("correction"))
