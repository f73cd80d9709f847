"""One pass over W for both streams: their outputs, and the patch that makes them equal."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from icl_patch.checks import check_record_linear
from icl_patch.kernels.ops.linear_maps import plan_maps
from icl_patch.kernels.runtime.config import Config
from icl_patch.kernels.runtime.launching import cached_launch, define, needs_op


def launch_record(
    z_pair: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    coeff: Tensor,
    config: Config | None = None,
) -> list[Tensor]:
    """:func:`record_linears` with a configuration, straight to the kernel."""
    maps = (x for of in zip(weights, biases, strict=True) for x in of)
    return cached_launch(_plan, (z_pair, coeff, *maps), config)


def _plan(z_pair: Tensor, coeff: Tensor, *rest: Any) -> Callable[..., list[Tensor]]:
    *flat, config = rest
    for weight, bias in zip(flat[::2], flat[1::2], strict=True):
        _check(z_pair, weight, bias, coeff)
    return plan_maps(z_pair, flat, config, record=True)


def _check(z_pair: Tensor, weight: Tensor, bias: Tensor | None, coeff: Tensor) -> None:
    check_record_linear(z_pair, weight, bias=bias)
    rows = z_pair.shape[0] // 2
    good = coeff.shape == (rows, 1) and coeff.dtype == torch.float32 and coeff.is_contiguous()
    if not (good and coeff.device == z_pair.device):
        # a message with rows in it would bind a compiled graph to their number
        expected = f"contiguous coefficients ({rows}, 1) in fp32 on {z_pair.device}"
        raise ValueError(f"expected {expected}, got {tuple(coeff.shape)}")


_record_linears = define(
    "record_linears",
    "(Tensor z_pair, Tensor[] weights, Tensor?[] biases, Tensor coeff) -> Tensor[]",
    lambda z_pair, weights, *_: [
        z_pair.new_empty((z_pair.shape[0] // parts, weight.shape[0]), dtype=dtype)
        for weight in weights
        for parts, dtype in ((1, z_pair.dtype), (2, torch.float32))
    ],
    launch_record,
)


def record_linears(
    z_pair: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    coeff: Tensor,
) -> list[Tensor]:
    """``u = W z_ctx - W z`` and the outputs ``y_ctx = W z_ctx + b`` and ``y = W z + b + (z·v) u``
    of each weight, reading it once; two neighbours share a launch if they have the same arithmetic
    and layout.

    u is the difference of the two fp32 sums, before the bias. ``patched_linear(z, weight, u, v,
    bias)`` gives y again bit for bit, and ``patched_linear(z_ctx, weight, None, None, bias)``
    y_ctx.

    Args:
        z_pair: (2M, K) fp32, bf16 or fp16: M rows of the context stream, then M of the reduced
            stream.
        weights, biases: each as for :func:`icl_patch.kernels.patched_linear`.
        coeff: (M, 1) fp32, ``z·v`` of the reduced rows, from
            :func:`icl_patch.kernels.read_direction` or :func:`icl_patch.kernels.norm_pair`.

    Returns:
        Of each weight in turn y_pair (2M, N), the context rows' output and the reduced rows'
        patched output, and u (M, N) fp32. Not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.

    Source: Goldwaser et al. (2025), Lemma 6.
    """
    arguments = (z_pair, weights, biases, coeff)
    if not needs_op(z_pair, *weights, *biases):
        return launch_record(*arguments)
    for of in zip(weights, biases, strict=True):
        _check(z_pair, *of, coeff)
    flat: list[Tensor] = _record_linears(*arguments)
    return flat
