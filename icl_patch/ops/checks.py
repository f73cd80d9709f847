"""Checks of arguments that several ops share. Each raises an error with the expected and the actual
value.
"""

import torch
from torch import Tensor

from icl_patch.ops.dispatch import is_traced, is_transformed

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_floats(**tensors: Tensor | None) -> None:
    """All tensors are floating and on the device of the first; None stands for no tensor.

    Raises:
        TypeError: a dtype is not floating.
        ValueError: a device differs.
    """
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise TypeError(f"expected {name} in fp64, fp32, bf16 or fp16, got {tensor.dtype}")
        device = device or tensor.device
        if tensor.device != device:
            raise ValueError(f"expected {name} on {device}, got {tensor.device}")


def check_matrix(name: str, tensor: Tensor) -> None:
    """The tensor is floating and has two dimensions."""
    if tensor.dim() != 2:
        raise ValueError(f"expected {name} with 2 dimensions, got {tuple(tensor.shape)}")
    check_floats(**{name: tensor})


def check_eps(eps: float) -> None:
    """The eps of a norm is finite and not negative."""
    if not 0 <= eps < float("inf"):
        raise ValueError(f"expected a finite eps ≥ 0, got {eps}")


def check_operands(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> None:
    """The operands of a product of x by one weight (N, K) or by several (E, N, K)."""
    if weight.dtype != x.dtype and weight.dtype in FLOATS and x.dtype in FLOATS:
        raise TypeError(f"expected weight in {name}'s dtype {x.dtype}, got {weight.dtype}")
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ValueError(f"expected bias {tuple(weight.shape[:-1])}, got {tuple(bias.shape)}")
    check_floats(**{name: x}, weight=weight, bias=bias)
    if bias is not None and bias.dtype != x.dtype:
        raise TypeError(f"expected bias in {name}'s dtype {x.dtype}, got {bias.dtype}")
    check_out_dtype(out_dtype)


def check_out_dtype(out_dtype: torch.dtype | None) -> None:
    """The result's dtype is floating."""
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise TypeError(f"expected a floating out_dtype, got {out_dtype}")


def check_indices(name: str, indices: Tensor, x: Tensor, least: int, count: int) -> None:
    """Indices on x's device, from ``least`` to ``count - 1``.

    The range is checked only if the host can read the values without waiting for a device.
    """
    if indices.device != x.device:
        raise ValueError(f"expected {name} on {x.device}, got {indices.device}")
    if not indices.is_cpu or not indices.numel() or is_traced() or is_transformed():
        return
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < least or highest >= count:
        raise ValueError(f"expected {name} from {least} to {count - 1}, got {lowest} to {highest}")


def is_integer(tensor: Tensor) -> bool:
    """Whether a tensor holds integers: indices, not a mask."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
