"""Fitting a static patch: the call, its checks, and the patches that it refuses to return."""

import copy
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.errors import HarmfulPatchError, StaticPatchWarning, UnsupportedModelError
from icl_patch.layers.device_hooks import has_accelerate_hooks, input_device
from icl_patch.models.model_checks import check_eval
from icl_patch.models.prompts import Tokens
from icl_patch.patch.low_rank import LowRank
from icl_patch.static.answers import Answers, answered, ends_of
from icl_patch.static.examples import Example, as_ids, check_row, documents, preserved_texts
from icl_patch.static.matrices import find_matrices
from icl_patch.static.static_patch import StaticInfo, StaticPatch
from icl_patch.static.student import Student
from icl_patch.static.targets import StaticReport, measure, targets_of, targets_of_texts
from icl_patch.static.training import (
    HARMFUL_KL,
    Distillation,
    Progress,
    Training,
    first_factors,
)

_FITTING = threading.RLock()
_HELD_OUT_OF = 5  # one question and one text in five is held out
_MANY, _HELD_OUT_OF_MANY = 20, 10  # of more questions than these, one in ten,
_MOST_HELD_OUT = 32  # and no more than these


@contextmanager
def _taking_turns() -> Iterator[None]:
    """Fits wait for each other: each puts forwards of its own into its model."""
    with _FITTING:
        yield


@_taking_turns()
@torch.inference_mode(False)
def fit(
    model: PreTrainedModel,
    examples: Sequence[Example],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    held_out: Sequence[Example] = (),
    preserve: Sequence[Sequence[int]] | None = None,
    kappa: float = 1.0,
    parts: Iterable[str] = ("mlp",),
    rank: int = 8,
    first_block: int = 0,
    seconds: float = math.inf,
    distillation: Distillation | None = None,
    start: StaticPatch | None = None,
    max_new_tokens: int = 64,
    accept_worse: bool = False,
    answers: Answers | None = None,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> StaticPatch:
    """Fit one change of weights, with which the model answers without the context of the examples
    as it does with it. The low-rank factors minimise the mean KL(with context ‖ patched) over the
    answers' tokens, plus κ times KL(unpatched ‖ patched) over preserved texts.

    Fits run one after the other. No other thread may use the model during a fit.

    Args:
        model: a causal language model without experts and recurrent layers. Its weights do not
            change.
        examples: from :func:`icl_patch.static.examples`. If they have no answers, the model answers
            greedily with the context, in at most ``max_new_tokens`` tokens.
        tokenizer: the patch stores its fingerprint, and it encodes the default ``preserve`` texts.
        held_out: examples that measure the patch and decide on the best step; by default every
            fifth of up to 20 ``examples``, every tenth of more, at most 32.
        preserve: ids of texts on which the patched model should not change; by default a hundred
            short texts of many kinds. One in five is not fitted, only measured.
        kappa: the initial weight κ of the preserved texts; it grows while they move by more than a
            KL of 0.1.
        parts: the matrices that may change: those of the ``"mlp"``, those of ``"attention"``.
        rank: the rank of each change.
        first_block: the first block that may change. Leaving out blocks saves time and costs some
            quality.
        seconds: a time budget for the whole fit, which makes as many steps as the budget allows.
            The model's own answers count too, and are always completed: keep them as ``answers``.
        distillation: steps, learning rate and other settings of the training.
        start: a patch from which the training starts; its changes are truncated to ``rank``.
        max_new_tokens: the maximum length of an answer that the model gives.
        accept_worse: return the patch even if it is worse than none or moves preserved texts.
        answers: an empty dictionary, to which the fit adds the model's answers. A later fit of this
            model with the same questions and ``max_new_tokens`` reuses them.
        progress: called with (done, total) steps.
        say: called with a line of text about the time for the answers, once they have begun, and
            about each measurement.

    Returns:
        The patch, with a :class:`icl_patch.static.StaticReport`.

    Raises:
        HarmfulPatchError: the KL divergence on held-out questions is larger with the patch than
            without one, or that on preserved texts that were not fitted is above 0.2.
        UnsupportedModelError: a block of the model cannot have a static patch, or its weights are
            offloaded or created in inference mode.
        ValueError: there are no examples, or one is also in ``held_out``; an option does not fit;
            the rank is above that of a matrix; two examples want different answers to one prompt;
            activations are NaN; the model is in training mode; ``start`` changes other matrices; or
            ``seconds`` allows no step (the error names a number that suffices).
        FingerprintMismatch: ``start`` belongs to another model.
    """
    began = time.perf_counter()
    if not examples or not 0 <= kappa < math.inf or not seconds > 0:
        raise ValueError(
            f"expected examples, kappa ≥ 0 and a positive number of seconds, got {len(examples)}"
            f" examples, {kappa} and {seconds}"
        )
    if preserve is None and tokenizer is None:
        raise ValueError(
            "expected a tokenizer for the texts to preserve that come with the package: give one,"
            " or texts of your own as preserve=static.documents(...), or preserve=() for none"
        )
    check_eval(model.modules())
    options = distillation or Distillation()
    _check_in_memory(model, options.dtype)
    matrices = find_matrices(model, parts, first_block)
    most = min(map(min, matrices.values()))
    if rank not in range(1, most + 1):
        raise ValueError(
            f"expected a rank from 1 to {most}, the largest that every matrix has, got {rank!r}"
        )
    known = {} if start is None else _factors_of(start, model, matrices)
    if preserve is None and tokenizer is not None:
        preserve = documents(model, tokenizer, preserved_texts())
    texts = [] if preserve is None else [as_ids("a text to preserve", x) for x in preserve]
    _check_rows(model, examples, held_out, texts)
    answering = time.perf_counter()
    every = answered(model, [*examples, *held_out], max_new_tokens, answers, say)
    answering = time.perf_counter() - answering
    rows = _split(model, examples, held_out, every, texts)
    notes = _unknown(rows, max_new_tokens)
    for note in notes:
        warnings.warn(note, StaticPatchWarning, stacklevel=4)  # behind two decorators
    counts = (len(x) for x in (rows.fitted, rows.held_out, rows.fitted_texts, rows.held_texts))
    say("{} questions to fit, {} held out; {} texts to preserve, {} held out".format(*counts))
    dtype = options.dtype_for(model)
    student = Student(model)
    held = targets_of(student, rows.held_out)
    held_texts = targets_of_texts(student, rows.held_texts)
    measuring = time.perf_counter()
    without = measure(student, held)
    measuring = (time.perf_counter() - measuring) * (1 + len(held_texts) / max(len(held), 1))
    trained = student if dtype == model.dtype else Student(in_dtype(model, dtype))
    training = Training(
        trained,
        first_factors(matrices, rank, options.seed, known, input_device(model)),
        questions=targets_of(trained, rows.fitted),
        texts=targets_of_texts(trained, rows.fitted_texts) if kappa else [],
        held_out=held,
        held_texts=held_texts,
        kappa=kappa,
        options=options,
        say=say,
    )
    before = time.perf_counter() - began
    training.run(began + seconds - 1.5 * measuring, progress)
    if not training.step:
        raise ValueError(_too_short(seconds, before - answering, answering, measuring, training))

    info = StaticInfo.of(model, tokenizer, "distill", rows.front)
    patch = StaticPatch(info, training.best[2])
    with patch.applied(model, check_front=False):
        quality, preserved = measure(student, held), measure(student, held_texts)
    report = StaticReport(
        held_out=quality,
        without=without,
        preserved=preserved,
        fitted=len(rows.fitted),
        steps=training.step,
        best_step=training.best[1],
        seconds=time.perf_counter() - began,
        nbytes=patch.nbytes,
        warnings=notes,
    )
    if not accept_worse:
        _check_harmless(report)
    return replace(patch, report=report)


def _check_in_memory(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Raises UnsupportedModelError for a model that is offloaded, without gradients through its
    weights, or spread over devices if it were to be copied into ``dtype``.
    """
    away = [name for name, weight in model.named_parameters() if weight.is_meta]
    if away:
        raise UnsupportedModelError(
            f"expected a model in memory for a fit, got one with {away[0]} offloaded: a gradient"
            " step keeps all the weights that it reads, so offloading saves nothing. Spread it over"
            " devices with device_map; a patch that was fitted elsewhere can be applied offloaded"
        )
    if any(weight.is_inference() for weight in model.parameters()):
        raise UnsupportedModelError(
            "expected a model for a fit that was loaded outside torch.inference_mode(), got weights"
            " created in it, through which there are no gradients: load it outside, or fit"
            " copy.deepcopy(model), made outside"
        )
    if has_accelerate_hooks(model) and dtype not in (None, model.dtype):
        raise UnsupportedModelError(
            f"expected a fit in {model.dtype}, the dtype of a model that accelerate has spread over"
            f" devices, got {dtype}: load it in that dtype"
        )


def _factors_of(
    start: StaticPatch, model: PreTrainedModel, matrices: Iterable[str]
) -> dict[str, LowRank]:
    """The factors of a patch, if this fit changes all of its matrices."""
    start.check_model(model)
    others = sorted(set(start.changes) - set(matrices))
    if others:
        raise ValueError(
            f"expected a start that changes the matrices of the fit, got one that changes"
            f" {others[0]} too: give its parts and its first_block"
        )
    return start.changes


@dataclass(frozen=True)
class _Rows:
    """Answered examples and texts, to fit and held out.

    endless: how many of the model's own answers did not end; end_is_guessed: whether one of these
        may have an end that is not known.
    """

    fitted: list[Example]
    held_out: list[Example]
    fitted_texts: list[Tokens]
    held_texts: list[Tokens]
    front: Tokens
    endless: int
    end_is_guessed: bool


def _check_rows(
    model: PreTrainedModel,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    texts: Sequence[Tokens],
) -> None:
    """Raises ValueError for texts that are empty or no ids of the model's, or held-out prompts that
    are among the examples; before the model answers, which takes most of the time.
    """
    if () in texts:
        raise ValueError("expected at least one id in each text to preserve, got none in one")
    for text in texts:
        check_row(model, text, 1)
    prompts = {example.without for example in examples}
    if known := sum(example.without in prompts for example in held_out):
        raise ValueError(
            f"expected held-out prompts that are not among the examples, got {known} that are"
        )


def _split(
    model: PreTrainedModel,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    asked: list[Example],
    texts: Sequence[Tokens],
) -> _Rows:
    """Hold out some of the prompts, if none are given, and every fifth text.

    asked: the examples and those held out, answered.
    """
    own = list(dict.fromkeys(texts))  # one that is held out must not be fitted too
    fitted, held = asked[: len(examples)], asked[len(examples) :]
    number = {ids: i for i, ids in enumerate(dict.fromkeys(x.without for x in fitted))}
    endless = [
        given
        for given, x in zip((*examples, *held_out), asked, strict=True)
        if given.answer is None and (x.answer or ())[-1] not in ends_of(model, x.end)
    ]
    if not held and len(number) > 1:
        every = _HELD_OUT_OF if len(number) <= _MANY else _HELD_OUT_OF_MANY
        every = max(min(every, len(number)), math.ceil(len(number) / _MOST_HELD_OUT))
        held = [x for x in fitted if number[x.without] % every == every - 1]
        fitted = [x for x in fitted if number[x.without] % every != every - 1]
    every = min(_HELD_OUT_OF, max(len(own), 2))
    held_texts = own[every - 1 :: every]
    fitted_texts = [x for i, x in enumerate(own) if i % every != every - 1]
    first = {ids[0] for x in asked for ids in (x.with_context, x.without)}
    front = tuple(first) if len(first) == 1 else ()
    guessed = any(x.end_is_guessed or not x.end for x in endless)
    return _Rows(fitted, held, fitted_texts, held_texts, front, len(endless), guessed)


def _unknown(rows: _Rows, max_new_tokens: int) -> tuple[str, ...]:
    """Notes on the properties of the patch that the fit cannot measure."""
    found = []
    if not rows.held_out:
        found.append(
            "one question: nothing is held out, so whether the patch answers any other is not known"
        )
    if not rows.held_texts:
        found.append(
            "no texts to preserve are held out, so whether the patch changes answers to other"
            " prompts is not known"
        )
    if not rows.front:
        found.append(
            "the prompts with the context and without it begin with different tokens. Models give"
            " most of their attention to the first token, and a fit cannot replace it: let all"
            " prompts begin with one token, such as <bos>"
        )
    if rows.endless:
        cure = "the token that ends an answer as end, or " if rows.end_is_guessed else ""
        found.append(
            f"{rows.endless} answer{'s' * (rows.endless > 1)} did not end within {max_new_tokens}"
            f" tokens: give {cure}more max_new_tokens"
        )
    return tuple(found)


def _too_short(
    seconds: float, preparing: float, answering: float, measuring: float, training: Training
) -> str:
    """The seconds that are enough for all steps, with the model's answers and without them, by the
    times of this fit's parts.
    """
    step, options = training.seconds_of_step(), training.options
    rest = preparing + options.steps * step + (2 + options.steps / options.check_every) * measuring
    needed, without = (math.ceil(1.1 * time) for time in (answering + rest, rest))
    again = f" With the answers of this one (answers=) {without} suffice." if answering > 1 else ""
    return (
        f"expected enough seconds for a step, got {seconds:g}: {needed} are enough for all"
        f" {options.steps} steps. The model's answers took {answering:.1f} s, targets and a"
        f" measurement {preparing:.1f} s, and a step takes {step:.2g} s.{again}"
    )


def _check_harmless(report: StaticReport) -> None:
    """Raises HarmfulPatchError if the report shows harm."""
    held_out, without, preserved = report.held_out, report.without, report.preserved
    if held_out is not None and without is not None and held_out.kl > without.kl:
        raise HarmfulPatchError(
            "expected a patch that is better than none, got one with a KL divergence of"
            f" {held_out.kl:.3f} nats a token on {held_out.questions} held-out questions, where"
            f" without it there are {without.kl:.3f}: give more questions, contexts that share one"
            " instruction, or a smaller learning rate. accept_worse=True returns it all the same",
            report,
        )
    if preserved is not None and preserved.kl > HARMFUL_KL:
        raise HarmfulPatchError(
            "expected a patch that leaves other texts as they are, got one with a KL divergence of"
            f" {preserved.kl:.3f} nats a token on {preserved.questions} texts that it was not"
            f" fitted on (at most {HARMFUL_KL}): give a larger kappa, a smaller learning rate, or"
            " more texts to preserve. accept_worse=True returns it all the same",
            report,
        )


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of the model with weights in this dtype. Buffers, such as rotary frequencies, keep
    their own dtype.
    """
    weights: dict[int, Any] = {
        id(x): torch.nn.Parameter(x.detach().to(dtype), requires_grad=False)
        for x in model.parameters()
    }
    return copy.deepcopy(model, weights)
