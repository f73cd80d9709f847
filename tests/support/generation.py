"""A context in a cache, ready for its decode steps."""

from typing import Any

from torch import Tensor

from icl_patch import ContextPatcher
from icl_patch.generation.decode_step import DecodeState, prefill
from icl_patch.generation.one_pass import DecodeMode


def prefilled(
    patcher: ContextPatcher,
    ids: Tensor,
    mask: Tensor,
    capacity: int,
    mode: DecodeMode,
    **arguments: Any,
) -> DecodeState:
    """The state of a generation, of a shared cache too."""
    plan = patcher.plans.of(mode)
    return prefill(patcher.attached_model, plan, ids, mask, capacity, **arguments)
