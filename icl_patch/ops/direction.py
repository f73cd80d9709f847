"""The direction v of a rank-1 change ``u vᵀ``: the vector with ``v·z = 1``."""

from typing import NamedTuple

import torch
from torch import Tensor

from icl_patch.checks import check_read_direction
from icl_patch.ops import reference
from icl_patch.ops.dispatch import Op


class Direction(NamedTuple):
    """v (..., K), ``1/‖z‖²`` (...), and ``z·v`` (M, 1) if it was summed too."""

    v: Tensor
    inverse_norm2: Tensor
    coeff: Tensor | None = None


def read_direction(z: Tensor, dtype: torch.dtype | None = None) -> Direction:
    """``v = z / ‖z‖²``, the vector with ``v·z = 1``, and ``1/‖z‖²``, summed in fp64.

    Args:
        z: (..., K) float.
        dtype: the results' dtype, fp32 or fp64; fp32 by default (fp64 for fp64 ``z``).

    Returns:
        Direction(v, inverse_norm2, coeff). If z = 0, no such vector exists: v and inverse_norm2 are
        0, as are their derivatives, and the caller must check this. They are also 0 if v exceeds
        the range of its dtype.

    Raises:
        TypeError: z is not floating, or ``dtype`` is neither fp32 nor fp64.
        ValueError: z has no dimension.

    Source: Goldwaser et al. (2025), Lemma 6.
    """
    shape = z.shape
    if not shape:
        raise ValueError("expected z (..., K), got a tensor without dimensions")
    dtype = dtype or reference.accumulation_dtype(z)
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"expected dtype torch.float32 or torch.float64, got {dtype}")
    rows = z if len(shape) == 2 else z.unsqueeze(0).flatten(0, -2)
    direction = Direction(*_read_direction(rows, dtype == torch.float64))
    if len(shape) == 2:
        return direction
    v, inverse, coeff = direction
    return Direction(v.reshape(shape), inverse.reshape(shape[:-1]), coeff)


def _reference(rows: Tensor, wide: bool) -> tuple[Tensor, Tensor]:
    return reference.read_direction(rows, torch.float64 if wide else torch.float32)


_read_direction = Op(
    "read_direction",
    check_read_direction,
    _reference,
    native_fp64=True,
    triton_if=lambda rows, wide: not wide,
    triton=lambda kernels, rows, wide: kernels.read_direction(rows),
)
