"""Exact steps in the two arithmetics of ``generate``, each compared with the run that it should
equal bit for bit.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch import metrics
from icl_patch.errors import UnsupportedModelError
from icl_patch.evaluation.baseline import BaselineRun, baseline, in_one_pass
from icl_patch.generation.decoding import decode_one_token, start_decoding
from icl_patch.generation.plans import StepPlans
from icl_patch.invariance.arithmetic import BATCH_INVARIANT, NATIVE
from icl_patch.layers.device_hooks import has_accelerate_hooks
from icl_patch.models.forward import media_positions
from icl_patch.models.ranks import ranks_of
from icl_patch.patch.context_patch import PatchReport
from icl_patch.tolerances import SIXTEEN_BITS

REFERENCES = {
    NATIVE: "the unmodified model",
    BATCH_INVARIANT: "the model on batch-invariant functions",
}

# A copy in fp32 up to this size is worth its memory: 0.5B parameters.
_MAX_FP32_BYTES = 2**31


@dataclass(frozen=True)
class ExactSteps:
    """Exact steps in one arithmetic, along the tokens of :func:`icl_patch.verify`.

    Attributes:
        arithmetic: ``"model"`` or ``"batch_invariant"``, as for ``generate``. reference: the run
            that promises to have the same bits.
        reason: why nothing was measured; every number is None then.
        bit_identical: share of steps at which the replay has all bits of the reference's logits.
        token_match: share of steps at which the replay chooses the unmodified model's token.
        linf_max, linf_max_fp32: largest difference of the replays' logits to those of the
            unmodified model, and to those of the model in fp32; the second for models in bf16 and
            fp16 of up to 0.5B parameters only.
        reader_error_max, correction_max, misses: as the patches report them.
        tokens_taken_twice: tokens that needed one more pass because a block missed its target.
    """

    arithmetic: str
    reference: str
    reason: str | None = None
    bit_identical: float | None = None
    token_match: float | None = None
    linf_max: float | None = None
    linf_max_fp32: float | None = None
    reader_error_max: float | None = None
    correction_max: float | None = None
    misses: int | None = None
    tokens_taken_twice: int | None = None

    def keeps_promise(self, rounding: float) -> bool:
        """Whether all steps are bit-identical, with reader errors and corrections of at most
        ``rounding``; also if nothing was measured.
        """
        sizes = (self.reader_error_max, self.correction_max)
        small = all(size is not None and size <= rounding for size in sizes)
        return self.reason is not None or (self.bit_identical == 1.0 and small)


Replay = tuple[Tensor, PatchReport, int]
"""A step's replayed logits (B, V), its patch's report and number of passes."""


def one_pass_replays(
    plans: StepPlans, run: BaselineRun, on_step: Callable[[int], None]
) -> list[Replay] | str:
    """The steps of ``generate`` in one pass along the tokens of a run, or why there are none.

    on_step: called with the number of each step.
    """
    if run.keep_last or run.keep_first:
        return "several tokens that stay take two passes"
    try:
        plan = plans.choose(one_pass=True)
    except UnsupportedModelError as error:
        return str(error)
    width, steps = run.ids.shape[1], run.tokens.shape[1]
    attached = plans.attached
    further: dict[str, Any] = dict(run.inputs)
    media = media_positions(attached.model, run.ids, run.mask, further)
    state = start_decoding(attached, plan, run.ids, run.mask, width + steps, media=media, **further)
    replays = []
    for number, token_ids in enumerate(torch.cat([run.ids[:, -1:], run.tokens], 1).T[:-1]):
        patch = decode_one_token(state, token_ids).make_patch()
        assert patch.report is not None
        replays.append((attached.replay_logits(patch)[:, -1], patch.report, patch.passes))
        on_step(number + 1)
    return replays


def in_both_arithmetics(
    model: PreTrainedModel,
    run: BaselineRun,
    two_passes: list[Replay],
    one_pass: list[Replay] | str,
) -> list[ExactSteps]:
    """Compare the replays in each arithmetic with their reference, the unmodified model and the
    model in fp32.
    """
    fp32 = _fp32_logits(model, run)

    def measured(arithmetic: str, replays: list[Replay] | str) -> ExactSteps:
        if isinstance(replays, str):
            return ExactSteps(arithmetic, REFERENCES[arithmetic], replays)
        every, reports, passes = zip(*replays, strict=True)
        reference, taken_twice = run.logits, 0
        if arithmetic == BATCH_INVARIANT:
            inputs = run.ids, run.mask, len(replays), 0, run.inputs, run.tokens
            reference = baseline(model, *inputs, arithmetic).logits
            taken_twice = len(run.ids) * sum(count > 1 for count in passes)
        logits, counted = torch.stack(every, 1)[run.counted], run.counted
        # torch's maximum, unlike Python's, keeps NaN
        errors = torch.stack([report.reader_error.max() for report in reports])
        corrections = torch.stack([report.correction.max() for report in reports])
        return ExactSteps(
            arithmetic,
            REFERENCES[arithmetic],
            bit_identical=float(metrics.bit_identical(logits, reference[counted]).double().mean()),
            token_match=float(metrics.same_argmax(logits, run.logits[counted]).double().mean()),
            linf_max=float(metrics.linf(logits, run.logits[counted]).max()),
            linf_max_fp32=None
            if fp32 is None
            else float(metrics.linf(logits, fp32[counted]).max()),
            reader_error_max=float(errors.max()),
            correction_max=float(corrections.max()),
            misses=sum(int(report.misses.sum()) for report in reports),
            tokens_taken_twice=taken_twice,
        )

    return [measured(NATIVE, two_passes), measured(BATCH_INVARIANT, one_pass)]


def _fp32_logits(model: PreTrainedModel, run: BaselineRun) -> Tensor | None:
    """The logits (B, steps, V) of a copy of the model in fp32, in one pass over a run's tokens;
    None if the model is in fp32 or wider, too large, quantised, spread over devices or split.
    """
    weights = list(model.parameters())
    plain = all(type(x) is nn.Parameter and x.dtype == model.dtype for x in weights)
    size = 4 * sum(x.numel() for x in weights)
    if model.dtype not in SIXTEEN_BITS or not plain or size > _MAX_FP32_BYTES:
        return None
    if has_accelerate_hooks(model) or ranks_of(model).size > 1:
        return None
    wide: Any = copy.deepcopy(model)
    inputs = {name: x.float() if x.is_floating_point() else x for name, x in run.inputs.items()}
    return in_one_pass(wide.float(), replace(run, inputs=inputs))
