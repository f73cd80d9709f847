"""ContextPatcher: attach to a model, compute a context's patch, replay it, generate with it,
detach.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from icl_patch.errors import UnsupportedModelError
from icl_patch.generation.fused_modules import FusedModules
from icl_patch.generation.shared_cache import SharedCacheStreams
from icl_patch.layers.attachment import one_pass
from icl_patch.models import kv_cache
from icl_patch.models.attention_mask import check_attention
from icl_patch.models.block_spec import Writer
from icl_patch.models.detect import blocks_of
from icl_patch.models.forward import check_inputs, names_of
from icl_patch.models.language_model import (
    check_language_model,
    check_length,
    check_vocabulary,
    chooses_tokens,
    depends_on_cache,
    family_of,
)
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.patch.context_patch import ContextPatch, PatchReport
from icl_patch.patch.fingerprints import WatchedWeights, WeightCheck, tokenizer_fingerprint
from icl_patch.patch.serialization import UPDATES, PatchInfo, check_fit
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import AttachedBlock, Factors, attach, replaying
from icl_patch.recording.passes import Computation, Passes
from icl_patch.recording.self_check import Probe
from icl_patch.recording.sequences import Sequences, assemble, check_tensor

if TYPE_CHECKING:
    from icl_patch.analysis.dynamics import Dynamics
    from icl_patch.generation.compiled_step import CompiledStep
    from icl_patch.generation.loop import GenerationStep


class ContextPatcher(Passes):
    """Turns contexts into changes of a model's weights.

    Attaching swaps the readers and writers of every block for patched modules, in place; ``detach``
    (or leaving the ``with`` block) puts the originals back, and the model is bit-identical to what
    came in::

        with ContextPatcher(model) as patcher:
            patch = patcher.compute(context_ids, kept_ids)
            logits = patcher.forward(kept_ids, patch)      # no context anywhere

    Threads take turns: a pass (:meth:`compute`, :meth:`forward`, a step of :meth:`generate`) has
    the model to itself, and another thread's pass, or its call of the model, waits until it ends.
    Between two steps of a generation nothing is held. A patcher that nobody refers to any more
    detaches.

    Args:
        model: a Hugging Face causal language model of a known family.
        update: ``"direct"`` (Theorem 1: closed form), ``"stable"`` (Appendix B: RMSNorm inversion)
            or ``"exact"`` (closed on the rounded block output: bit-identical).
        tokenizer: recorded in patches, and compared with that of patches that are replayed.

    Raises:
        UnsupportedModelError: the model has blocks of an unknown form, or does not behave as its
            family says.
        TypeError: the tokenizer is none.
        ValueError: ``update`` is unknown, or the model is attached already, or it is training with
            dropout or gradient checkpointing.

    Source: Goldwaser et al. (2025), Theorem 2 and Algorithm 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        update: str = "exact",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if update not in UPDATES:
            raise ValueError(f"expected update {', '.join(UPDATES)}, got {update!r}")
        if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
            raise TypeError(
                f"expected a tokenizer with a vocabulary, got {type(tokenizer).__name__}"
            )
        self.model, self.update, self.tokenizer = model, update, tokenizer
        check_language_model(model)
        check_attention(model)
        _check_training(model, model.training)
        self.attachment = attach(model)
        self.blocks: list[AttachedBlock] = self.attachment.blocks
        self._finalizer = self._undone_when_forgotten()
        self._dtype = model.dtype
        self._applied = False
        # made by icl_patch.generation.decode_step.fold when it is first wanted
        self.folded: SharedCacheStreams | None = None
        self.fused_modules: FusedModules | None = None  # likewise, by a first decode step
        # and these by icl_patch.generation.compiled_step.fix
        self.fixed: dict[Any, CompiledStep] = {}
        try:
            # autocast's rounding would hide what is looked for
            with self.attachment.one_pass(), torch.autocast(model.device.type, enabled=False):
                self._attach()
        except (UnsupportedModelError, torch.OutOfMemoryError):
            self.detach()
            raise
        except Exception as error:  # of the model's own code, which nobody here has seen
            self.detach()
            raise UnsupportedModelError(
                f"{type(model).__name__} fails on the tokens that attaching tries: {error}"
            ) from error
        except BaseException:
            self.detach()
            raise

    def _attach(self) -> None:
        self.block_specs = tuple(blocks_of(self.model))
        self.family, self.recurrent = family_of(self.model), is_recurrent(self.model)
        self._depends_on_cache = depends_on_cache(self.model)
        self._divisible = not (self._magnifies or chooses_tokens(self.model))
        probe = Probe(self.model, self.recurrent)
        for block in self.block_specs:
            self.blocks.append(AttachedBlock(self.model, block, self.attachment))
        probe.check(self.blocks, self._try_exact)

    def __enter__(self) -> "ContextPatcher":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def __getstate__(self) -> dict[str, Any]:
        # what a copy has to make anew: functions that run the modules of this model
        state = vars(self) | {"folded": None, "fusions": None, "fixed": {}, "_finalizer": None}
        state.pop("weights", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._finalizer = self._undone_when_forgotten()

    def _undone_when_forgotten(self) -> "weakref.finalize[[], ContextPatcher]":
        """Puts the model's modules back when this patcher is collected: then no pass of it is
        running.
        """
        finalizer = weakref.finalize(self, self.attachment.undo)
        finalizer.atexit = False
        return finalizer

    @property
    def attached(self) -> bool:
        """Whether the model's modules are swapped."""
        return bool(self.blocks)

    def detach(self) -> None:
        """Put the model's own modules back. The model is bit-identical to what came in; detaching
        twice is fine.
        """
        with self.attachment.lock:
            self.folded = self.fused_modules = None
            self.fixed.clear()
            self.attachment.undo()

    # -- compute

    @one_pass
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
        """The change of weights that makes the model on ``[prefix, kept]`` do what it does on
        ``[prefix, context, kept]``.

        Args:
            context_ids: (B, C) int64, left-padded.
            kept_ids: (B, T) int64, right-padded: the tokens that run without the context; each gets
                its own patch.
            prefix_ids: (B, P) int64: tokens before the context that stay.
            context_mask, kept_mask, prefix_mask: bool, True = token.
            absorbed: [(start, stop)] columns of ``context_ids`` to absorb, by default all. Tokens
                before the first absorbed one join the prefix; those after it that are not absorbed
                are kept tokens, before ``kept_ids``.
            model_inputs: further inputs of the model for the pass over what stands before the first
                kept token, which must all be absorbed then.

        Returns:
            The patch of all kept tokens; ``patch.logits`` are the logits with the context.

        Raises:
            ControllabilityError: no change of the weights can have the effect, for the layer and
                token named.
            UnsupportedModelError: ``model_inputs`` are images or the like, and their tokens have
                positions of three numbers (M-RoPE).
            ValueError: a shape, a mask or a span does not fit; there are more tokens than the model
                has positions for; or there are ``model_inputs`` beside a prefix.
            TypeError: ids or a mask are no tensor, or one of ``model_inputs`` is none of the
                model's.
        """
        self.require_attached()
        sequences = assemble(
            context_ids,
            kept_ids,
            prefix_ids=prefix_ids,
            context_mask=context_mask,
            kept_mask=kept_mask,
            prefix_mask=prefix_mask,
            absorbed=absorbed,
        )
        return self.compute_sequences(sequences, **model_inputs).patch

    @one_pass
    @torch.no_grad()
    def compute_sequences(self, sequences: Sequences, **model_inputs: Any) -> Computation:
        """:meth:`compute` on sequences that are laid out already, with all that was observed on the
        way.
        """
        self.require_attached()
        check_vocabulary(self.model, sequences.ids, sequences.mask)
        check_length(self.model, int(sequences.mask.sum(1).max()))
        cache = self.prefill(sequences, **model_inputs)
        return self.compute_from(cache, sequences)

    @property
    def closes(self) -> bool:
        """Whether the factors are computed in a pass of their own, in the shapes of the replay,
        after one of the untouched model.

        The exact update must: its loop closes on rounding, which depends on the shapes. So does the
        direct update of a scale writer: it divides by activations and so magnifies any difference
            in rounding between its recording and its replay. And so must every
        update of a recurrent model: no mask hides anything from its state, a pass that starts from
            the prefix alone does.
        """
        return self.update == "exact" or self.recurrent or self._magnifies

    @property
    def _magnifies(self) -> bool:
        """Whether the update divides by activations, and so magnifies their rounding."""
        scales = any(block.spec.writer is Writer.SCALE for block in self.block_specs)
        return self.update == "direct" and scales

    def _closes_for(self, sequences: Sequences) -> bool:
        """Whether they are for these tokens.

        They also are if attention depends on the cache and kept tokens attend to more than
        themselves.
        """
        if self.closes or not self._depends_on_cache:
            return self.closes
        prefixed = bool((sequences.head_mask & ~sequences.head_absorbed).any())
        return prefixed or len(sequences.kept_columns) > 1

    @one_pass
    def prefill(self, sequences: Sequences, **model_inputs: Any) -> Cache:
        """A cache of the head, as the untouched model makes it, with the rows that the pass over
        the tail needs.
        """
        check_inputs(self.model, model_inputs)
        given = names_of(model_inputs)
        if given and (sequences.head_mask & ~sequences.head_absorbed).any():
            raise ValueError(
                f"expected no prefix beside {', '.join(given)}, of which a replay of the prefix"
                " knows nothing"
            )
        cache = kv_cache.new_cache(self.model)
        if sequences.head_ids.shape[1]:
            forward_passes.run_head(self.model, sequences, cache, **model_inputs)
            if not self._closes_for(sequences):
                kv_cache.stack_cache(cache, len(sequences.head_ids))
        return cache

    @one_pass
    def compute_from(
        self, cache: Cache, sequences: Sequences, live: Tensor | None = None
    ) -> Computation:
        """The patch of the tail's kept tokens; ``cache`` holds the head (:meth:`prefill`), and the
        tail too afterwards.

        live: (B, 1) bool, the rows that are to get a patch from a closing pass; all by default.
        """
        if self._closes_for(sequences):
            return self._compute_closing(cache, sequences, self.update, live)
        return self._compute_two_stream(cache, sequences)

    def _try_exact(self, sequences: Sequences) -> tuple[PatchReport, Tensor]:
        """The report of an exact patch, whatever the update, and the logits (B, T, V) of its
        replay.
        """
        cache = kv_cache.new_cache(self.model)
        forward_passes.run_head(self.model, sequences, cache)
        patch = self._compute_closing(cache, sequences, "exact").patch
        assert patch.report is not None
        return patch.report, self.replay(patch)[0]

    def _empty_patch(
        self, sequences: Sequences, logits: Tensor | None, passes: int
    ) -> ContextPatch:
        """The patch of the kept tokens, without any factors yet."""
        positions, mask, slots = sequences.positions, sequences.mask, sequences.kept_slots
        prefix = sequences.head_mask & ~sequences.head_absorbed
        width = int(prefix.sum(1).max()) if prefix.shape[1] else 0
        # a stable sort moves the prefix to the right end, in order
        prefix_slots = prefix.long().sort(dim=1, stable=True).indices[:, prefix.shape[1] - width :]
        return ContextPatch(
            info=self._info(passes, int(sequences.longest)),
            layers=(),
            layer_indices=tuple(range(len(self.block_specs))),
            blocks=self.block_specs,
            kept_ids=sequences.tail_ids[:, sequences.kept_columns],
            kept_mask=mask[:, slots],
            position_ids=positions[:, slots],
            kept_slots=slots.expand(len(mask), -1),
            prefix_ids=sequences.head_ids.gather(1, prefix_slots),
            prefix_mask=prefix.gather(1, prefix_slots),
            prefix_positions=positions.gather(1, prefix_slots),
            prefix_slots=prefix_slots,
            logits=logits,
            weights=self.weights,
        )

    def _info(self, passes: int, longest: int) -> PatchInfo:
        config = self.model.config
        return PatchInfo(
            model=getattr(config, "_name_or_path", "") or type(self.model).__name__,
            revision=getattr(config, "_commit_hash", None),
            fingerprint=self.fingerprint,
            tokenizer=self.tokenizer_fingerprint,
            family=self.family,
            update=self.update,
            dtype=str(self.model.dtype),
            passes=passes,
            longest=longest,
            divisible=self._divisible,
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all weights, taken when first needed and after changes that torch counts."""
        return self.weights.fingerprint

    @cached_property
    def weights(self) -> WatchedWeights:
        """The model's weights, watched for changes; patches share this."""
        return WatchedWeights(self.model)

    def check_weights(self) -> WeightCheck:
        """Hash all weights of the model now: call it after writing to them through ``.data``.

        All weights are hashed when a patcher attaches, which computes a first patch, and when a
        patch is saved or loaded. In between, torch's version counters and the weights' addresses
        show changes. Writes through ``.data`` (adapters are merged so) and to weights that were
        made
        in inference mode move neither: they are found at the next hash. From then on older patches
        are refused, and new ones carry the new fingerprint.

        Returns:
            The fingerprint, whether it has changed, the bytes that were read and the time::

                check = patcher.check_weights()
                print(check.changed, check.gb_per_second)
        """
        check = self.weights.check()
        assert check is not None
        return check

    @cached_property
    def tokenizer_fingerprint(self) -> str | None:
        """SHA-256 of the tokenizer, if one was given; taken once, a vocabulary is long."""
        return None if self.tokenizer is None else tokenizer_fingerprint(self.tokenizer)

    @one_pass
    def dynamics(
        self,
        context_ids: Tensor,
        kept_ids: Tensor,
        *,
        prefix_ids: Tensor | None = None,
        kept_mask: Tensor | None = None,
        prefix_mask: Tensor | None = None,
        layers: slice = slice(None),
    ) -> "Dynamics":
        """The implicit learning dynamics: the patches for the context's first 0, 1, … n tokens,
        ``W_i`` for every changed parameter.

        The kept tokens follow the tokens absorbed so far, at the positions they then have.

        Args:
            context_ids: (B, n) int64, contexts of one length. The others as in :meth:`compute`.
            layers: which blocks to keep the factors of; all by default. Patches of some cannot be
                replayed.

        Returns:
            The trajectory of every parameter, kept as vectors: its steps, gradients, norms, see
            :class:`icl_patch.analysis.dynamics.Trajectory`.

        Raises:
            ControllabilityError, ValueError: as :meth:`compute`.

        Source: Dherin et al. (2025), Proposition 3.1.
        """
        from icl_patch.analysis.dynamics import grow  # it stands above this module

        self.require_attached()
        sequences = assemble(
            context_ids,
            kept_ids,
            prefix_ids=prefix_ids,
            kept_mask=kept_mask,
            prefix_mask=prefix_mask,
        )
        check_length(self.model, int(sequences.mask.sum(1).max()))
        return grow(self, sequences, sequences.head_ids.shape[1] - context_ids.shape[1], layers)

    # -- replay

    @one_pass
    @torch.no_grad()
    def forward(
        self, kept_ids: Tensor, patch: ContextPatch, *, kept_mask: Tensor | None = None
    ) -> Tensor:
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
            PatchFormatError: it names tokens, positions or experts that the model does not have, or
                its factors do not fit.
            ValueError: the tokens are not those the patch is for, or the patch is a part that
                cannot be replayed.
        """
        self._check_replay(kept_ids, patch, kept_mask)
        return torch.cat(
            [logits for logits, _ in self._replay(patch, lambda _blocks: nullcontext([]))], 1
        )

    def _check_fingerprints(self, patch: ContextPatch) -> None:
        self.require_attached()
        patch.check_model(self.model, self.fingerprint)
        if self.tokenizer_fingerprint is not None:
            patch.check_tokenizer(self.tokenizer_fingerprint)

    def _check_replay(
        self, kept_ids: Tensor, patch: ContextPatch, kept_mask: Tensor | None
    ) -> None:
        check_tensor("kept_ids", kept_ids)
        if kept_mask is not None:
            check_tensor("kept_mask", kept_mask)
        self._check_fingerprints(patch)
        if not patch.info.replayable or len(patch.layers) != len(self.blocks):
            raise ValueError(
                "expected a patch with all its layers and its first tokens, got a part of one"
            )
        check_fit(patch, self.model)
        if kept_mask is not None and not torch.equal(kept_mask.bool(), patch.kept_mask):
            raise ValueError(
                "expected the kept_mask that the patch was computed for, got another one"
            )
        if (
            kept_ids.shape != patch.kept_ids.shape
            or ((kept_ids != patch.kept_ids) & patch.kept_mask).any()
        ):
            raise ValueError(
                "expected the kept tokens that the patch was computed for,"
                f" {tuple(patch.kept_ids.shape)}, got others, {tuple(kept_ids.shape)}"
            )

    @contextmanager
    def applied(
        self, patch: ContextPatch, *, row: int = 0, token: int = -1
    ) -> Iterator[PreTrainedModel]:
        """Within this context the model's weights are changed by one token's patch, for every token
        that it is given::

            patch = ContextPatch.load("patch.safetensors", model)
            with patcher.applied(patch) as changed:
                changed.generate(**tokenizer("...", return_tensors="pt"))

        The change is exact for the token, the history and the position it was computed for; for
        others it is whatever it is. All threads see it. Passes of this patcher are refused
        meanwhile.

        Args:
            patch: a patch of this model. row, token: whose change to apply, by default the first
                row's last kept token's.

        Raises:
            FingerprintMismatch: the patch is of another model or tokenizer.
            UnsupportedModelError: the model has experts: a token's patch changes those that it
                chose.
            ValueError: a patch is applied already, layers of this one were cut out, or there is no
                such row or token.
        """
        changed = ExitStack()
        with self.attachment.lock:
            layers = self._layers_of_token(patch, row, token)
            changed.enter_context(replaying(self.blocks, layers, shared=True))
            self._applied = True
        try:
            yield self.model
        finally:
            with self.attachment.lock:
                self._applied = False
                changed.close()

    def _layers_of_token(self, patch: ContextPatch, row: int, token: int) -> list[Factors]:
        """One token's factors, (width,) each, of every block; see :meth:`applied`."""
        self._check_fingerprints(patch)
        if patch.layer_indices != tuple(range(len(self.blocks))):
            raise ValueError("expected a patch with all its layers, got a part of one")
        check_fit(patch, self.model)
        rows, tokens = patch.kept_ids.shape
        if not (-rows <= row < rows and -tokens <= token < tokens):
            raise ValueError(
                f"expected a row and a token of {rows} x {tokens}, got {row} and {token}"
            )
        if token < 0:
            token = int(patch.kept_mask[row].sum()) + token  # kept tokens are right-padded
        if not 0 <= token < tokens or not patch.kept_mask[row, token]:
            raise ValueError(
                f"expected a kept token of row {row}, which has {int(patch.kept_mask[row].sum())},"
                " got padding"
            )
        return [
            {name: x[row, token] for name, x in layer.items() if x.dim() > 1}
            for layer in patch.layers
        ]

    # -- generation

    def generate(
        self,
        context_ids: Tensor,
        *,
        context_mask: Tensor | None = None,
        max_new_tokens: int | None = None,
        streamer: BaseStreamer | None = None,
        logits: str = "reduced",
        fast: bool | None = False,
        patches: bool = True,
        check_every: int = 0,
        prefill_chunk: int | None = None,
        compiled: bool = False,
        graph: bool = False,
        **arguments: Any,
    ) -> "Iterator[GenerationStep]":
        """Generation in which every token is produced by freshly patched weights on that token
        alone.

        At each step everything before the current token is absorbed into the weights. The first
        current token is the context's last. Choice and end are those of ``model.generate``: its
        generation configuration holds, logits processors and stopping criteria are transformers'
        own, a row that has ended is padded while others go on, and the iterator ends with the last
        of them.

        Args:
            context_ids: (B, C) int64, left-padded. context_mask: (B, C) bool.
            max_new_tokens: the most steps; by default what the generation configuration says, else
                64 or what the model has room for.
            streamer: gets the prompt now and every token as it is chosen.
            logits: which logits are chosen from: ``"reduced"``, the reduced stream's;
                ``"context"``, the context stream's; ``"replay"``, those of a replay of every step's
                patch, without context.
            fast: whether both streams share one cache of B rows, see
                :mod:`icl_patch.generation.shared_cache`; None: where the model allows it, but for
                mixtures of experts in bf16 and fp16, whose replays may choose other experts then.
            patches: whether the steps keep what their patches are made of.
            check_every: replay every so many-th step without context and report the difference as
                ``step.check``; 0 for never.
            prefill_chunk: so many tokens of the context a pass; all at once by default.
            compiled: whether to trace the step once and compile it (``torch.compile``), which takes
                seconds to minutes at the first two tokens. The step is kept: another generation of
                as many rows and about as many tokens
                (:func:`icl_patch.generation.compiled_step.bucketed_capacity`) finds it made. It
                runs on a static cache of its own. Hooks in the model run while it is traced, not
                afterwards.
            graph: whether to capture the step, compiled or not, as a CUDA graph, which is kept
                likewise. A step's patch must then be asked for before the next step.
            arguments: any of ``model.generate``: ``generation_config``, ``do_sample``,
                ``temperature``, ``eos_token_id``, ``logits_processor``, ``stopping_criteria``,
                ``cache_implementation="static"``, further inputs of the model …

        Returns:
            An iterator of :class:`icl_patch.generation.loop.GenerationStep`, one for every new
            token. It may be left at any time: between two steps nothing is held, and other threads
                go on.

        Raises:
            UnsupportedModelError: ``fast=True``, ``compiled=True`` or ``graph=True`` is not for
                this model.
            ValueError, ControllabilityError: as :meth:`compute`; ValueError too for more tokens
                than the model has positions for.
        """
        from icl_patch.generation import loop  # it stands above this module

        options = loop.Options(logits, fast, patches, check_every, prefill_chunk, compiled, graph)
        return loop.generate(
            self, context_ids, context_mask, max_new_tokens, streamer, options, **arguments
        )

    def decoding_method(
        self,
        *,
        streamer: BaseStreamer | None = None,
        logits: str = "reduced",
        fast: bool | None = False,
        prefill_chunk: int | None = None,
        compiled: bool = False,
        graph: bool = False,
    ) -> Callable[..., Any]:
        """The loop of :meth:`generate` as a decoding method for transformers: ``model.generate(...,
        custom_generate=this)``.

        It returns what ``model.generate`` returns. transformers does not hand its ``streamer`` to a
        decoding method, so it is given here; the other arguments are as for :meth:`generate`.
        """
        from icl_patch.generation import loop

        return loop.decoding_method(
            self, streamer, loop.Options(logits, fast, False, 0, prefill_chunk, compiled, graph)
        )

    def require_attached(self) -> None:
        """Raises ValueError after :meth:`detach`, while a patch is applied, or if the model's dtype
        or training is not what it was.
        """
        if not self.attached:
            raise ValueError("expected an attached patcher, this one has been detached")
        if self._applied:
            raise ValueError(
                "expected a model without an applied patch: leave the `with patcher.applied(...)`"
                " block first"
            )
        if self.model.dtype != self._dtype:
            raise ValueError(
                f"expected the model in {self._dtype}, as it was attached to, got it in"
                f" {self.model.dtype}: attach again"
            )
        if self.model.training or any(block.module.training for block in self.blocks):
            _check_training(self.model, True)


def _check_training(model: PreTrainedModel, training: bool) -> None:
    """Raises ValueError if training changes what the model computes."""
    if training and _drops(model):
        raise ValueError("expected a model in eval mode, got one that is training with dropout")
    if any(
        module.training and getattr(module, "gradient_checkpointing", False)
        for module in model.modules()
    ):
        raise ValueError(
            "expected a model in eval mode, got one that is training with gradient checkpointing,"
            " which keeps no cache"
        )


def _drops(model: PreTrainedModel) -> bool:
    """Whether the model drops anything out while it trains."""
    rates = [
        value
        for name, value in vars(model.config.get_text_config(decoder=True)).items()
        if "drop" in name or name.endswith("pdrop")
    ]
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)
