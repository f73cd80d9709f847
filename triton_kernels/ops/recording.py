"""One pass over W for both streams: their outputs, and the patch that makes them equal."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from icl_patch.kernels.ops.direction import ReadDirection, read_direction
from icl_patch.kernels.ops.linear import NO_OTHERS, check_linear, plan_linear, product_path
from icl_patch.kernels.runtime import library
from icl_patch.kernels.runtime.config import Config, config_for, gpu_name
from icl_patch.kernels.runtime.launching import cached_launch, check, needs_op


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
    weight: Tensor,
    bias: Tensor | None,
    coeff: Tensor,
    path: str | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`record_linear` for given coefficients, straight to the kernel: y_pair and u."""
    return cached_launch(_plan, (z_pair, weight, bias, coeff), path, config)


def _plan(
    z_pair: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    coeff: Tensor,
    path: str | None,
    config: Config | None,
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]:
    check_pair(z_pair, weight, bias, coeff)
    config = config or config_for(
        gpu_name(z_pair.device), weight.dtype, len(weight), path or product_path(len(z_pair) // 2)
    )
    launch = plan_linear(z_pair, weight, None, None, bias, None, z_pair.dtype, config, record=True)
    return lambda z_pair, weight, bias, coeff: launch(
        z_pair, weight, bias, None, None, None, coeff, *NO_OTHERS
    )


library.define(
    "triton_record_linear(Tensor z_pair, Tensor weight, Tensor? bias, Tensor coeff, str? path) ->"
    " (Tensor, Tensor)",
    launch_record,
)


@library.fake("triton_record_linear")
def _(
    z_pair: Tensor, weight: Tensor, bias: Tensor | None, coeff: Tensor, path: str | None
) -> tuple[Tensor, Tensor]:
    y_pair = z_pair.new_empty((z_pair.shape[0], weight.shape[0]))
    return y_pair, z_pair.new_empty((z_pair.shape[0] // 2, weight.shape[0]), dtype=torch.float32)


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
        check_pair(z_pair, weight, bias)
        direction = read_direction(z_pair[z_pair.shape[0] // 2 :])
    if needs_op(z_pair, weight, bias):
        check_pair(z_pair, weight, bias, direction.coeff)
        y_pair, u = torch.ops.icl_patch.triton_record_linear(
            z_pair, weight, bias, direction.coeff, path
        )
    else:
        y_pair, u = launch_record(z_pair, weight, bias, direction.coeff, path)
    return Recorded(y_pair, u, direction)


def check_pair(
    z_pair: Tensor, weight: Tensor, bias: Tensor | None, coeff: Tensor | None = None
) -> None:
    """Raise unless the arguments fit :func:`record_linear` with these coefficients."""
    check_linear(z_pair, weight, bias, None)
    rows, odd = divmod(z_pair.shape[0], 2)
    check(not odd, "z_pair (2M, K)", z_pair.shape)
    if coeff is not None:
        good = (
            coeff.shape == (rows, 1)
            and coeff.dtype == torch.float32
            and coeff.is_contiguous()
            and coeff.device == z_pair.device
        )
        check(good, f"contiguous coefficients ({rows}, 1) in fp32 on {z_pair.device}", coeff.shape)
