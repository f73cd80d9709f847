"""Linear maps of few rows by the experts that each row has chosen."""

import torch
from torch import Tensor

from icl_patch.checks import check_expert_linear, is_traced, is_transformed
from icl_patch.ops import reference
from icl_patch.ops.dispatch import Op


def expert_linear(
    x: Tensor,
    weight: Tensor,
    expert: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``y_mj = W_e x_m + b_e`` with ``e = expert[m, j]``: few rows, each mapped by the experts that
    it has chosen.

    On the CPU an expert's matrix is read once for all slots that chose it. On CUDA each of these
    slots reads it, in one launch.

    Args:
        x: (M, K) float, which all k slots of a row read, or (M, k, K).
        weight: logically (E, N, K), any strides, x's dtype. It is fast if either of the last two
            dimensions is contiguous.
        expert: (M, k) integers from 0 to E - 1. CUDA tensors are not checked on the host; any other
            number in them gives 0.
        bias: (E, N), x's dtype.
        out_dtype: the result's dtype; x's dtype by default.

    Returns:
        (M, k, N), accumulated in fp32 (fp64 for fp64 x) and rounded once. In our kernels a slot's
        bits depend only on its row and its expert.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit, or an expert does not exist.

    Source: Goldwaser et al. (2025), Lemmas 7 and 11: the products of their experts.
    """
    return _expert_linear(x, weight, expert, bias, out_dtype)


def _reference(
    x: Tensor, weight: Tensor, expert: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    gather = is_traced() or is_transformed()
    return reference.expert_linear(x, weight, expert, bias, out_dtype or x.dtype, gather)


_expert_linear = Op(
    "expert_linear",
    check_expert_linear,
    _reference,
    native_if=lambda x, weight, *_: 1 in weight.stride()[1:],
)
