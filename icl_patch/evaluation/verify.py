"""The papers' protocol: does the patched model without a context match the model with it?

1. The unmodified model generates greedily with its context; its logits at every step are the
   baseline.
2. At every step the patch is recomputed from the prompt and everything generated, and the current
   token is *replayed* with it: no context, no cache, no second stream.
3. The two are compared at every step. Where the replay would choose another token, generation
   continues along the baseline's.

Source: Goldwaser et al. (2025), section 4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from icl_patch import metrics
from icl_patch.evaluation.baseline import (
    BaselineRun,
    baseline,
    extended,
    in_one_pass,
    sequences_at,
)
from icl_patch.evaluation.exact_steps import (
    ExactSteps,
    Replay,
    in_both_arithmetics,
    one_pass_replays,
)
from icl_patch.evaluation.loading import default_context, encode_inputs, load_model
from icl_patch.models.ends import answer_ends
from icl_patch.models.forward import check_last_type
from icl_patch.models.language_model import check_length, check_vocabulary
from icl_patch.models.positions import check_one_side
from icl_patch.patch.serialization import check_update
from icl_patch.patcher import ContextPatcher
from icl_patch.recording.attached_block import BlockActivations
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.recording.passes import Computation
from icl_patch.recording.sequences import check_context, switches
from icl_patch.tolerances import noise_limit

# Limit of the reader error and of the exact update's correction, in units of the dtype's epsilon.
# In fp32 corrections of Gemma 3 270M need 26, in the worst of 5,825 tokens; so 64 leaves room.
ROUNDINGS = {"float32": 64, "bfloat16": 16, "float16": 16}
# Dtypes in which direct and stable promise an error limit.
_PROMISED = ("float32", "float64")
# A larger noise floor is not rounding: the model contradicts itself from call to call. In bf16 and
# fp16 a different choice of experts reaches tenths.
_MAX_NOISE_FLOOR = {"float32": 0.01, "float64": 0.01, "bfloat16": 1.0, "float16": 1.0}


@dataclass(frozen=True)
class VerifiedToken:
    """One generated token: the baseline's choice and the replay's errors, relative to max |logit|.

    ``match``: the replay chooses the same token.
    """

    token_id: int
    match: bool
    bit_identical: bool
    linf: float
    tvd: float


@dataclass(frozen=True)
class VerifyReport:
    """The measurements of :func:`verify`.

    Attributes:
        passes: forward passes of the model for one patch.
        noise_floor: how much the unmodified model's logits vary (``linf_max``, ``tvd_max``) between
            B and 2B rows, and between one pass and token by token with a cache.
        reader_error_max: largest difference of the readers' outputs between the replay and the
            context run, relative to their largest element.
        blocks_bit_identical: share of (step, block) pairs with bit-identical block outputs.
        correction_max: largest correction that the exact update adds to the stable or direct one,
            relative to the block's output.
        misses: elements of block outputs that the exact update could not reproduce.
        experts_identical: share of (token, block) pairs with the same experts; None without
            experts.
        arithmetics: of an exact update, its steps in each arithmetic that ``generate`` has. All
            other attributes are those of ``"model"``.
        lengths: the number of tokens of each prompt's answer, its end included.
        steps: the tokens of the first answer, then of the second, and so on.
    """

    model: str
    family: str
    update: str
    dtype: str
    device: str
    prompts: int
    passes: int
    keep_last: int
    keep_first: int
    noise_floor: dict[str, float]
    reader_error_max: float
    blocks_bit_identical: float
    correction_max: float
    misses: int
    experts_identical: float | None
    arithmetics: list[ExactSteps]
    lengths: list[int]
    steps: list[VerifiedToken] = field(repr=False)

    def _of_steps(self, name: str) -> Tensor:
        return torch.tensor([getattr(step, name) for step in self.steps], dtype=torch.float64)

    @property
    def token_match(self) -> float:
        """Share of steps at which the replay chooses the baseline's token."""
        return float(self._of_steps("match").mean())

    @property
    def bit_identical(self) -> float:
        """Share of steps at which all logits are equal to the last bit."""
        return float(self._of_steps("bit_identical").mean())

    @property
    def limit(self) -> float:
        """The error allowed in fp32 and fp64, see :func:`icl_patch.tolerances.noise_limit`."""
        return noise_limit(self.noise_floor["linf_max"])

    @property
    def promises(self) -> bool:
        """Whether the update promises anything in this dtype."""
        return self.update == "exact" or self.dtype in _PROMISED

    @property
    def passed(self) -> bool:
        """Whether the update keeps its promise; in bf16 and fp16 direct and stable promise nothing.

        exact: every step and every block is bit-identical, in each arithmetic that the model
        allows. That alone would hold with unpatched readers, so the reader error and the correction
        must also be a few roundings at most.
        direct and stable in fp32, and every update in fp64: every token matches and errors are
        within the limit. Exact factors are fp64, and have no digits beyond those of an fp64 output.
        Any update: the chosen experts are the same, and the noise floor is small; a model that
        contradicts itself proves nothing.
        """
        return self.failure is None

    @property
    def failure(self) -> str | None:
        """The reason why :attr:`passed` is False, in words; None if it is True."""
        floor, largest = self.noise_floor["linf_max"], _MAX_NOISE_FLOOR[self.dtype]
        if not floor <= largest:
            return (
                f"the unmodified model contradicts itself: its logits differ by {floor:.2g}, and"
                f" {largest:.2g} is the limit, when only batching or caching changes"
            )
        if not self.promises:
            return None
        if self.experts_identical not in (None, 1.0):
            return "other experts were chosen than with the context"
        if self.update == "exact" and self.dtype != "float64":
            return self._failure_of_bits()
        if self.token_match != 1.0:
            return "a token differs"
        error = float(self._of_steps("linf").max())
        if not error <= self.limit:
            return f"logits differ by {error:.2g}, and {self.limit:.2g} is the limit"
        return None

    def _failure_of_bits(self) -> str | None:
        """The reason why an exact update fails, in words; None if it does not."""
        rounding = ROUNDINGS[self.dtype] * torch.finfo(getattr(torch, self.dtype)).eps
        if not self.bit_identical == self.token_match == self.blocks_bit_identical == 1.0:
            return "a bit differs"
        if not self.reader_error_max <= rounding:
            return f"a layer reads {self.reader_error_max:.2g} off, and {rounding:.2g} is the limit"
        if not self.correction_max <= rounding:
            return f"a correction is {self.correction_max:.2g}, and {rounding:.2g} is the limit"
        if not all(steps.keeps_promise(rounding) for steps in self.arithmetics):
            return "in one pass a bit differs, or a correction is larger than rounding"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
        errors = {
            f"{name}_{kind}": float(getattr(self._of_steps(name), kind)())
            for name in ("linf", "tvd")
            for kind in ("max", "median")
        }
        properties = ("token_match", "bit_identical", "limit", "passed", "failure")
        return {
            **asdict(self),
            **{name: getattr(self, name) for name in properties},
            **errors,
            "tokens": len(self.steps),
        }


def verify(
    model: PreTrainedModel | str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    context: str | Sequence[str] | Mapping[str, Tensor] | None = None,
    max_new_tokens: int = 50,
    update: str = "exact",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    keep_last: int = 0,
    keep_first: int = 0,
    chat: bool = False,
    system: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    name: str | None = None,
) -> VerifyReport:
    """Run the papers' protocol and report how well the patched model matches the one with context.

    Exact steps are measured in two passes and in one, each against its own reference
    (``VerifyReport.arithmetics``).

    Args:
        model: a model, a local folder or a hub id; None and "embedded" mean the embedded model.
        tokenizer: by default the one at ``model``, when that is a path or an id.
        context: one prompt or several; or a processor's output for text and images: ``input_ids``
            (B, T), ``attention_mask`` and the model's further inputs. Default: the paper's Mars
            prompt; for the embedded model its first held-out prompt.
        max_new_tokens: the largest number of steps. They stop where the longest answer ends, and
            of each answer its own tokens count. In a chat an answer ends with the turn, see
            :func:`icl_patch.models.ends.answer_ends`.
        update: ``"direct"``, ``"stable"`` or ``"exact"``.
        dtype, device: by default those of the model or of its files. A model object is copied
            before it is converted or moved.
        keep_last: tokens before the current one that stay in the reduced context.
        keep_first: as in :meth:`icl_patch.ContextPatcher.compute`.
        chat: a context of text is the user's message of a chat.
        system: the system message before it; the prompt is a chat then.
        progress: called with (steps done, steps in all).
        name: the model's name in the report; by default the path or id it was loaded from.

    Raises:
        UnsupportedModelError, ControllabilityError, NonFiniteError: as
            :class:`icl_patch.ContextPatcher`.
        ValueError: an argument does not fit.
    """
    if max_new_tokens < 1 or min(keep_last, keep_first) < 0:
        raise ValueError(
            f"expected max_new_tokens ≥ 1, keep_last ≥ 0 and keep_first ≥ 0, got {max_new_tokens},"
            f" {keep_last} and {keep_first}"
        )
    check_update(update)
    loaded, tokenizer = load_model(model, tokenizer, dtype, device)
    if context is None:
        context = default_context(loaded)
    ids, mask, inputs = encode_inputs(loaded, tokenizer, context, chat, system)
    check_context(ids, mask)
    lengths = mask.sum(1)
    if (shortest := int(lengths.min())) <= (stay := keep_first + keep_last + 1):
        raise ValueError(f"expected contexts of more than {stay} tokens, got one of {shortest}")
    check_length(loaded, int(lengths.max()), max_new_tokens - 1)
    check_one_side(loaded, lengths, max_new_tokens - 1)
    check_vocabulary(loaded, ids, mask)
    check_last_type(loaded, inputs)

    exact = update == "exact"
    ends = answer_ends(loaded, tokenizer, chat or system is not None)
    run = baseline(
        loaded, ids, mask, max_new_tokens, keep_last, inputs, ends=ends, keep_first=keep_first
    )
    steps = run.tokens.shape[1]
    count = steps * (2 if exact else 1)
    progress(0, count)
    floor = _noise_floor(loaded, run)
    with ContextPatcher(loaded, update, tokenizer=tokenizer) as patcher:
        attached = patcher.attached_model
        totals, replays = _replays(attached, run, lambda done: progress(done, count))
        if exact:
            one_pass = one_pass_replays(
                patcher.plans, run, lambda done: progress(steps + done, count)
            )
            progress(count, count)
    experts = totals["same_experts"]
    return VerifyReport(
        model=name or loaded.config.name_or_path or type(loaded).__name__,
        family=attached.family,
        update=update,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        prompts=len(ids),
        passes=replays[-1][2],
        keep_last=keep_last,
        keep_first=keep_first,
        noise_floor=floor,
        reader_error_max=float(totals["reader_error"].max()),
        blocks_bit_identical=float(totals["same_blocks"].double().mean()),
        correction_max=float(totals["correction"].max()),
        misses=int(totals["misses"].sum()),
        experts_identical=float(experts.double().mean()) if experts.numel() else None,
        arithmetics=in_both_arithmetics(loaded, run, replays, one_pass) if exact else [],
        lengths=run.lengths.tolist(),
        steps=_verified_tokens(run, totals),
    )


@torch.no_grad()
def _noise_floor(model: PreTrainedModel, run: BaselineRun) -> dict[str, float]:
    """The unmodified model against itself: 2B rows, and one pass over all tokens."""
    batch, steps = run.tokens.shape
    ids, mask, tokens = (x.repeat(2, 1) for x in (run.ids, run.mask, run.tokens))
    twice = {name: torch.cat([x, x]) for name, x in run.inputs.items()}
    doubled = baseline(model, ids, mask, steps, run.keep_last, twice, tokens).logits
    others = (doubled[:batch], in_one_pass(model, run))
    return {
        f"{measure}_max": max(float(distance(other, run.logits).max()) for other in others)
        for measure, distance in (("linf", metrics.linf), ("tvd", metrics.total_variation))
    }


def _replays(
    attached: AttachedModel, run: BaselineRun, on_step: Callable[[int], None]
) -> tuple[dict[str, Tensor], list[Replay]]:
    """Compute and replay the patch of every step: the numbers of :func:`_compare`, with a last
    dimension of steps, and the replays.
    """
    comparisons: list[dict[str, Tensor]] = []
    replays: list[Replay] = []
    for reference, computation in zip(
        run.logits.unbind(1), _computations(attached, run), strict=True
    ):
        patch = computation.patch
        logits, replayed = attached.replay(patch)
        comparisons.append(_compare(reference, logits[:, -1], computation, replayed))
        assert patch.report is not None
        replays.append((logits[:, -1], patch.report, patch.passes))
        on_step(len(comparisons))
    totals = {
        name: torch.stack([step[name] for step in comparisons], -1) for name in comparisons[0]
    }
    parts = attached.ranks.joined([totals], run.ids.device)
    for name in ("same_blocks", "same_experts") if len(parts) > 1 else ():
        totals[name] = torch.cat([part[name] for part in parts])
    totals["reader_error"] = torch.stack([part["reader_error"] for part in parts]).amax(0)
    return totals, replays


def _computations(attached: AttachedModel, run: BaselineRun) -> Iterator[Computation]:
    """The patch of every step, along the baseline's tokens."""
    ids, mask, cache = run.ids, run.mask, None
    for token_ids in run.tokens.unbind(1):
        sequences, further = sequences_at(
            attached.model, ids, mask, run.keep_last, run.inputs, run.keep_first
        )
        if cache is None or run.keep_last or switches(attached.model, sequences):
            cache = attached.prefill(sequences, **further)
        yield attached.compute_from(cache, sequences)
        ids, mask = extended(ids, mask, token_ids[:, None])


def _compare(
    reference: Tensor, logits: Tensor, computation: Computation, replayed: list[BlockActivations]
) -> dict[str, Tensor]:
    """The replay of one step against the baseline's logits (B, V): the numbers of
    :class:`VerifiedToken` for each row, and those of :class:`VerifyReport` for the step.
    """
    pairs = list(zip(computation.activations, replayed, strict=True))
    report = computation.patch.report
    assert report is not None
    reader_errors = [
        metrics.linf(other.readers[name][:, -1], y_ctx[:, -1]).max()
        for recorded, other in pairs
        for name, y_ctx in recorded.readers.items()
        # A gate's single output may be near 0: the patch's report has its error, relative to the
        # values of both streams.
        if y_ctx.shape[-1] > 1
    ]
    outputs: list[Any] = [(recorded.output, other.output) for recorded, other in pairs]
    chosen = [
        [block.experts[1][:, -1].sort(-1).values for block in pair if block.experts is not None]
        for pair in pairs
    ]
    same_experts = [(pair[0] == pair[1]).all(-1) for pair in chosen if pair]
    return {
        "match": metrics.same_argmax(logits, reference),
        "bit_identical": metrics.bit_identical(logits, reference),
        "linf": metrics.linf(logits, reference),
        "tvd": metrics.total_variation(logits, reference),
        "same_blocks": torch.stack(
            [metrics.bit_identical(other[:, -1], recorded[:, -1]) for recorded, other in outputs]
        ),
        "same_experts": torch.stack(same_experts) if same_experts else torch.empty(0),
        # torch's maximum, unlike Python's, keeps NaN
        "reader_error": torch.stack(
            [x.double().cpu() for x in (*reader_errors, report.reader_error.max())]
        ).max(),
        "correction": report.correction.max(),
        "misses": report.misses.sum(),
    }


def _verified_tokens(run: BaselineRun, totals: Mapping[str, Tensor]) -> list[VerifiedToken]:
    """The verified tokens, prompt by prompt, from (B, steps) of each number."""
    numbers = [totals[name] for name in ("match", "bit_identical", "linf", "tvd")]
    columns = [x[run.counted.to(x.device)].tolist() for x in (run.tokens, *numbers)]
    return [VerifiedToken(*values) for values in zip(*columns, strict=True)]
