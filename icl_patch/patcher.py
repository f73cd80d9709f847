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
from icl_patch.generation import answering, sampling_loop
from icl_patch.generation.plans import StepPlans
from icl_patch.generation.reusable_step import check_compile
from icl_patch.models.forward import OUTPUTS, check_inputs
from icl_patch.models.prompts import Question
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.fingerprints import WeightCheck
from icl_patch.patch.serialization import check_fit
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.recording.sequences import assemble, check_tensor

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


def _either(name: str, value: Any, alias: str, other: Any) -> Any:
    """The value of an argument for which transformers has another name.

    Raises:
        TypeError: it was given under both names.
    """
    if value is not None and other is not None:
        raise TypeError(f"expected {name} or {alias}, two names of one argument, got both")
    return other if value is None else value


class ContextPatcher:
    """Turns contexts into changes of a model's weights.

    Attaching replaces the readers and writers of every block by patched modules, in place.
    ``detach``, or leaving the ``with`` block, puts the originals back. The model is then
    bit-identical to the one before::

        with ContextPatcher(model) as patcher:
            patch = patcher.compute(context_ids, kept_ids)
            logits = patcher.forward(kept_ids, patch)      # no context anywhere

    Threads may share a patcher and its model; they take turns. A pass (:meth:`compute`,
    :meth:`forward`, one step of :meth:`generate`) holds a lock, and so does a call of the model:
    other threads wait until it ends. A generation holds no lock between two steps. A patcher
    detaches when it is garbage collected. An interrupt leaves the model as it was before, and the
    patcher stays usable.

    Args:
        model: a Hugging Face causal language model of a known family.
        update: ``"direct"`` (Theorem 1: closed form), ``"stable"`` (Appendix B: RMSNorm inversion)
            or ``"exact"`` (closed on the rounded block output: bit-identical).
        tokenizer: its hash is stored in patches, and compared when a patch is replayed.
        rank_timeout: how many seconds a process waits for another if the model is split over
            processes; 300 by default.

    Raises:
        UnsupportedModelError: the model has blocks of an unknown form, or fails the self-check.
        TypeError: ``tokenizer`` is not a tokenizer.
        ValueError: ``update`` is unknown, or the model is already attached or in training mode.

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
        """Put the model's own modules back. The model is bit-identical to the one before attaching.
        A second call does nothing.
        """
        with self.attached_model.attachment.lock:
            self.plans.clear()
            self.attached_model.detach()

    def check_weights(self) -> WeightCheck:
        """Hash all weights of the model now. Call it after writing to them through ``.data``.

        A patcher hashes all weights when it attaches, which computes a first patch, and when a
        patch is saved or loaded. In between, torch's version counters and the weights' addresses
        show changes. Two kinds of writes change neither: those through ``.data`` (some code merges
        adapters so) and those to weights created in inference mode. The next hash finds them. From
        then on the patcher refuses older patches, and new ones carry the new fingerprint.

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
        """Compute the change of weights that replaces the context. The changed model has the same
        outputs on the kept tokens alone as the unchanged model has on ``[context, kept]``.

        Args:
            context_ids: (B, C) int64, left-padded.
            kept_ids: (B, T) int64, right-padded: the tokens that run without the context. Each gets
                its own patch.
            context_mask, kept_mask: bool, True = token.
            keep_first: how many of every row's first tokens stay in front of the kept tokens, with
                and without the patch; 1 keeps ``<bos>``. They are the patch's prefix.
            absorbed: [(start, stop)] columns of ``context_ids`` to absorb; all by default. Tokens
                before the first absorbed one join the prefix. Tokens after it that are not absorbed
                become kept tokens, before ``kept_ids``.
            input_ids, attention_mask: transformers' names for ``kept_ids`` and ``kept_mask``:
                ``compute(context_ids, **tokenizer(question, return_tensors="pt"))``.
            model_inputs: further inputs of the model, for the pass over the tokens before the first
                kept one. All of these tokens must then be absorbed.

        Returns:
            The patch of all kept tokens; ``patch.logits`` are the logits with the context.

        Raises:
            ControllabilityError: no change of the weights can have the effect; the error names the
                layer and the token.
            NonFiniteError: a block's outputs overflow the model's dtype; the error names the block.
            UnsupportedModelError: the model has forward hooks that would make the patch wrong.
            ValueError: a shape, a mask or a span does not fit; there are more tokens than the model
                has positions; ``model_inputs`` are given although some tokens stay; or images come
                without the processor's ``mm_token_type_ids``, and the model numbers their tokens by
                them.
            TypeError: ids or a mask are not a tensor, ``keep_first`` is no integer, or the model
                does not accept one of ``model_inputs``.
        """
        self.attached_model.attachment.check_outside()
        self.attached_model.require_attached()
        sequences = assemble(
            context_ids,
            _either("kept_ids", kept_ids, "input_ids", input_ids),
            context_mask=context_mask,
            kept_mask=_either("kept_mask", kept_mask, "attention_mask", attention_mask),
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
        """Compute the implicit learning dynamics: the patches for the context's first 0, 1, … n
        tokens after those that stay. They form a trajectory ``W_i`` of every changed parameter.

        The kept tokens follow directly after the tokens absorbed so far, also in their positions.

        Args:
            context_ids: (B, keep_first + n) int64, contexts of one length. The other arguments are
                those of :meth:`compute`.
            layers: store the factors of these blocks; all by default. Patches of only some blocks
                cannot be replayed.

        Returns:
            The trajectory of every parameter, stored as vectors, with its steps, gradients and
            norms. See :class:`icl_patch.analysis.dynamics.Trajectory`.

        Raises:
            ControllabilityError, NonFiniteError, ValueError: as :meth:`compute`; ValueError also if
                ``layers`` are none, or not in order.
            TypeError: as :meth:`compute`, or ``layers`` is not a slice.

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
            patch: from :meth:`compute` or :meth:`ContextPatch.load`, for this model.
            kept_mask: (B, T) bool; the patch's by default.
            input_ids, attention_mask: transformers' names for ``kept_ids`` and ``kept_mask``.
            model_inputs: not accepted; the patch includes the effect of the context's inputs.

        Returns:
            Logits (B, T, V) in the model's dtype.

        Raises:
            FingerprintMismatch: the patch is of another model or tokenizer.
            PatchFormatError: the patch names tokens, positions or experts that the model lacks, or
                its factors do not fit.
            NonFiniteError: a block's outputs overflow the model's dtype; the error names the block.
            UnsupportedModelError: the effect of the model's forward hooks has changed since the
                patch was computed.
            ReplayMismatch: this machine rounds differently from the one that made the patch, for
                example on another processor, so far that the patch has another effect. If only some
                bits of an exact patch differ, there is an
                :class:`icl_patch.errors.ExactnessWarning` instead.
            ValueError: the tokens are not those of the patch, or the patch is a part that cannot be
                replayed.
            TypeError: ``model_inputs`` are given, or ``patch`` is not a patch.
        """
        kept_ids = _either("kept_ids", kept_ids, "input_ids", input_ids)
        kept_mask = _either("kept_mask", kept_mask, "attention_mask", attention_mask)
        if not isinstance(patch, ContextPatch):
            raise TypeError(f"expected a ContextPatch, got {type(patch).__name__}")
        check_tensor("kept_ids", kept_ids)
        check_inputs(self.model, model_inputs.keys() & OUTPUTS)
        if model_inputs:
            raise TypeError(
                f"expected only kept tokens, got {', '.join(model_inputs)} too: leave it out. The"
                " patch includes its prefix and the effect of all inputs of compute"
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
        """Within this context one token's patch changes the model's weights, for every token that
        the model gets::

            patch = ContextPatch.load("patch.safetensors", model)
            with patcher.applied(patch) as changed:
                changed.generate(**tokenizer("...", return_tensors="pt"))

        The change is right only for the token, history and position that it was computed for. With
        ``token=None`` each kept token has its own change, and a call is a replay. This is meant for
        tools that call the model themselves::

            with patcher.applied(patch, token=None):
                model(patch.kept_ids, position_ids=patch.position_ids)

        All threads see the changes, as they would see changed weights. Until the context ends,
        other calls of this patcher and copies of the model raise an error.

        Args:
            patch: a patch of this model.
            row, token: the kept token whose change is applied; by default the last token of the
                first row. With ``token=None`` every kept token of every row has its own change.
                Then call the model with all of them at once, with a cache of ``patch.prefix_ids``
                if tokens stay in front.

        Raises:
            FingerprintMismatch: the patch is of another model or tokenizer.
            UnsupportedModelError: a token is given and the model has experts; the patch changes
                only the experts that this token chose. With ``token=None``: the model counts
                windows, chunks or positions through the context, so a call would not be a replay.
            ValueError: a patch is applied already, some layers of this one are missing, or there is
                no such row or token.
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
    ) -> Iterator[sampling_loop.GenerationStep]:
        """Generate with weights that are patched anew for every token, which then runs alone.

        At each step the patch absorbs everything before the current token. The first current token
        is the last one of the context. Tokens are chosen and rows end as in ``model.generate``: the
        model's generation configuration applies, and logits processors and stopping criteria are
        transformers' own. A row that has ended is padded while others continue; without an
        end-of-sequence token it continues, too, as there. The iterator ends with the last row.

        Args:
            context_ids: (B, C) int64, left-padded.
            context_mask: (B, C) bool, True = token. By default as in ``model.generate``: the
                padding id is no token, unless it also ends a row.
            input_ids, attention_mask: transformers' names for these two:
                ``generate(**tokenizer(prompt, return_tensors="pt"))``.
            max_new_tokens: the maximum number of steps; by default that of the generation
                configuration, else 64, or less if the model has fewer positions left. The last new
                token is not run, and needs no position.
            streamer: gets the prompt at once, and each token when it is chosen.
            keep_first: as in :meth:`compute`. Steps that keep tokens run two passes.
            mode: how a step runs the rows with the context and the rows without it:
                ``"two_pass"``: the unmodified model runs, then the current token alone. It works
                with every update. Models with forward hooks and a few others need it. Its exact
                steps are bit-identical to the unmodified model.
                ``"shared_cache"``: one pass. Both kinds of rows share the cache of the context, and
                are separate from each attention's output to the block's end. Not every model
                allows it.
                ``"two_stream"``: one pass over the same cache, with separate rows from the first
                layer on. More models allow it; it is up to 1.2 times as slow. In bf16 and fp16 its
                replays have the bits of its steps.
                Exact steps of one pass are bit-identical to the same model with batch-invariant
                functions in its steps (:func:`icl_patch.batch_invariant` without its attention of
                several tokens). In fp32 this is as close to the model.
                ``"auto"``: the fastest of these that the update and the model allow. Mixtures of
                experts in bf16 and fp16 use two streams unless the update is exact, because replays
                of a shared cache may choose other experts there. ``GenerationStep.mode`` says how a
                step ran.
            compile: ``"auto"``: for 16 tokens or more, record the first step as a program
                (:mod:`icl_patch.generation.step_program`). Later steps run it: they have the same
                bits in less than half of the host's time. :attr:`step_source` shows it. On CUDA the
                third step captures the program as a CUDA graph, and later steps replay the graph.
                If a step cannot be recorded or captured, it runs without the program or graph, and
                a warning says why.
                False: run the model's own code in every step.
                True: compile the program, which takes seconds to minutes at the first token; on
                CUDA, capture the compiled program as a CUDA graph. This needs a mode of one pass,
                so it excludes models with forward hooks. A compiled exact step has the bits of its
                replay.
                Another generation with as many rows and about as many tokens
                (:func:`icl_patch.generation.reusable_step.bucketed_capacity`) reuses the program or
                compiled step. Its attention runs over a static cache, so the logits are those of
                ``compile=False`` up to rounding.
            arguments: any of ``model.generate``: ``generation_config``, ``do_sample``,
                ``temperature``, ``eos_token_id``, ``logits_processor``, ``stopping_criteria``,
                ``stop_strings``, further inputs of the model … Settings of the model's generation
                configuration apply too, except its choice of cache: the patcher has its own.

        Returns:
            An iterator of :class:`icl_patch.generation.sampling_loop.GenerationStep`, one for
            every new token. You may abandon it at any time. Between two steps it holds no lock, and
            other threads may use the patcher. It replays the first exact step and every 64th after
            it.

        Raises:
            UnsupportedModelError: this model or its forward hooks do not allow ``mode`` or
                ``compile``; or hooks, modules or settings have changed after the first step, in one
                pass.
            ValueError, ControllabilityError, NonFiniteError: as :meth:`compute`. ValueError also if
                there are more tokens than the model has positions, if a cache is given, if there is
                no mask and a row has the padding id behind a token, if ``keep_first`` comes with a
                mode of one pass, or if settings such as ``num_beams`` ask for a choice of tokens
                that is neither greedy nor sampling.
            TypeError: as :meth:`compute`; or ``inputs_embeds`` are given, or outputs are asked for.
        """
        self.attached_model.attachment.check_outside()
        check_compile(compile)
        context_ids = _either("context_ids", context_ids, "input_ids", input_ids)
        context_mask = _either("context_mask", context_mask, "attention_mask", attention_mask)
        return sampling_loop.generate(
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
        """The Python source of the last program that :meth:`generate` recorded: what happens to a
        token, with a line for each operator and a heading for each block. None if no step has been
        recorded, or the last one has no program.
        """
        return next(iter(self.plans.sources), None)

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
        """Answer a question about a context, both given as text; return the answer and its patch::

            with ContextPatcher(model, tokenizer=tokenizer) as patcher:
                answer = patcher.ask("Mars has two moons. ", "The moons of Mars are")
                patcher.forward(answer.patch.kept_ids, answer.patch)  # again, without the context
                patcher.ask(question="Who are you?", system="Your name is Pip.")  # in a chat

        Every token of the answer comes from freshly patched weights, as in :meth:`generate`.

        Args:
            context, question: read as one text, ``context + question``. The patch absorbs its
                tokens up to the question. In a chat the question may be a list of messages,
                ``[{"role": "user", "content": ...}, ...]``.
            system: a chat's system message, in place of ``context``. The patch absorbs it and
                everything that the chat template writes before it.
            chat: put the context at the beginning of the user's (first) message of a chat. See
                :func:`icl_patch.models.prompts.make_prompt`.
            keep_first: as in :meth:`compute`: how many of the prompt's first tokens stay; 1 keeps
                ``<bos>``.
            mode: as for :meth:`generate`. The default is ``"two_pass"``, which also computes the
                answer's patch; with ``compile`` it is ``"auto"``.
            max_new_tokens, streamer, compile, arguments: as for :meth:`generate`, but for one
                answer and without further inputs of the model. By default an answer in a chat ends
                with the assistant's turn; see :func:`icl_patch.models.ends.answer_ends`.

        Returns:
            :class:`icl_patch.generation.answering.Answer`: the text, its tokens, and one patch for
            all tokens of the question and the answer.

        Raises:
            ValueError: the patcher has no tokenizer or a slow one; the tokenizer has no chat
                template, or its template refuses the messages; a text has no tokens; or as
                :meth:`generate`.
            TypeError: the question is missing or not a text, or inputs of the model are given.
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
