"""AttachedModel: a model with patched modules in its blocks, run to compute and to replay patches.

A call comes down from :class:`icl_patch.ContextPatcher`; the passes themselves are in
:mod:`icl_patch.recording.passes`.
"""

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from icl_patch import metrics
from icl_patch.errors import ExactnessWarning, RankError, UnsupportedModelError
from icl_patch.invariance.arithmetic import arithmetic_here
from icl_patch.layers.attachment import as_pass
from icl_patch.layers.device_hooks import input_device
from icl_patch.metrics import replay_error
from icl_patch.models import kv_cache
from icl_patch.models.attention_mask import check_attention
from icl_patch.models.block_spec import Block, BlockSpec, Writer
from icl_patch.models.execution_state import ModelWatch, execution_state
from icl_patch.models.forward import check_inputs, counts_slots, names_of
from icl_patch.models.language_model import (
    check_length,
    check_vocabulary,
    chooses_tokens,
    family_of,
)
from icl_patch.models.model_checks import (
    check_eval,
    check_language_model,
    check_split,
    check_unwrapped,
    explain_failure,
    require_finite,
)
from icl_patch.models.pipeline import stage_of
from icl_patch.models.positions import check_one_side
from icl_patch.models.ranks import Ranks, digest, on_all_ranks, ranks_of, versions
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.models.tensor_parallel import group_of
from icl_patch.models.trial_tokens import first_token
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.fingerprints import (
    WatchedWeights,
    tokenizer_fingerprint,
    weight_state,
)
from icl_patch.patch.serialization import PatchInfo, check_fit, check_update
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import AttachedBlock, attach, replaying
from icl_patch.recording.hooks import HookIds, Hooks, paths_of
from icl_patch.recording.passes import (
    Computation,
    call_logits,
    compute_in_two_passes,
    replay_compared,
    replay_logits,
    replay_observed,
)
from icl_patch.recording.replay_check import check_replay
from icl_patch.recording.self_check import SelfCheck, takes_padding
from icl_patch.recording.sequences import Sequences, with_media
from icl_patch.tolerances import SIXTEEN_BITS, rounding_limit


@dataclass(frozen=True, eq=False)
class _Known:
    """Results of attaching to a model, for the next time.

    state: of its modules, settings, weights and first token then. blocks: those on this rank.
    weights: watched since. takes_padding: found since, by the hooks.
    """

    state: tuple[Any, ...]
    blocks: list[Block]
    weights: WatchedWeights
    takes_padding: dict[HookIds, bool]

    def hash_differs(self) -> bool:
        """Whether weights have changed, also where torch does not count it."""
        check = self.weights.check()
        return check is None or check.changed


_known: "weakref.WeakKeyDictionary[PreTrainedModel, _Known]" = weakref.WeakKeyDictionary()


def _state_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Any, ...] | None:
    """The state that the self-check depends on; None if torch does not count changes of weights."""
    if any(x.is_inference() for x in (*model.parameters(), *model.buffers())):
        return None
    # no references to the model, which would live as long as what is known of it
    runs = tuple(
        id(x) if isinstance(x, nn.Module) or callable(x) else x for x in execution_state(model)
    )
    config, first = model.config.to_json_string(use_diff=False), first_token(model, tokenizer)
    return runs, tuple(weight_state(model)), config, first


class HasAttachedModel(Protocol):
    """A patcher, for functions that stand below it."""

    attached_model: "AttachedModel"


class AttachedModel:
    """A Hugging Face model with patched modules in place of its blocks' readers and writers.

    Threads take turns: a pass has the model to itself, and another thread's pass, or its call of
    the model, waits until it ends. An attached model that nobody refers to any more detaches. What
    attaching finds is remembered for as long as nothing in the model changes.

    Args:
        model: a causal language model in eval mode.
        update: ``"direct"``, ``"stable"`` or ``"exact"``, see :class:`icl_patch.ContextPatcher`.
        tokenizer: recorded in patches, and compared with the tokenizer of replayed ones.
        timeout: seconds that a rank of a split model waits for another.

    Attributes:
        ranks: the processes that run the model.
        blocks: the attached blocks, in order, of a split model those on this rank; empty after
            :meth:`detach`. places: their places among all.
        block_specs: path and spec of every block of the model.
        family: the type of the language model.
        recurrent: whether some layer's state sums up the tokens before. The model then runs one
            token a call.
        hooks: the forward hooks on the model, as :meth:`watch_hooks` found them last.
        watch: counts the changes of the model since attaching.

    Raises:
        UnsupportedModelError: a block has an unknown form, or the model fails the self-check.
        TypeError: ``tokenizer`` is not a tokenizer.
        ValueError: ``update`` is unknown, or the model is attached already, or it is training.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        update: str,
        tokenizer: PreTrainedTokenizerBase | None,
        timeout: float | None = None,
    ) -> None:
        self.ranks = ranks_of(model, timeout) if isinstance(model, nn.Module) else Ranks((0,), 0.0)
        self.ranks.call("attaching", lambda: self._start(model, update, tokenizer))

    def _start(
        self, model: PreTrainedModel, update: str, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        check_update(update)
        if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
            raise TypeError(
                f"expected a tokenizer with a vocabulary, got {type(tokenizer).__name__}"
            )
        self.model, self.update, self.tokenizer = model, update, tokenizer
        self.ranks.shared(lambda: self._check_model(model))
        state = _state_of(model, tokenizer)
        self.attachment = attach(model)
        self.blocks: list[AttachedBlock] = self.attachment.blocks
        self.hooks = Hooks(model, self.attachment.forwards)
        self._takes_padding: dict[HookIds, bool] = {}
        # When this object is collected, no pass is running.
        weakref.finalize(self, self.attachment.undo).atexit = False
        self._dtype = model.dtype
        try:
            with self.attachment.exclusive(), self.without_autocast():
                self.ranks.shared(lambda: self._attach(state))
            self.watch = ModelWatch(model)
            self._checked = self.watch.code
        except BaseException as error:  # also an error of the model's own code
            hooked = self.hooks.current()  # detaching takes our own forwards away
            self.detach()
            ours = (torch.OutOfMemoryError, RankError)
            if not isinstance(error, Exception) or isinstance(error, ours):
                raise
            alone = self.ranks.size == 1
            reason = explain_failure(model, error, tokenizer) if alone else str(error)
            if hooked:
                reason += f" (with forward hooks on {paths_of(hooked)}: attach without them)"
            else:
                reason += " (docs/model_classes.md lists the classes that work)"
            raise on_all_ranks(UnsupportedModelError(reason)) from error

    def without_autocast(self) -> torch.autocast:
        """Within this context autocast is off, whose rounding would hide what a trial looks for."""
        return torch.autocast(input_device(self.model).type, enabled=False)

    def _check_model(self, model: PreTrainedModel) -> None:
        check_language_model(model)
        check_attention(model)
        check_eval([model])
        if self.ranks.size > 1:
            check_split(model)
        if self.update == "exact" and group_of(model) is not None:
            raise UnsupportedModelError(
                "expected update 'direct' or 'stable' with tp_size, got 'exact': the bits of a sum"
                " over ranks depend on their number and on the order of the reduction, so a patch"
                " would be exact on this split alone. Exact patches are for pp_size"
            )

    def _attach(self, state: tuple[Any, ...] | None) -> None:
        known = _known.get(self.model)
        changed = known is None or known.state != state or known.hash_differs()
        changed = self.ranks.any(changed)  # all ranks try the model, or none
        if self.ranks.size > 1:
            config = self.model.config.to_json_string(use_diff=False)
            self.ranks.agree(
                versions()
                | {
                    "the update": self.update,
                    "the model": type(self.model).__name__,
                    "the configuration": config,
                    "the dtype": self.model.dtype,
                    "the tokenizer": self.tokenizer_fingerprint,
                }
            )
        self.family, self.recurrent = family_of(self.model), is_recurrent(self.model)
        if known is not None and not changed:
            self.weights, self._takes_padding = known.weights, known.takes_padding
            self._swap_blocks(known.blocks)
            return
        self.weights.refresh()
        check = SelfCheck(self.model, self.recurrent, self.tokenizer)
        self._swap_blocks(self.ranks.shared(check.blocks))
        check.run(self)
        blocks = [block.block for block in self.blocks]
        self._set_specs(blocks)
        if state is not None:
            _known[self.model] = _Known(state, blocks, self.weights, self._takes_padding)

    def _swap_blocks(self, blocks: Sequence[Block]) -> None:
        """Patch the blocks of this rank."""
        self._set_specs(blocks)
        self.blocks += [AttachedBlock(self.model, block, self.attachment) for block in blocks]

    def _set_specs(self, own: Sequence[Block]) -> None:
        """Take the specs of this rank's blocks, and of those of all others."""
        blocks = list(own)
        if self.ranks.size > 1 and stage_of(self.model) is not None:
            words = self.ranks.exchange([[x.path, x.spec.to_json()] for x in own])
            blocks = [Block(path, BlockSpec.from_json(x)) for word in words for path, x in word]
        self.block_specs: tuple[Block, ...] = tuple(blocks)
        first = [block.path for block in blocks].index(own[0].path) if own else 0
        self.places = range(first, first + len(own))

    def agree(self, name: str, tokens: Iterable[Tensor | None], **options: object) -> None:
        """Check, at the entrance of a call, that all ranks have the same tokens, called ``name``,
        options, hooks and weights.

        Raises:
            RankError: they differ, or a rank does not answer.
        """
        if self.ranks.size == 1:
            return
        hooked = bool(self.hooks.current())
        self.ranks.agree(
            {name: digest(tokens), "whether there are forward hooks": hooked, **options}
        )
        self.weights.refresh()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "expected a model to copy, got its patcher: copy the model, and attach another patcher"
        )

    @property
    def is_attached(self) -> bool:
        """Whether the model's modules are swapped."""
        return bool(self.blocks)

    def detach(self) -> None:
        """Put the model's own modules back; detaching twice is fine."""
        with self.attachment.lock:
            self.attachment.undo()

    def require_attached(self) -> None:
        """Check that passes can be run.

        Raises:
            ValueError: after :meth:`detach`, while a patch is applied, or if the model's dtype or
                training mode has changed.
        """
        if not self.is_attached:
            raise ValueError("expected an attached patcher, this one has been detached")
        if self.attachment.applied:
            raise ValueError(
                "expected a model without an applied patch: leave the `with patcher.applied(...)`"
                " block first"
            )
        if self.model.dtype != self._dtype:
            raise ValueError(
                f"expected the model in {self._dtype}, its dtype when it was attached, got it in"
                f" {self.model.dtype}: attach again"
            )
        check_eval([self.model, *[block.module for block in self.blocks]])
        self.watch.look()
        if self.ranks.any(self._checked != self.watch.code):
            self.watch_hooks()
            self._check_again()

    def _check_again(self) -> None:
        """Try the model again, whose code or settings have changed since it was attached.

        Raises:
            UnsupportedModelError: the blocks have another form now.
        """
        check = SelfCheck(self.model, self.recurrent, self.tokenizer)
        try:
            with self.attachment.exclusive(), self.without_autocast():
                check.run(self)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                "expected the modules and settings that the model had when it was attached, they"
                f" have changed: detach, and attach again ({error})"
            ) from error
        self._set_specs([block.block for block in self.blocks])
        self.watch.accept()
        self._checked = self.watch.code

    # -- compute

    @property
    def steps_take_two_passes(self) -> bool:
        """Whether no decode step can run both streams in one batch, in any arithmetic.

        The direct update of a scale writer cannot, because it divides by activations and so
        magnifies any difference in rounding between its recording and its replay. A recurrent
        model cannot, because no mask hides a token from its state.
        """
        return self.recurrent or self._magnifies_rounding

    @property
    def divisible(self) -> bool:
        """Whether some rows of a patch, or its first tokens, can be replayed by themselves."""
        return not (self._magnifies_rounding or chooses_tokens(self.model))

    @property
    @as_pass
    def takes_padding(self) -> bool:
        """Whether a row with padding on its left has the logits that it has alone; tried when it
        is first asked for.
        """
        known, hooked = self._takes_padding, self.hooks.current()
        if hooked not in known:
            with self.without_autocast():
                known[hooked] = takes_padding(self.model, self.recurrent, self.tokenizer)
        return known[hooked]

    @property
    def _magnifies_rounding(self) -> bool:
        """Whether the update divides by activations."""
        scales = any(block.spec.writer is Writer.SCALE for block in self.block_specs)
        return self.update == "direct" and scales

    @property
    def has_ties(self) -> bool:
        """Whether rounding decides a token's experts: a replay that rounds otherwise may choose
        some that have no factors.
        """
        rounds = self.model.dtype in SIXTEEN_BITS
        return rounds and any(block.spec.experts is not None for block in self.block_specs)

    @as_pass
    def prefill(self, sequences: Sequences, **model_inputs: Any) -> Cache:
        """Run the unmodified model on the head: a cache of its tokens."""
        check_inputs(self.model, model_inputs)
        check_vocabulary(self.model, sequences.ids, sequences.mask)
        self._check_rows(sequences)
        self.watch_hooks()
        names = names_of(model_inputs)
        if names and sequences.prefix.any():
            raise ValueError(
                f"expected keep_first=0 with {', '.join(names)}, and no tokens before the"
                " absorbed ones: a replay runs the tokens in front without these inputs"
            )
        cache = kv_cache.new_cache(self.model)
        if sequences.head:
            forward_passes.run_head(self.model, sequences, cache, **model_inputs)
            self.watch.accept()
        return cache

    def _check_rows(self, sequences: Sequences) -> None:
        """Raises ValueError for rows that the model would treat otherwise than alone."""
        name = type(self.model).__name__
        if not (sequences.mask[:, : sequences.head].all() or self.takes_padding):
            raise ValueError(
                f"expected rows of one length for {name}, whose logits for a row change with"
                " padding; got padding on the left: compute each row by itself"
            )
        check_one_side(self.model, sequences.mask.sum(1))
        if counts_slots(self.model) and sequences.absorbed[:, sequences.head :].any():
            raise ValueError(
                f"expected one absorbed span for {name}, which numbers its tokens by their places"
                " in the cache; got several: absorb the tokens between them too"
            )

    @as_pass
    def compute(self, sequences: Sequences, **model_inputs: Any) -> Computation:
        """The patch of the kept tokens, with everything observed on the way.

        Raises:
            ControllabilityError, NonFiniteError, UnsupportedModelError, ValueError, TypeError: as
                :meth:`icl_patch.ContextPatcher.compute`.
        """
        self.require_attached()
        self.agree("the tokens", (sequences.ids, sequences.mask, sequences.absorbed))
        check_length(self.model, int(sequences.longest))
        sequences = with_media(self.model, sequences, model_inputs)
        computation = self.compute_from(self.prefill(sequences, **model_inputs), sequences)
        patch, activations = computation.patch, computation.activations
        # with hooks the patch has been replayed already
        if self.update != "exact" or patch.hooked:
            return computation
        assert patch.report is not None and patch.logits is not None
        # the report has the misses of the replay
        logits, misses = replay_compared(self, patch, [block.output for block in activations])
        self.warn_unless_exact("this exact patch", logits, patch.logits, patch.kept_mask)
        report = replace(patch.report, misses=misses)
        return replace(computation, patch=replace(patch, report=report))

    @as_pass
    def compute_from(
        self, cache: Cache, sequences: Sequences, live: Tensor | None = None
    ) -> Computation:
        """:meth:`compute` from a cache of the head, which holds the tail too afterwards.

        live: (B, 1) bool, the rows that get a patch; all by default.
        """
        hooked = self.hooks.current()
        computation = compute_in_two_passes(self, cache, sequences, live)
        patch, valid, model = computation.patch, computation.valid, self.model
        assert patch.logits is not None
        whole = partial(forward_passes.run_whole, model, sequences)
        require_finite(model, patch.logits, whole, valid)
        replay = partial(replay_logits, self, patch)
        require_finite(model, computation.reduced_logits, replay, valid)
        return self._check_computed(hooked, computation) if hooked else computation

    # -- replay

    # a patch's logits (B, T, V), unchecked; the first also gives every block's activations
    replay, replay_logits = as_pass(replay_observed), as_pass(replay_logits)

    @as_pass
    def replay_checked(self, patch: ContextPatch) -> Tensor:
        """Replay a patch and check the logits (B, T, V): against those of its replay where it was
        made, and against those with the context if there are hooks on the model now or were when it
        was computed.

        A loaded patch has no logits. Its replay must be the same without the hooks.

        Raises:
            UnsupportedModelError, ReplayMismatch: they differ.
            NonFiniteError: a logit is not finite.
        """
        self.watch_hooks()
        self.agree("the patch", (patch.kept_ids, patch.kept_mask, patch.prefix_ids))
        logits, hooked, expected = self.replay_logits(patch), self.hooks.current(), patch.logits
        require_finite(self.model, logits, partial(self.replay_logits, patch), patch.kept_mask)
        if hooked and expected is None:
            with self.hooks.removed():
                expected = self.replay_logits(patch)
        if expected is not None and (hooked or patch.hooked):
            self._check_hooks(hooked, replay_error(logits, expected, patch.kept_mask))
        check_replay(patch, logits)
        return logits

    def _check_hooks(self, hooked: HookIds, error: float) -> None:
        """Raises UnsupportedModelError if hooks have changed a replay by too large an error."""
        if error > self.replay_limit:
            others = f"got others on {paths_of(hooked)}" if hooked else "they have been removed"
            raise UnsupportedModelError(
                f"expected the forward hooks that the patch was computed with, {others}: the replay"
                f" is off by {error:.1g} of the largest logit. Compute the patch again"
            )

    # -- models with forward hooks

    def watch_hooks(self) -> None:
        """Find the hooks on the model again; raises ValueError if a patched module has been
        replaced since attaching, UnsupportedModelError if the model has been compiled.
        """
        check_unwrapped(self.model)
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for block in self.blocks:
            for path, patched in block.patched.items():
                if modules.get(path) is not patched:
                    raise ValueError(
                        f"expected {path} as it was attached to, got another module in its place:"
                        " call detach(), which leaves the new one there, and attach again"
                    )
        self.hooks = Hooks(self.model, self.attachment.forwards)

    def _check_computed(self, hooked: HookIds, computation: Computation) -> Computation:
        """Replay a patch that was computed with hooks, and compare the logits: bit for bit for an
        exact patch without misses, else as far as rounding goes.

        Raises:
            UnsupportedModelError: they differ.
        """
        patch = replace(computation.patch, hooked=True)
        report, expected = patch.report, patch.logits
        assert report is not None and expected is not None
        error = replay_error(self.replay_logits(patch), expected, computation.valid)
        closed = self.update == "exact" and not report.misses.any()
        if error > (0 if closed else self.replay_limit):
            raise UnsupportedModelError(
                f"a patch cannot reproduce the model with forward hooks on {paths_of(hooked)}: its"
                f" replay is off by {error:.1g} of the largest logit. Remove the hook, put it on"
                " another module, set it before attaching, or choose another update"
            )
        return replace(computation, patch=patch)

    def warn_unless_exact(
        self, name: str, replayed: Tensor, expected: Tensor, valid: Tensor
    ) -> None:
        """Give a warning if the replay of an exact patch has other logits (B, T, V) than the run
        with the context at some valid (B, T) token.
        """
        wrong = ~metrics.bit_identical(replayed, expected) & valid
        if not wrong.any():
            return
        error = replay_error(replayed, expected, wrong)
        advice = "Take it as right up to rounding, or load the model in a dtype of a wider range"
        if error > rounding_limit(self.model.dtype):
            advice = "This is more than rounding: do not use it, and report the model"
        row, token = wrong.nonzero()[0].tolist()
        warnings.warn(
            f"{name} is not exact: at {int(wrong.sum())} of {int(valid.sum())} tokens its replay"
            " has other logits than the model with its context, by up to"
            f" {error:.1g} of the largest one; the first is row {row}, kept token {token} (see"
            f" patch.report.misses). {advice}",
            ExactnessWarning,
            stacklevel=2,
        )

    @property
    def replay_limit(self) -> float:
        """How far off a replay may be, relative to the largest logit."""
        return torch.inf if self.has_ties else rounding_limit(self.model.dtype)

    @contextmanager
    def applying(self, patch: ContextPatch, row: int, token: int | None) -> Iterator[None]:
        """Within this context one token's patch is applied to all tokens, or without a token each
        kept token's to itself, in all threads.

        Raises:
            FingerprintMismatch, UnsupportedModelError, ValueError: as
                :meth:`icl_patch.ContextPatcher.applied`.
        """
        stack = ExitStack()
        with self.attachment.lock:
            self.check_patch(patch)
            if token is None and row:
                raise ValueError(
                    f"expected no row without a token, got {row}: patch.select(rows=...) takes one"
                )
            layers = list(patch.layers) if token is None else patch.of_token(row, token)
            if len(layers) != len(self.block_specs):
                raise ValueError("expected a patch with all its layers, got a part of one")
            check_fit(patch, self.model)
            if token is None:
                self._check_called(patch)
            own = [layers[place] for place in self.places]
            stack.enter_context(replaying(self.blocks, own))
            self.attachment.applied = True
        try:
            yield
        finally:
            self.attachment.applied = False
            with self.attachment.exclusive():
                stack.close()

    @as_pass
    def _check_called(self, patch: ContextPatch) -> None:
        """Raises UnsupportedModelError unless a call of the model with the kept tokens, behind a
        cache of those that stay, is the patch's replay.
        """
        error = replay_error(call_logits(self, patch), self.replay_checked(patch), patch.kept_mask)
        if error > self.replay_limit:
            raise UnsupportedModelError(
                "expected a patch with kept tokens that the model can be called with, got one where"
                f" such a call is off by {error:.1g} of the largest logit: without the context the"
                " model's windows, chunks or positions differ. Call patcher.forward, with hooks to"
                " read activations"
            )

    # -- patches and their model

    def empty_patch(
        self, sequences: Sequences, passes: int, arithmetic: str | None = None
    ) -> ContextPatch:
        """A patch of the kept tokens of ``sequences``, without factors; by default in the
        arithmetic of the model's own calls here.
        """
        config = self.model.config
        info = PatchInfo(
            model=config.name_or_path or type(self.model).__name__,
            revision=getattr(config, "_commit_hash", None),
            fingerprint=self.weights.fingerprint,
            tokenizer=self.tokenizer_fingerprint,
            family=self.family,
            update=self.update,
            dtype=str(self.model.dtype),
            passes=passes,
            arithmetic=arithmetic or arithmetic_here(self.model),
            longest=int(sequences.longest),
            divisible=self.divisible,
            tensor_parallel=self._tensor_parallel,
        )
        ids, mask, positions = sequences.ids, sequences.mask, sequences.positions
        slots, prefix = sequences.kept_slots, sequences.prefix
        width = int(prefix.sum(1).max())
        # a stable sort moves the prefix to the right end, in order
        order = prefix.long().sort(dim=1, stable=True).indices
        prefix_slots = order[:, prefix.shape[1] - width :]
        return ContextPatch(
            info=info,
            layers=(),
            layer_indices=tuple(range(len(self.block_specs))),
            blocks=self.block_specs,
            kept_ids=ids[:, slots],
            kept_mask=mask[:, slots],
            position_ids=positions[:, slots],
            kept_slots=slots.expand(len(mask), -1),
            prefix_ids=ids.gather(1, prefix_slots),
            prefix_mask=prefix.gather(1, prefix_slots),
            prefix_positions=positions.gather(1, prefix_slots),
            prefix_slots=prefix_slots,
            weights=self.weights,
        )

    @property
    def _tensor_parallel(self) -> int:
        """The number of ranks that share each matrix."""
        group = group_of(self.model)
        return 1 if group is None else group.size()

    @cached_property
    def weights(self) -> WatchedWeights:
        """The model's weights, watched for changes; patches share this."""
        return WatchedWeights(self.model)

    @cached_property
    def tokenizer_fingerprint(self) -> str | None:
        """SHA-256 of the tokenizer, if there is one; taken once, because a vocabulary is long."""
        return None if self.tokenizer is None else tokenizer_fingerprint(self.tokenizer)

    def check_patch(self, patch: ContextPatch) -> None:
        """Check that passes can be run, and that a patch is of this model and tokenizer.

        Raises:
            FingerprintMismatch: it is of others.
            PatchFormatError: the patch was computed for blocks of another form.
            ValueError: as :meth:`require_attached`; or the patch depends on the rounding of another
                ``tp_size``.
        """
        self.require_attached()
        patch.check_model(self.model, self.weights.fingerprint)
        patch.check_blocks(self.block_specs)
        own = self._tensor_parallel
        bound = patch.info.update == "exact" or not patch.info.divisible
        if bound and patch.info.tensor_parallel != own:
            raise ValueError(
                f"expected a patch of a model with tp_size={own}, got an {patch.info.update} one"
                f" with tp_size={patch.info.tensor_parallel}, which depends on the rounding of that"
                " split: compute it again, or take update='stable'"
            )
        if self.tokenizer_fingerprint is not None:
            patch.check_tokenizer(self.tokenizer_fingerprint)
