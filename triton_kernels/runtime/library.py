"""The kernels as operators of ``torch.ops.icl_patch``: for torch.compile and for fake tensors."""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("icl_patch", "FRAGMENT")
_DEVICES = ("CUDA", "CPU")  # the CPU in Triton's interpreter


def define(schema: str, launch: Callable[..., Any]) -> None:
    """Define an operator ``icl_patch::<schema>`` that runs ``launch``."""
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in _DEVICES:
        _LIBRARY.impl(schema.partition("(")[0], launch, device)


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the operator's fake: its outputs' sizes and dtypes, without running it."""
    return torch.library.register_fake(f"icl_patch::{name}", lib=_LIBRARY)
