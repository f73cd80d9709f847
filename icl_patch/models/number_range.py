"""Whether a model's dtype can hold the numbers that it computes."""

import torch
from torch import Tensor


def above_range(path: str, output: Tensor, dtype: torch.dtype) -> str | None:
    """The refusal of a module that computes infinities or NaNs; None if all outputs are finite."""
    if output.isfinite().all():
        return None
    return _refusal(path, dtype, f"above its largest number {torch.finfo(dtype).max:.1e}")


def below_range(path: str, output: Tensor, dtype: torch.dtype) -> str | None:
    """The refusal of a module whose output (..., d) is too small for some token; None else."""
    size = float(output.double().square().mean(-1).sqrt().min())
    limit = torch.finfo(dtype).smallest_normal
    if size >= limit:
        return None
    return _refusal(path, dtype, f"{size:.1e}, below its smallest normal number {limit:.1e}")


def _refusal(path: str, dtype: torch.dtype, found: str) -> str:
    cure = "Load the model in a dtype of a wider range, torch.bfloat16 or torch.float32"
    if dtype != torch.float16:
        cure = "Check that its weights were loaded whole: none may be infinite or NaN"
    return f"{path} has outputs that {torch.finfo(dtype).dtype} cannot hold: {found}. {cure}"
