"""Fitting a static patch: the call, its checks, and what it refuses to return."""

import copy
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.errors import HarmfulPatchError, StaticPatchWarning
from icl_patch.models.language_model import (
    check_length,
    check_vocabulary,
    text_config,
    vocabulary,
)
from icl_patch.models.prompts import Tokens
from icl_patch.recording.attached_model import check_training
from icl_patch.static.examples import (
    Example,
    answered,
    common_front,
    documents,
    preserved_texts,
)
from icl_patch.static.low_rank import LowRank
from icl_patch.static.matrices import Matrix, find_matrices
from icl_patch.static.report import StaticReport
from icl_patch.static.static_patch import StaticInfo, StaticPatch
from icl_patch.static.student import Student
from icl_patch.static.targets import measure, targets_of, targets_of_texts
from icl_patch.static.training import (
    HARMFUL_KL,
    Checkpoint,
    Distillation,
    Progress,
    Training,
    first_factors,
)

_HELD_OUT_OF = 5  # one question and one text in five is held out,
_MOST_HELD_OUT = 32  # of many questions no more than these


@dataclass(frozen=True)
class Plan:
    """The memory and time of a fit, estimated before its first step.

    questions, texts: to train on; tokens: of a step; steps: at most; nbytes: of memory beside the
    model; seconds: of the steps' matrix products alone, at the speed that one product reaches here.
    """

    questions: int
    texts: int
    tokens: int
    steps: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.questions} questions and {self.texts} preserved texts, {self.steps} steps of"
            f" {self.tokens} tokens: at least {self.seconds:.0f} s, {self.nbytes / 1e6:,.0f} MB"
            " beside the model"
        )


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
    first_block: int | None = None,
    seconds: float = math.inf,
    distillation: Distillation | None = None,
    start: StaticPatch | None = None,
    state: str | os.PathLike[str] | None = None,
    max_new_tokens: int = 64,
    accept_worse: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    progress: Progress | None = None,
) -> StaticPatch:
    """One change of weights with which the model, without the context of the examples, answers as
    it does with it: low-rank factors with the smallest mean KL(with context ‖ patched) over the
    answers' tokens, plus κ times KL(unpatched ‖ patched) over preserved texts.

    Args:
        model: a causal language model without experts and recurrent layers. Its weights stay as
            they are.
        examples: of :func:`icl_patch.static.examples`; where they have no answers, the model
            answers greedily with the context, with at most ``max_new_tokens``.
        tokenizer: its fingerprint goes into the patch; it encodes the texts that are preserved by
            default.
        held_out: examples on which the patch is measured, and by which the best step is chosen; by
            default every fifth of ``examples``, at most 32.
        preserve: ids of texts on which the patched model is to stay as it is; by default a hundred
            short texts of many kinds. One in five is not fitted, but measured.
        kappa: the weight κ of the preserved texts at the beginning; it grows while they move by
            more than a KL of 0.1.
        parts: the matrices that may change: the ``"mlp"``'s, ``"attention"``'s.
        rank: of each change.
        first_block: the first block that is changed; by default a third of the blocks stays as it
            is. What lies below is computed once.
        seconds: a budget of time for the whole fit; it makes as many steps as fit.
        distillation: steps, learning rate and the like.
        start: a patch from which the training starts; its changes are cut to ``rank``.
        state: a folder; checkpoints are written to it, and a stopped fit continues from them.
        max_new_tokens: of an answer that the model gives.
        accept_worse: return the patch even if it is worse than none, or moves preserved texts.
        on_plan: called with the :class:`Plan` before the first step.
        progress: called with (done, total) steps.

    Returns:
        The patch, with a :class:`icl_patch.static.StaticReport`.

    Raises:
        HarmfulPatchError: on held-out questions the KL divergence is larger with the patch than
            without one, or that of preserved texts that were not fitted is above 0.2.
        UnsupportedModelError: the model has a block that cannot hold a static patch.
        ValueError: there are no examples, or one of ``held_out`` is among them; an option does not
            fit; the rank is above that of a matrix; two examples want different answers to one
            prompt; activations are NaN; the model is training with dropout; ``start`` changes other
            matrices; or ``state`` is of another fit.
        FingerprintMismatch: ``start`` is of another model.
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
    if state is not None and Path(state).exists() and not Path(state).is_dir():
        raise ValueError(f"expected state to be a folder, got the file {os.fspath(state)!r}")
    check_training(model, any(module.training for module in model.modules()))
    options = distillation or Distillation()
    matrices = find_matrices(model, parts, first_block)
    _check_rank(rank, matrices)
    known = {} if start is None else _factors_of(start, model, matrices)
    if preserve is None and tokenizer is not None:
        preserve = documents(model, tokenizer, preserved_texts())
    rows = _split(model, examples, held_out, preserve or (), max_new_tokens)
    notes = _unknown(rows, max_new_tokens)
    for note in notes:
        warnings.warn(note, StaticPatchWarning, stacklevel=3)
    student = Student(model)
    held, held_texts = (
        targets_of(student, rows.held_out),
        targets_of_texts(student, rows.held_texts),
    )
    measuring = time.perf_counter()
    without = measure(student, held)
    measuring = (time.perf_counter() - measuring) * (1 + len(held_texts) / max(len(held), 1))

    dtype = options.dtype_for(model)
    trained = student
    if dtype != model.dtype:
        copied: Any = copy.deepcopy(model)
        trained = Student(copied.to(dtype))
    cast = [
        [replace(target, hidden=target.hidden.to(dtype)) for target in targets]
        for targets in (held, held_texts)
    ]
    training = Training(
        trained,
        first_factors(matrices, rank, options.seed, known, model.device),
        first_block=min(matrix.block for matrix in matrices),
        questions=targets_of(trained, rows.fitted),
        texts=targets_of_texts(trained, rows.fitted_texts) if kappa else [],
        held_out=cast[0],
        held_texts=cast[1],
        kappa=kappa,
        options=options,
    )
    if on_plan is not None:
        on_plan(plan(training, copied=trained is not student))
    info = StaticInfo.of(model, tokenizer, "distill", rows.front)
    checkpoint = None
    if state is not None:
        checkpoint = Checkpoint(state, training, str(info.fingerprint))
        checkpoint.read(training)
    training.run(began + seconds - 1.5 * measuring, checkpoint, progress)

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


def _check_rank(rank: int, matrices: Sequence[Matrix]) -> None:
    most = min(min(matrix.shape) for matrix in matrices)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= most:
        raise ValueError(
            f"expected a rank from 1 to {most}, the largest that every matrix has, got {rank!r}"
        )


def _factors_of(
    start: StaticPatch, model: PreTrainedModel, matrices: Sequence[Matrix]
) -> dict[str, LowRank]:
    """The factors of a patch of this model, all of whose matrices may change."""
    start.check_model(model)
    others = sorted(set(start.changes) - {matrix.path for matrix in matrices})
    if others:
        raise ValueError(
            f"expected a start that changes the matrices of the fit, got one that changes"
            f" {others[0]} too: give its parts and its first_block"
        )
    return start.changes


@dataclass(frozen=True)
class _Rows:
    """Answered examples and texts, to fit and held out.

    repeated: how many examples have the prompt of another one, without its context.
    """

    fitted: list[Example]
    held_out: list[Example]
    fitted_texts: list[Tokens]
    held_texts: list[Tokens]
    front: Tokens
    repeated: int


def _split(
    model: PreTrainedModel,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    texts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> _Rows:
    """Hold out every fifth prompt, if none are given, and every fifth text."""
    if any(isinstance(text, str) for text in texts):
        raise ValueError("expected ids of texts to preserve, got text: static.documents gives them")
    if not all(len(text) for text in texts):
        raise ValueError("expected texts to preserve of at least one token each, got an empty one")
    for text in texts:
        ids = torch.tensor([text])
        check_vocabulary(model, ids, torch.ones_like(ids, dtype=torch.bool))
        check_length(model, len(text))
    asked = answered(model, [*examples, *held_out], max_new_tokens)
    fitted, held = asked[: len(examples)], asked[len(examples) :]
    number = {ids: i for i, ids in enumerate(dict.fromkeys(x.without for x in fitted))}
    if known := sum(example.without in number for example in held):
        raise ValueError(
            f"expected held-out prompts that are not among the examples, got {known} that are"
        )
    repeated = len(fitted) - len(number)
    if not held and len(number) > 1:
        every = max(min(_HELD_OUT_OF, len(number)), math.ceil(len(number) / _MOST_HELD_OUT))
        held = [x for x in fitted if number[x.without] % every == every - 1]
        fitted = [x for x in fitted if number[x.without] % every != every - 1]
    every = min(_HELD_OUT_OF, max(len(texts), 2))
    held_texts = [tuple(text) for text in texts[every - 1 :: every]]
    fitted_texts = [tuple(x) for i, x in enumerate(texts) if i % every != every - 1]
    front = common_front([ids for x in asked for ids in (x.with_context, x.without)])
    return _Rows(fitted, held, fitted_texts, held_texts, front, repeated)


def _unknown(rows: _Rows, max_new_tokens: int) -> tuple[str, ...]:
    """What will not be known of the patch."""
    found = []
    if not rows.held_out:
        found.append(
            "one question: nothing is held out, so whether the patch answers any other is not known"
        )
    if rows.repeated:
        found.append(f"{rows.repeated} questions are given twice, and count twice")
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
    endless = sum(len(x.answer or ()) == max_new_tokens for x in (*rows.fitted, *rows.held_out))
    if endless > len(rows.fitted) // 2:
        found.append(
            f"{endless} answers did not end within {max_new_tokens} tokens: give the token that"
            " ends an answer as end, or more max_new_tokens"
        )
    return tuple(found)


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


def plan(training: Training, copied: bool) -> Plan:
    """The plan of a training.

    Memory: the copy of the model, if there is one; factors, gradients, two moments and the best
    factors; the hidden states of all rows; and of one step the values that the changed blocks keep
    for the gradient, about 8 vectors as wide as the residual stream and 5 as wide as the MLP, and
    the logits. Seconds: 2 operations a weight and token forward, as many backward.
    """
    model, options = training.student.model, training.options
    width, shapes = int(getattr(text_config(model), "hidden_size")), training.shapes  # noqa: B009
    element, weights = model.dtype.itemsize, sum(p.numel() for p in model.parameters())
    questions = min(options.batch_tokens, options.batch_size * training.longest(training.questions))
    texts = min(
        options.batch_tokens, options.preserve_batch_size * training.longest(training.texts)
    )
    step, rows = questions + texts, [*training.questions, *training.texts]
    changed = len(training.student.layers) - training.first_block
    factors = sum(p.numel() for p in training.parameters)
    hidden = sum(len(x.ids) for x in rows) * width * element * 2
    inner = max(k for _, k in shapes)
    kept = changed * step * (8 * width + 5 * inner) * element + 5 * 4 * step * vocabulary(model)
    nbytes = 5 * 4 * factors + hidden + kept + (weights * element if copied else 0)
    share = changed / len(training.student.layers)
    operations = 4.0 * weights * share * step * options.steps
    return Plan(
        len(training.questions),
        len(training.texts),
        step,
        options.steps,
        nbytes,
        operations / _speed(model),
    )


def _speed(model: PreTrainedModel) -> float:
    """Operations a second of a matrix product in the model's dtype on its device."""
    x = torch.randn(512, 512, device=model.device).to(model.dtype)
    float((x @ x).sum())  # waits for the device
    began = time.perf_counter()
    for _ in range(3):
        y = x @ x
    float(y.sum())
    return 3 * 2 * 512**3 / (time.perf_counter() - began)
