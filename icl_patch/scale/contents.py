"""What is kept of every patch of a data set: layers, dtype, or statistics alone."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.serialization import widened
from icl_patch.patcher import ContextPatcher
from icl_patch.recording.hooks import error_of


@dataclass(frozen=True)
class Contents:
    """What is kept of every patch.

    Attributes:
        layers: the blocks; all by default. Patches of some blocks only cannot be replayed.
        factors_dtype: None for the dtype in which the factors are computed, or torch.bfloat16,
            which takes half the bytes or less; the index then has the error of each replay. New
            scales of norms are not rounded.
        statistics: no factors at all, but norms, and norm and rank of the sum over a row's tokens.

    Raises:
        ValueError: another dtype.
    """

    layers: slice = field(default_factory=lambda: slice(None))
    factors_dtype: torch.dtype | None = None
    statistics: bool = False

    def __post_init__(self) -> None:
        if self.factors_dtype not in (None, torch.bfloat16):
            raise ValueError(f"expected factors_dtype torch.bfloat16, got {self.factors_dtype}")

    def rounded(self, patch: ContextPatch) -> ContextPatch:
        """A patch with factors in the dtype of the files."""
        if self.factors_dtype is None:
            return patch
        layers = tuple(
            {name: self._narrowed(name, x) for name, x in layer.items()} for layer in patch.layers
        )
        return replace(patch, layers=layers)

    def _narrowed(self, name: str, factor: Tensor) -> Tensor:
        """A factor in the dtype of the files; of a scale the change is smaller than its value."""
        if not factor.is_floating_point() or name.endswith((".scale", ".new_scale")):
            return factor
        return factor.to(self.factors_dtype)


def replay_errors(patcher: ContextPatcher, patch: ContextPatch) -> list[float]:
    """How far a replay of rounded factors is off, relative to the largest logit with the context,
    for each row.
    """
    layers = tuple({name: widened(x) for name, x in layer.items()} for layer in patch.layers)
    logits = patcher.attached_model.replay_logits(replace(patch, layers=layers))
    assert patch.logits is not None
    rows = zip(logits.split(1), patch.logits.split(1), patch.kept_mask.split(1), strict=True)
    return [error_of(*row) for row in rows]
