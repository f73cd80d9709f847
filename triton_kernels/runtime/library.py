"""The kernels as operators of ``torch.ops.icl_patch``: for torch.compile and for fake tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from icl_patch.kernels.runtime.launching import Memory, cached_launch, check_served, needs_op

_LIBRARY = torch.library.Library("icl_patch", "FRAGMENT")
_DEVICES = ("CUDA", "CPU")  # the CPU in Triton's interpreter


def define(schema: str, launch: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator ``icl_patch::<schema>`` that runs ``launch``.

    Args:
        fake: the outputs' sizes and dtypes, without running it.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in _DEVICES:
        _LIBRARY.impl(name, launch, device)
    torch.library.register_fake(f"icl_patch::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.icl_patch, name)


def operator(
    schema: str,
    check: Callable[..., None],
    plan: Callable[..., Callable[..., Any]],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """The function of a kernel, which goes straight to the launch, or by an operator where torch
    has to see it.

    Args:
        schema: of the operator ``icl_patch::<schema>``. Tensors come first.
        check: raises for arguments that do not fit; runs before the plan.
        plan: gives the call for the tensors, see
            :func:`icl_patch.kernels.runtime.launching.cached_launch`.
        fake: as for :func:`define`.
    """
    count = schema.partition(") ->")[0].count("Tensor")

    def checked(*arguments: Any) -> None:
        check_served(*arguments[:count])
        check(*arguments)

    def checked_plan(*arguments: Any) -> Callable[..., Any]:
        checked(*arguments)
        return plan(*arguments)

    def launch(*arguments: Any) -> Any:
        return cached_launch(checked_plan, arguments[:count], *arguments[count:])

    packet = define(schema, launch, fake)

    def call(*arguments: Any) -> Any:
        if needs_op(*arguments[:count]):
            checked(*arguments)
            return packet(*arguments)
        return launch(*arguments)

    return call


def fake_outputs(like: Tensor, outputs: tuple[Memory, ...]) -> tuple[Tensor, ...]:
    """Tensors as a launch describes its outputs, on the device of another tensor."""
    return tuple(like.new_empty(size, dtype=dtype) for size, dtype in outputs)
