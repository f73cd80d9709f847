"""A context in a cache, ready for its decode steps."""

from typing import Any

from torch import Tensor

from icl_patch import ContextPatcher
from icl_patch.generation.decode_mode_checks import require_shared_cache
from icl_patch.generation.decode_state import DecodeMode, DecodeState
from icl_patch.generation.decode_step import prefill


def prefilled(
    patcher: ContextPatcher,
    ids: Tensor,
    mask: Tensor,
    capacity: int,
    mode: DecodeMode,
    **arguments: Any,
) -> DecodeState:
    """The state of a generation, of a shared cache too."""
    if mode is DecodeMode.SHARED_CACHE:
        require_shared_cache(patcher.decoder)
    return prefill(patcher.decoder, ids, mask, capacity, mode, **arguments)
