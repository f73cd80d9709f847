"""Measure every block form on a small random model: ``icl-patch verify --all-families``."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from icl_patch import metrics
from icl_patch.errors import UnsupportedModelError
from icl_patch.evaluation import tiny_models
from icl_patch.models import kv_cache
from icl_patch.models.recurrent_state import is_recurrent
from icl_patch.patcher import ContextPatcher
from icl_patch.recording import forward_passes
from icl_patch.recording.sequences import Sequences, assemble

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
        limit = max(10 * self.noise_floor, 1e-4)
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
    """Run every family of the zoo, or those named: patches of ragged rows with a prefix and several
    absorbed spans, replayed.

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
    description: dict[str, Any] = {
        "name": name,
        "model": family.config,
        "writer": family.writer,
        "lemmas": family.lemmas,
        "note": family.note,
    }
    try:
        measures = _measure_fp32(name, seed)
        bf16 = _measure_exact(name, seed, torch.bfloat16)
    except UnsupportedModelError as error:
        return FamilyReport(**description, refused=str(error))
    exact = _measure_exact(name, seed, torch.float32)
    return FamilyReport(
        **description,
        **measures,
        exact_fp32=exact["identical"],
        exact_bf16=bf16["identical"],
        reader_error=max(exact["reader_error"], bf16["reader_error"]),
        correction=max(exact["correction"], bf16["correction"]),
        experts_identical=(
            None if bf16["choices"] is None else min(exact["choices"], bf16["choices"])
        ),
    )


def _sequences(seed: int) -> Sequences:
    """Three ragged rows: a prefix, a context with two absorbed spans, seven kept tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = 3
    prefix, context, kept = (
        torch.randint(1, tiny_models.IMAGE_TOKEN - 2, (rows, width), generator=generator)
        for width in (5, 11, 7)
    )
    prefix_mask = torch.arange(5).flip(0) < torch.tensor([5, 3, 1]).unsqueeze(1)
    kept_mask = torch.arange(7) < torch.tensor([7, 5, 3]).unsqueeze(1)
    masks = {"prefix_mask": prefix_mask, "kept_mask": kept_mask}
    return assemble(context, kept, prefix_ids=prefix, absorbed=[(0, 5), (8, 10)], **masks)


@torch.no_grad()
def _baseline(model: Any, sequences: Sequences) -> Tensor:
    """The unmodified model's logits of the kept tokens; token by token if it is recurrent."""
    cache, width = kv_cache.new_cache(model), sequences.tail_ids.shape[1]
    forward_passes.run_head(model, sequences, cache)
    parts = (
        [slice(column, column + 1) for column in range(width)]
        if is_recurrent(model)
        else [slice(width)]
    )
    return torch.cat([forward_passes.run_tail(model, sequences, cache, part) for part in parts], 1)[
        :, sequences.kept_columns
    ]


def _doubled(sequences: Sequences) -> Sequences:
    """Every row twice."""
    rows = {
        name: value if name == "tail_absorbed" else value.repeat(2, 1)
        for name, value in vars(sequences).items()
    }
    return Sequences(**rows)


def _measure_fp32(name: str, seed: int) -> dict[str, Any]:
    """The noise floor, and the L∞ of direct and stable replays."""
    model, sequences = tiny_models.build(name, seed), _sequences(seed)
    errors = {}
    for update in ("direct", "stable"):
        with ContextPatcher(model, update) as patcher:
            patch = patcher.attached_model.compute(sequences).patch
            logits = patcher.attached_model.replay_logits(patch)
        reference, mask = _baseline(model, sequences), patch.kept_mask
        errors[update] = float(metrics.linf(logits, reference)[mask].max())
    twice = _baseline(model, _doubled(sequences))[: len(reference)]
    return errors | {"noise_floor": float(metrics.linf(twice, reference)[mask].max())}


def _measure_exact(name: str, seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """Bit identity of an exact replay, and its reader error, correction and choice of experts."""
    model, sequences = tiny_models.build(name, seed, dtype), _sequences(seed)
    reference = _baseline(model, sequences)
    with ContextPatcher(model, "exact") as patcher:
        computed = patcher.attached_model.compute(sequences)
        logits, all_activations = patcher.attached_model.replay(computed.patch)
    mask, report = computed.patch.kept_mask, computed.patch.report
    assert report is not None
    epsilon = torch.finfo(dtype).eps
    choices = [
        (replayed.experts[1].sort(-1).values == recorded.experts[1].sort(-1).values).all(-1)[mask]
        for replayed, recorded in zip(all_activations, computed.activations, strict=True)
        if replayed.experts is not None and recorded.experts is not None
    ]
    return {
        "identical": float(metrics.bit_identical(logits, reference)[mask].double().mean()),
        "reader_error": float(report.reader_error.max()) / epsilon,
        "correction": float(report.correction.max()) / epsilon,
        "choices": float(torch.cat(choices).double().mean()) if choices else None,
    }
