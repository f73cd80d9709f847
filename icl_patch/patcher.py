"""ContextPatcher: attach to a model, compute a context's patch, replay it, generate with it,
detach.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from icl_patch.analysis import dynamics
from icl_patch.generation import answering, loop
from icl_patch.generation.compiled_step import check_compile
from icl_patch.generation.plans import StepPlans
from icl_patch.generation.recorded_step import RecordedStep
from icl_patch.models.forward import OUTPUTS, check_inputs
from icl_patch.models.prompts import Question
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.fingerprints import WeightCheck
from icl_patch.patch.serialization import check_fit
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.recording.sequences import assemble, check_tensor, either

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_all_ranks(method: _Method) -> _Method:
    """Decorate a public call that all ranks of a split model make together."""

    @wraps(method)
    def together(patcher: "ContextPatcher", *args: Any, **kwargs: Any) -> Any:
        ranks = patcher.attached_model.ranks
        return ranks.call(method.__name__, lambda: method(patcher, *args, **kwargs))

    return cast(_Method, together)


def _check_same(name: str, got: Tensor | None, expected: Tensor, where: Tensor) -> None:
    """Raises ValueError unless a tensor (B, T) is the patch's; only places ``where`` count."""
    if got is None:
        return
    of_patch = f"the {name} that the patch was computed for"
    if got.shape != expected.shape:
        raise ValueError(
            f"expected {of_patch}, {tuple(expected.shape)}, got others, {tuple(got.shape)}"
        )
    if (other := (got.to(expected.device) != expected) & where).any():
        place = other.nonzero()[0].tolist()
        raise ValueError(
            f"expected {of_patch}, got {int(other.sum())} of {int(where.sum())} that differ: the"
            f" first, at row, token {place}, is {got[*place].item()} in place of"
            f" {expected[*place].item()}"
        )


class ContextPatcher:
    """Turns contexts into changes of a model's weights.

    Attaching swaps the readers and writers of every block for patched modules, in place; ``detach``
    (or leaving the ``with`` block) puts the originals back, and the model is bit-identical to the
    one before::

        with ContextPatcher(model) as patcher:
            patch = patcher.compute(context_ids, kept_ids)
            logits = patcher.forward(kept_ids, patch)      # no context anywhere

    Threads may share a patcher and its model; they take turns. A pass (:meth:`compute`,
    :meth:`forward`, one step of :meth:`generate`) holds a lock, and so does a call of the model:
    other threads wait until it ends. A generation holds no lock between two steps. A patcher that
    is garbage collected detaches. After an interrupt the model is as before, and the patcher goes
    on.

    Args:
        model: a Hugging Face causal language model of a known family.
        update: ``"direct"`` (Theorem 1: closed form), ``"stable"`` (Appendix B: RMSNorm inversion)
            or ``"exact"`` (closed on the rounded block output: bit-identical).
        tokenizer: recorded in patches, and compared with that of patches that are replayed.
        rank_timeout: for a model that is split over processes, how many seconds a process waits
            for another; 300 by default.

    Raises:
        UnsupportedModelError: the model has blocks of an unknown form, or fails the self-check.
        TypeError: ``tokenizer`` is not a tokenizer.
        ValueError: ``update`` is unknown, or the model is attached already, or it is training.

    Source: Goldwaser et al. (2025), Theorem 2 and Algorithm 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        update: str = "exact",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        rank_timeout: float | None = None,
    ) -> None:
        self.attached_model = AttachedModel(model, update, tokenizer, rank_timeout)
        self.plans = StepPlans(self.attached_model)

    def __repr__(self) -> str:
        attached = self.attached_model
        name = self.model.config.name_or_path or type(self.model).__name__
        state = f"{len(attached.blocks)} blocks patched" if self.attached else "detached"
        return f"ContextPatcher({name}, {self.update}, {str(self.model.dtype)[6:]}, {state})"

    def __enter__(self) -> "ContextPatcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        return self.attached_model.model

    @property
    def update(self) -> str:
        """``"direct"``, ``"stable"`` or ``"exact"``."""
        return self.attached_model.update

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, if one was given."""
        return self.attached_model.tokenizer

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the model's weights, as patches record it."""
        return self.attached_model.weights.fingerprint

    @property
    def attached(self) -> bool:
        """Whether the model's modules are swapped."""
        return self.attached_model.is_attached

    def detach(self) -> None:
        """Put the model's own modules back. The model is bit-identical to the one before attaching;
        detaching twice is fine.
        """
        with self.attached_model.attachment.lock:
            self.plans.clear()
            self.attached_model.detach()

    def check_weights(self) -> WeightCheck:
        """Hash all weights of the model now: call it after writing to them through ``.data``.

        All weights are hashed when a patcher attaches, which computes a first patch, and when a
        patch is saved or loaded. In between, torch's version counters and the weights' addresses
        show changes. Writes through ``.data`` (some code merges adapters so) and to weights that
        were created in inference mode change neither counter nor address: they are found at the
        next hash. From then on older patches are refused, and new ones carry the new fingerprint.

        Returns:
            The fingerprint, and whether it has changed.
        """
        check = self.attached_model.weights.check()
        assert check is not None
        return check

    # -- compute

    @_on_all_ranks
    @torch.no_grad()
    def compute(
        self,
        context_ids: Tensor,
        kept_ids: Tensor | None = None,
        *,
        context_mask: Tensor | None = None,
        kept_mask: Tensor | None = None,
        keep_first: int = 0,
        absorbed: list[tuple[int, int]] | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **model_inputs: Any,
    ) -> ContextPatch:
        """The change of weights with which the model computes on the kept tokens the same as
        without it on ``[context, kept]``.

        Args:
            context_ids: (B, C) int64, left-padded.
            kept_ids: (B, T) int64, right-padded: the tokens that run without the context; each gets
                its own patch.
            context_mask, kept_mask: bool, True = token.
            keep_first: how many of every row's first tokens stay in front of the kept tokens, with
                the patch as without it; 1 keeps ``<bos>``. They are the patch's prefix.
            absorbed: [(start, stop)] columns of ``context_ids`` to absorb, by default all. Tokens
                before the first absorbed one stay too; those after it that are not absorbed are
                kept tokens, before ``kept_ids``.
            input_ids, attention_mask: transformers' names for ``kept_ids`` and ``kept_mask``:
                ``compute(context_ids, **tokenizer(question, return_tensors="pt"))``.
            model_inputs: further inputs of the model, for the pass over the tokens before the first
                kept one; these must then all be absorbed.

        Returns:
            The patch of all kept tokens; ``patch.logits`` are the logits with the context.

        Raises:
            ControllabilityError: no change of the weights can have the effect, for the layer and
                token named.
            NonFiniteError: the model's dtype cannot hold the outputs of the block named.
            UnsupportedModelError: the model has forward hooks with which the patch would be wrong.
            ValueError: a shape, a mask or a span does not fit; there are more tokens than the model
                has positions for; there are ``model_inputs`` beside tokens that stay, or images
                without the processor's ``mm_token_type_ids`` for a model that numbers their tokens
                by them.
            TypeError: ids or a mask are no tensor, or the model does not take one of
                ``model_inputs``.
        """
        self.attached_model.attachment.check_outside()
        self.attached_model.require_attached()
        sequences = assemble(
            context_ids,
            either("kept_ids", kept_ids, "input_ids", input_ids),
            context_mask=context_mask,
            kept_mask=either("kept_mask", kept_mask, "attention_mask", attention_mask),
            keep_first=keep_first,
            absorbed=absorbed,
        )
        return self.attached_model.compute(sequences, **model_inputs).patch

    @_on_all_ranks
    def dynamics(
        self,
        context_ids: Tensor,
        kept_ids: Tensor,
        *,
        kept_mask: Tensor | None = None,
        keep_first: int = 0,
        layers: slice = slice(None),
    ) -> dynamics.Dynamics:
        """The implicit learning dynamics: the patches for the context's first 0, 1, … n tokens
        behind those that stay, which give a trajectory ``W_i`` for every changed parameter.

        The kept tokens follow the tokens absorbed so far, at the positions they then have.

        Args:
            context_ids: (B, keep_first + n) int64, contexts of one length. The others as in
                :meth:`compute`.
            layers: the blocks to keep factors of; all by default. Patches of some blocks only
                cannot be replayed.

        Returns:
            The trajectory of every parameter, kept as vectors: its steps, gradients, norms, see
            :class:`icl_patch.analysis.dynamics.Trajectory`.

        Raises:
            ControllabilityError, NonFiniteError, ValueError: as :meth:`compute`.

        Source: Dherin et al. (2025), Proposition 3.1.
        """
        self.attached_model.attachment.check_outside()
        self.attached_model.require_attached()
        sequences = assemble(context_ids, kept_ids, kept_mask=kept_mask, keep_first=keep_first)
        return dynamics.grow(self.attached_model, sequences, keep_first, layers)

    # -- replay

    @_on_all_ranks
    @torch.no_grad()
    def forward(
        self,
        kept_ids: Tensor | None = None,
        patch: ContextPatch | None = None,
        *,
        kept_mask: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **model_inputs: Any,
    ) -> Tensor:
        """Replay: run the kept tokens with the patch's weights and no context anywhere.

        Positions and prefix come from the patch. There is no second stream, and the cache holds
        only the prefix.

        Args:
            kept_ids: (B, T), the patch's kept tokens.
            patch: from :meth:`compute` or :meth:`ContextPatch.load`, on this model.
            kept_mask: (B, T) bool; the patch's by default.
            input_ids, attention_mask: transformers' names for ``kept_ids`` and ``kept_mask``.
            model_inputs: none, the effect of the context's is in the patch.

        Returns:
            Logits (B, T, V) in the model's dtype.

        Raises:
            FingerprintMismatch: the patch is of another model or tokenizer.
            PatchFormatError: it names tokens, positions or experts that the model does not have, or
                its factors do not fit.
            NonFiniteError: the model's dtype cannot hold the outputs of the block named.
            UnsupportedModelError: the effect of the model's forward hooks has changed since the
                patch was computed.
            ReplayMismatch: numbers round otherwise here than where the patch was made, as on
                another processor, and it has become another change. If an exact patch only has
                other bits, there is an :class:`icl_patch.errors.ExactnessWarning`.
            ValueError: the tokens are not those the patch is for, or the patch is a part that
                cannot be replayed.
            TypeError: there are ``model_inputs``, or ``patch`` is none.
        """
        kept_ids = either("kept_ids", kept_ids, "input_ids", input_ids)
        kept_mask = either("kept_mask", kept_mask, "attention_mask", attention_mask)
        if not isinstance(patch, ContextPatch):
            raise TypeError(f"expected a ContextPatch, got {type(patch).__name__}")
        check_tensor("kept_ids", kept_ids)
        check_inputs(self.model, model_inputs.keys() & OUTPUTS)
        if model_inputs:
            raise TypeError(
                f"expected kept tokens alone, got {', '.join(model_inputs)} too: leave it out. The"
                " patch has its prefix, and the effect of all that compute was given"
            )
        self.attached_model.attachment.check_outside()
        with self.attached_model.attachment.exclusive():
            self._check_replay(kept_ids, patch, kept_mask)
            return self.attached_model.replay_checked(patch)

    def _check_replay(
        self, kept_ids: Tensor, patch: ContextPatch, kept_mask: Tensor | None
    ) -> None:
        if kept_mask is not None:
            check_tensor("kept_mask", kept_mask)
            kept_mask = kept_mask.bool()
        self.attached_model.check_patch(patch)
        if not patch.info.replayable:
            raise ValueError(
                "expected a patch with all its layers and its first tokens, got a part of one"
            )
        check_fit(patch, self.model)
        every = torch.ones_like(patch.kept_mask)
        _check_same("kept_mask", kept_mask, patch.kept_mask, every)
        _check_same("kept tokens", kept_ids, patch.kept_ids, patch.kept_mask)

    @contextmanager
    def applied(
        self, patch: ContextPatch, *, row: int = 0, token: int | None = -1
    ) -> Iterator[PreTrainedModel]:
        """Within this context the model's weights are changed by one token's patch, for every token
        that it is given::

            patch = ContextPatch.load("patch.safetensors", model)
            with patcher.applied(patch) as changed:
                changed.generate(**tokenizer("...", return_tensors="pt"))

        The change is right for the token, history and position that it was computed for, and for no
        others. With ``token=None`` each kept token has its own change, and a call is a replay, for
        tools that call the model themselves::

            with patcher.applied(patch, token=None):
                model(patch.kept_ids, position_ids=patch.position_ids)

        All threads see the changes, as they would see changed weights. Other calls of this patcher,
        and copies of the model, are refused until the context ends.

        Args:
            patch: a patch of this model. row, token: the kept token to take the change of; by
                default the last of the first row. None: every kept token of every row its own. Then
                call the model with all of them at once, behind a cache of ``patch.prefix_ids`` if
                tokens stay in front.

        Raises:
            FingerprintMismatch: the patch is of another model or tokenizer.
            UnsupportedModelError: the model has experts, and a token is given: its patch changes
                only the experts that this token chose. With ``token=None``: such a call would be no
                replay, because the model counts windows, chunks or positions through the context.
            ValueError: a patch is applied already, layers of this one were cut out, or there is no
                such row or token.
            NonFiniteError, ReplayMismatch: with ``token=None``, as :meth:`forward`.
        """
        if token is None:
            self._check_replay(patch.kept_ids, patch, None)
        with self.attached_model.applying(patch, row, token):
            yield self.model

    # -- generation

    @_on_all_ranks
    def generate(
        self,
        context_ids: Tensor | None = None,
        *,
        context_mask: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        max_new_tokens: int | None = None,
        streamer: BaseStreamer | None = None,
        keep_first: int = 0,
        mode: str = "auto",
        compile: bool | str = "auto",
        **arguments: Any,
    ) -> Iterator[loop.GenerationStep]:
        """Generate with weights that are patched anew for every token, which then runs alone.

        At each step everything before the current token is absorbed into the weights. The first
        current token is the context's last. Tokens are chosen, and rows end, as in
        ``model.generate``: its generation configuration holds, logits processors and stopping
        criteria are transformers' own, a row that has ended is padded while others go on, and the
        iterator ends when the last row does.

        Args:
            context_ids: (B, C) int64, left-padded. context_mask: (B, C) bool.
            input_ids, attention_mask: transformers' names for these two:
                ``generate(**tokenizer(prompt, return_tensors="pt"))``.
            max_new_tokens: the maximum number of steps; by default that of the generation
                configuration, else 64, or less if the model has fewer positions left.
            streamer: gets the prompt now, and each token when it is chosen.
            keep_first: as in :meth:`compute`. Steps that keep tokens take two passes.
            mode: how a step runs the rows with the context and the rows without it:
                ``"two_pass"``: the unmodified model, then the current token alone. It serves every
                update, and models with forward hooks and a few others need it. Exact steps are
                then bit-identical to the unmodified model.
                ``"shared_cache"``: one pass. Both rows share the cache of the context, and are two
                from each attention's output to the block's end. It does not serve every model.
                ``"two_stream"``: one pass over the same cache, in which they are two from the first
                layer on. It serves more models, up to 1.2 times as slowly. In bf16 and fp16 its
                replays have the bits of its steps.
                Exact steps of one pass are bit-identical to the same model on batch-invariant
                functions in its steps (:func:`icl_patch.batch_invariant` without its attention of
                several tokens), which is as near to the model in fp32.
                ``"auto"``: the fastest of these that serves the update and the model. Mixtures of
                experts in bf16 and fp16 take two streams unless the update is exact, because
                replays of a shared cache may choose other experts there. ``GenerationStep.mode``
                says how a step ran.
            compile: ``"auto"``: for 16 tokens or more, record the first step as a program
                (:mod:`icl_patch.generation.step_program`), which gives later steps every bit in
                less than half of the time on the host; :attr:`step_source` shows it. On CUDA the
                third step captures the program as a CUDA graph, which later ones replay. Steps that
                cannot be recorded or captured run without, with a warning that says why.
                False: run the model's own code in every step.
                True: trace the step once and compile it, which takes seconds to minutes at the
                first token; on CUDA capture this as a CUDA graph. For modes of one pass, so not for
                models with forward hooks. A compiled exact step has the bits of its replay.
                A program or compiled step is kept: another generation of as many rows and about as
                many tokens (:func:`icl_patch.generation.compiled_step.bucketed_capacity`) uses it
                again. Attention runs over a static cache there, so its logits are those of
                ``compile=False`` up to rounding.
            arguments: any of ``model.generate``: ``generation_config``, ``do_sample``,
                ``temperature``, ``eos_token_id``, ``logits_processor``, ``stopping_criteria``,
                ``stop_strings``, further inputs of the model … Settings of the model's generation
                configuration hold too, but for the cache that it names: the patcher has its own.

        Returns:
            An iterator of :class:`icl_patch.generation.loop.GenerationStep`, one for every new
            token. It may be abandoned at any time. Between two steps it holds no lock, and other
            threads may use the patcher. Of exact steps the first one and every 64th after it are
            replayed.

        Raises:
            UnsupportedModelError: ``mode`` or ``compile`` does not cover this model, or its forward
                hooks; or it got some after the first step.
            ValueError, ControllabilityError, NonFiniteError: as :meth:`compute`; ValueError too for
                more tokens than the model has positions for, for ``keep_first`` with a mode of one
                pass, or for settings that choose tokens in another way than greedily or by
                sampling, such as ``num_beams``.
            TypeError: as :meth:`compute`; there are ``inputs_embeds``, or outputs are asked for.
        """
        self.attached_model.attachment.check_outside()
        check_compile(compile)
        context_ids = either("context_ids", context_ids, "input_ids", input_ids)
        context_mask = either("context_mask", context_mask, "attention_mask", attention_mask)
        return loop.generate(
            self.plans,
            context_ids,
            context_mask,
            max_new_tokens,
            streamer,
            mode,
            compile,
            keep_first,
            **arguments,
        )

    @property
    def step_source(self) -> str | None:
        """The Python source of the last program that :meth:`generate` recorded
        (``compile="auto"``), a line for each operator and a heading for each block: what happens to
        a token. None if there is none.
        """
        steps = [step.run for step in self.plans.compiled.values()]
        programs = [run.program for run in steps if isinstance(run, RecordedStep)]
        return programs[-1].source if programs and programs[-1] is not None else None

    def ask(
        self,
        context: str | None = None,
        question: Question | None = None,
        *,
        system: str | None = None,
        chat: bool = False,
        keep_first: int = 0,
        max_new_tokens: int | None = None,
        streamer: BaseStreamer | None = None,
        mode: str | None = None,
        compile: bool | str = False,
        **arguments: Any,
    ) -> answering.Answer:
        """Answer a question about a context, both as text, and return the answer with its patch::

            with ContextPatcher(model, tokenizer=tokenizer) as patcher:
                answer = patcher.ask("Mars has two moons. ", "The moons of Mars are")
                patcher.forward(answer.patch.kept_ids, answer.patch)  # again, without the context
                patcher.ask(question="Who are you?", system="Your name is Pip.")  # in a chat

        Every token of the answer comes from freshly patched weights, as in :meth:`generate`.

        Args:
            context, question: read as one text, ``context + question``. Its tokens up to the
                question are absorbed. In a chat the question may be a list of messages,
                ``[{"role": "user", "content": ...}, ...]``.
            system: a chat's system message, in place of ``context``. It is absorbed with all that
                the chat template writes before it.
            chat: the context begins the user's (first) message of a chat. See
                :func:`icl_patch.models.prompts.make_prompt`.
            keep_first: as in :meth:`compute`: how many of the prompt's first tokens stay; 1 keeps
                ``<bos>``.
            mode: as for :meth:`generate`; by default ``"two_pass"``, as the answer's patch is
                computed, or ``"auto"`` with ``compile``.
            max_new_tokens, streamer, compile, arguments: as for :meth:`generate`, but one answer
                and no further inputs of the model. By default an answer in a chat ends with the
                assistant's turn, see :func:`icl_patch.models.ends.answer_ends`.

        Returns:
            :class:`icl_patch.generation.answering.Answer`: the text, its tokens, and one patch of
            all of the question's and the answer's tokens.

        Raises:
            ValueError: the patcher has no tokenizer, or a slow one, or one without a chat template
                or with one that refuses the messages; a text has no tokens; or as :meth:`generate`.
            TypeError: there is no question, or one that is no text; or inputs of the model.
        """
        self.attached_model.attachment.check_outside()
        return answering.answer(
            self.attached_model,
            self.generate,
            context,
            question,
            system=system,
            chat=chat,
            keep_first=keep_first,
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            mode=mode or ("auto" if compile else "two_pass"),
            compile=compile,
            **arguments,
        )
