"""Rotary positions of a decode step in one operation: the function of a model's source file takes
some eight for query and key each.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.models.table_override import TableOverride, file_override, overridden
from icl_patch.recording.attached_block import AttachedBlock

_NAME = "apply_rotary_pos_emb"  # in most of transformers' files
_fusing: ContextVar[bool] = ContextVar("icl_patch_rotary", default=False)
_tried: dict[Any, bool] = {}  # by the function, the shapes of a row and the dtypes


def _fused(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tensors = len(args) == 4 and not kwargs and all(isinstance(x, Tensor) for x in args)
    if not (_fusing.get() and tensors and ops.has_kernels(args[0].device.type)):
        return original(*args, **kwargs)
    form = (original, *((x.shape[1:], x.dtype) for x in args))
    if form not in _tried:
        _tried[form] = _has_same_bits(original, args)
    return ops.rotary_embedding(*args) if _tried[form] else original(*args)


def _has_same_bits(original: Callable[..., Any], like: Iterable[Tensor]) -> bool:
    """Whether the function gives random numbers the bits that our op gives them."""
    generator = torch.Generator().manual_seed(5)
    numbers = [torch.randn(x.shape, generator=generator).to(x) for x in like]
    try:
        pairs = zip(original(*numbers), ops.rotary_embedding(*numbers), strict=True)
        return all(torch.equal(*pair) for pair in pairs)
    except Exception:  # a function of other inputs, or of another form
        return False


def rotary_overrides(blocks: Iterable[AttachedBlock]) -> set[TableOverride]:
    """The overrides of the functions that the blocks' classes rotate with."""
    return {override for block in blocks for override in file_override(block.module, _NAME, _fused)}


def fused_rotary(overrides: Iterable[TableOverride]) -> AbstractContextManager[None]:
    """A context within which these functions run as our op in this thread, if it has their bits."""
    return overridden(overrides, _fusing, True)
