"""One pass over W for both streams: their outputs, and the patch that makes them equal."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from icl_patch.kernels.ops.direction import ReadDirection, read_direction
from icl_patch.kernels.ops.linear import check_record, launch_linears
from icl_patch.kernels.runtime import library
from icl_patch.kernels.runtime.config import Config
from icl_patch.kernels.runtime.launching import needs_op


class Recorded(NamedTuple):
    """y_pair (2M, N), the context rows' output and the reduced rows' patched output; u (M, N) fp32;
    the reduced rows' direction.
    """

    y_pair: Tensor
    u: Tensor
    direction: ReadDirection

    @property
    def y_ctx(self) -> Tensor:
        """(M, N), of the context stream."""
        return self.y_pair[: len(self.u)]

    @property
    def y(self) -> Tensor:
        """(M, N), of the reduced stream, with its patch."""
        return self.y_pair[len(self.u) :]


def launch_record(
    z_pair: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    coeff: Tensor,
    path: str | None = None,
    config: Config | None = None,
) -> list[Tensor]:
    """:func:`record_linears` for given coefficients, straight to the kernel: y_pair and u of each
    weight.
    """
    nothing = [None] * len(weights)
    return launch_linears(z_pair, weights, nothing, coeff, biases, path, config, record=True)


library.define(
    "triton_record_linears(Tensor z_pair, Tensor[] weights, Tensor?[] biases, Tensor coeff, str?"
    " path) -> Tensor[]",
    launch_record,
)
library.fake("triton_record_linears")(
    lambda z_pair, weights, *_: [
        z_pair.new_empty((z_pair.shape[0] // parts, weight.shape[0]), dtype=dtype)
        for weight in weights
        for parts, dtype in ((1, z_pair.dtype), (2, torch.float32))
    ]
)


def record_linear(
    z_pair: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    direction: ReadDirection | None = None,
    path: str | None = None,
) -> Recorded:
    """``u = W z_ctx - W z`` and the outputs ``y_ctx = W z_ctx + b`` and ``y = W z + b + (z·v) u``,
    reading W once.

    u is the difference of the two fp32 sums, before the bias. ``patched_linear(z, weight, u, v,
    bias)`` gives y again bit for bit, and ``patched_linear(z_ctx, weight, None, None, bias)``
    y_ctx, in the path of M rows.

    Args:
        z_pair: (2M, K) fp32, bf16 or fp16: M rows of the context stream, then M of the reduced
            stream.
        weight, bias: as for :func:`icl_patch.kernels.patched_linear`.
        direction: of the reduced rows, from :func:`read_direction` or
            :func:`icl_patch.kernels.norm_pair`; it is shared by all linear maps that read one z.
            By default it is computed by a separate launch.
        path: ``"gemv"`` or ``"gemm"``; by default as ``patched_linear`` chooses for M rows.

    Returns:
        Recorded(y_pair, u, direction). Not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.

    Source: Goldwaser et al. (2025), Lemma 6.
    """
    if direction is None:
        check_record(z_pair, weight, bias)
        direction = read_direction(z_pair[z_pair.shape[0] // 2 :])
    return record_linears(z_pair, [weight], [bias], direction=direction, path=path)[0]


def record_linears(
    z_pair: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    direction: ReadDirection,
    path: str | None = None,
) -> list[Recorded]:
    """:func:`record_linear` of each weight and bias, bit for bit; up to three neighbours share a
    launch if they have the same arithmetic and layout.
    """
    arguments = (z_pair, weights, biases, direction.coeff, path)
    if needs_op(z_pair, *weights, *biases):
        for of in zip(weights, biases, strict=True):
            check_record(z_pair, *of, direction.coeff)
        flat = torch.ops.icl_patch.triton_record_linears(*arguments)
    else:
        flat = launch_record(*arguments)
    return [Recorded(y, u, direction) for y, u in zip(flat[::2], flat[1::2], strict=True)]
