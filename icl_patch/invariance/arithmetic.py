"""The two arithmetics that a model can run in: its own, and one in which rows do not see their
batch.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from icl_patch import ops
from icl_patch.invariance.functions import ATTENTION, ROW_FUNCTIONS, Replacements
from icl_patch.models.recurrent_state import is_recurrent

MODEL, BATCH_INVARIANT = "model", "batch_invariant"
ARITHMETICS = (MODEL, BATCH_INVARIANT)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of models that can run in the batch-invariant arithmetic."""


def reason_against(model: PreTrainedModel) -> str | None:
    """Why a model cannot run in the batch-invariant arithmetic, or None."""
    device = model.device.type
    reasons = {
        f"it runs in {model.dtype}": model.dtype not in DTYPES,
        "autocast is enabled": torch.is_autocast_enabled(device),
        f"icl_patch has no kernels for {device}": not ops.has_kernels(device),
        "it has recurrent layers, which see padding": is_recurrent(model),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@contextmanager
def running_in(arithmetic: str, *, attention: bool = False) -> Iterator[None]:
    """Within this context a model's calls in this thread run in an arithmetic.

    Args:
        arithmetic: ``"model"``: torch's functions, as the model calls them.
            ``"batch_invariant"``: products and activations in which a row's bits do not depend on
            the rows beside it.
        attention: whether attention is batch-invariant too. A token without a context attends to
            itself alone, and needs none of that.
    """
    if arithmetic == MODEL:
        yield
        return
    table = {**ROW_FUNCTIONS, **ATTENTION} if attention else ROW_FUNCTIONS
    with ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(ops.gemv_products())
        stack.enter_context(_Replacing(table))
        yield


class _Replacing(TorchFunctionMode):
    """Runs the functions of a table in place of torch's."""

    def __init__(self, table: Replacements) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.table.get(function, function)(*args, **kwargs or {})
