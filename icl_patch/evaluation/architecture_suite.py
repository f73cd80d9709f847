"""Measure every block form on a small random model, as ``examples/papers/table_1.py`` does."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from icl_patch import metrics
from icl_patch.errors import UnsupportedModelError
from icl_patch.evaluation import tiny_models
from icl_patch.evaluation.verify import same_experts
from icl_patch.models import kv_cache
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.patcher import ContextPatcher
from icl_patch.recording import forward_passes
from icl_patch.recording.sequences import Sequences, assemble
from icl_patch.tolerances import noise_limit

# Limit of the reader error and the correction, in units of the dtype's epsilon.
_ROUNDINGS = 16


@dataclass(frozen=True)
class FamilyReport:
    """The measurements of one block form on one random model.

    Attributes:
        noise_floor: L∞ between the unmodified model and itself at twice the batch, fp32.
        direct, stable: L∞ of the replay, fp32.
        exact_fp32, exact_bf16: share of tokens with bit-identical logits.
        reader_error, correction: the larger of fp32's and bf16's, in units of the dtype's epsilon.
        experts_identical: share of (token, block) pairs with the same experts; None without
            experts.
        refused: the error, for a form that is refused; the measurements are then None.
    """

    name: str
    model: str
    writer: str
    lemmas: str
    note: str
    noise_floor: float | None = None
    direct: float | None = None
    stable: float | None = None
    exact_fp32: float | None = None
    exact_bf16: float | None = None
    reader_error: float | None = None
    correction: float | None = None
    experts_identical: float | None = None
    refused: str | None = None

    @property
    def expected(self) -> bool:
        """Whether the form is supported."""
        return self.name in tiny_models.SUPPORTED

    @property
    def passed(self) -> bool:
        """A supported form: within its limits and bit-identical. Another form: refused."""
        if not self.expected:
            return self.refused is not None
        if self.refused is not None:
            return False
        assert self.noise_floor is not None and self.direct is not None and self.stable is not None
        limit = noise_limit(self.noise_floor)
        small = max(self.reader_error or 0.0, self.correction or 0.0) <= _ROUNDINGS
        identical = self.exact_fp32 == self.exact_bf16 == 1.0 and self.experts_identical in (
            None,
            1.0,
        )
        return self.direct <= limit and self.stable <= limit and small and identical

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
        return {**asdict(self), "passed": self.passed}


def run_suite(
    names: Sequence[str] | None = None,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[FamilyReport]:
    """Replay patches of ragged rows, with a prefix and several absorbed spans, of every family of
    :mod:`icl_patch.evaluation.tiny_models`, or of those named.

    Raises:
        KeyError: there is no such family.
    """
    chosen = list(names) if names is not None else [*tiny_models.SUPPORTED, *tiny_models.REFUSED]
    reports = []
    for number, name in enumerate(chosen, 1):
        reports.append(_run(name, seed))
        if progress is not None:
            progress(number, len(chosen))
    return reports


def _run(name: str, seed: int) -> FamilyReport:
    family = tiny_models.SUPPORTED.get(name) or tiny_models.REFUSED[name]
    report = FamilyReport(name, family.config, family.writer, family.lemmas, family.note)
    try:
        bf16 = _measure(name, "exact", torch.bfloat16, seed)
        fp32, direct, stable = (
            _measure(name, update, torch.float32, seed) for update in ("exact", "direct", "stable")
        )
    except UnsupportedModelError as error:
        return replace(report, refused=str(error))
    return replace(
        report,
        noise_floor=direct["noise_floor"],
        direct=direct["linf"],
        stable=stable["linf"],
        exact_fp32=fp32["identical"],
        exact_bf16=bf16["identical"],
        reader_error=max(fp32["reader_error"], bf16["reader_error"]),
        correction=max(fp32["correction"], bf16["correction"]),
        experts_identical=min(bf16["experts"], fp32["experts"]) if "experts" in bf16 else None,
    )


def _sequences(seed: int, copies: int = 1) -> Sequences:
    """Three ragged rows: a prefix, a context with two absorbed spans, seven kept tokens; each row
    ``copies`` times.
    """
    generator, highest = torch.Generator().manual_seed(seed), tiny_models.IMAGE_TOKEN - 2
    prefix, context, kept = (
        torch.randint(1, highest, (3, width), generator=generator).repeat(copies, 1)
        for width in (5, 11, 7)
    )
    prefix_lengths, kept_lengths = (
        torch.tensor(lengths).repeat(copies).unsqueeze(1) for lengths in ((5, 3, 1), (7, 5, 3))
    )
    return assemble(
        context,
        kept,
        prefix_ids=prefix,
        absorbed=[(0, 5), (8, 10)],
        prefix_mask=torch.arange(5).flip(0) < prefix_lengths,
        kept_mask=torch.arange(7) < kept_lengths,
    )


@torch.no_grad()
def _baseline(model: Any, sequences: Sequences) -> Tensor:
    """The unmodified model's logits of the kept tokens; token by token if it is recurrent."""
    cache, width = kv_cache.new_cache(model), sequences.tail_ids.shape[1]
    forward_passes.run_head(model, sequences, cache)
    step = 1 if is_recurrent(model) else width
    parts = [slice(start, start + step) for start in range(0, width, step)]
    logits = [forward_passes.run_tail(model, sequences, cache, part) for part in parts]
    return torch.cat(logits, 1)[:, sequences.kept_columns]


def _measure(name: str, update: str, dtype: torch.dtype, seed: int) -> dict[str, float]:
    """A replay against the unmodified model: its numbers in :class:`FamilyReport`."""
    model, unpatched = (tiny_models.build(name, seed, dtype) for _ in range(2))
    sequences = _sequences(seed)
    with ContextPatcher(model, update) as patcher:  # first: a model without a cache is refused
        computed = patcher.attached_model.compute(sequences)
        logits, activations = patcher.attached_model.replay(computed.patch)
    reference = _baseline(unpatched, sequences)
    doubled = _baseline(unpatched, _sequences(seed, copies=2))[: len(reference)]
    mask, report = computed.patch.kept_mask, computed.patch.report
    assert report is not None
    epsilon = torch.finfo(dtype).eps
    measured = {
        "noise_floor": float(metrics.linf(doubled, reference)[mask].max()),
        "linf": float(metrics.linf(logits, reference)[mask].max()),
        "identical": float(metrics.bit_identical(logits, reference)[mask].double().mean()),
        "reader_error": float(report.reader_error.max()) / epsilon,
        "correction": float(report.correction.max()) / epsilon,
    }
    # two streams record all tokens of the tail, a closing pass the kept ones as a replay does
    if update == "exact" and (same := same_experts(computed, activations)):
        measured["experts"] = float(torch.stack(same)[:, mask].double().mean())
    return measured
