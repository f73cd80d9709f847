"""One pass over W for both streams: their outputs, and the patch that makes them equal."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icl_patch.kernels.ops.direction import ReadDirection, read_direction
from icl_patch.kernels.ops.linear import check_linear, plan_linear, product_path
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
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    coeff: Tensor,
    path: str | None = None,
    config: Config | None = None,
) -> list[Tensor]:
    """:func:`record_linears` for given coefficients, straight to the kernel: y_pair and u of each
    weight.
    """
    outputs: list[Tensor] = []
    maps = [x for of in zip(weights, biases, strict=True) for x in of]
    for i in range(0, len(maps), 4):
        weight, bias, other, other_bias = (*maps[i : i + 4], None, None)[:4]
        tensors = (z_pair, coeff, weight, bias, other, other_bias)
        outputs += cached_launch(_plan, tensors, path, config)
    return outputs


def _plan(
    z_pair: Tensor,
    coeff: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    other_bias: Tensor | None,
    path: str | None,
    config: Config | None,
) -> Callable[..., Sequence[Tensor]]:
    def planned(weight: Tensor, bias: Tensor | None) -> tuple[Config, Any, Any]:
        _check(z_pair, weight, bias, coeff)
        rows, gpu = len(z_pair) // 2, gpu_name(z_pair.device)
        chosen = config or config_for(gpu, weight.dtype, len(weight), path or product_path(rows))
        return chosen, weight.stride(), bias is None or bias.stride()

    layout = planned(weight, bias)
    if other is not None and planned(other, other_bias) != layout:
        first = _plan(z_pair, coeff, weight, bias, None, None, path, config)
        second = _plan(z_pair, coeff, other, other_bias, None, None, path, config)
        return lambda z, coeff, weight, bias, *others: (
            *first(z, coeff, weight, bias, None, None),
            *second(z, coeff, *others, None, None),
        )
    launch = plan_linear(
        z_pair,
        weight,
        None,
        None,
        bias,
        None,
        z_pair.dtype,
        layout[0],
        record=True,
        others=() if other is None else (other,),
    )
    return lambda z_pair, coeff, weight, bias, other, other_bias: launch(
        z_pair, weight, bias, None, None, None, coeff, other, other_bias, *[None] * 4
    )


library.define(
    "triton_record_linears(Tensor z_pair, Tensor[] weights, Tensor?[] biases, Tensor coeff, str?"
    " path) -> Tensor[]",
    launch_record,
)


@library.fake("triton_record_linears")
def _(
    z_pair: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    coeff: Tensor,
    path: str | None,
) -> list[Tensor]:
    rows = z_pair.shape[0]
    outputs = []
    for weight in weights:
        outputs.append(z_pair.new_empty((rows, weight.shape[0])))
        outputs.append(z_pair.new_empty((rows // 2, weight.shape[0]), dtype=torch.float32))
    return outputs


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
        _check(z_pair, weight, bias)
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
    """:func:`record_linear` of each weight and bias, bit for bit; two share a launch if they have
    the same configuration and layout.
    """
    arguments = (z_pair, weights, biases, direction.coeff, path)
    if needs_op(z_pair, *weights, *biases):
        for of in zip(weights, biases, strict=True):
            _check(z_pair, *of, direction.coeff)
        flat = torch.ops.icl_patch.triton_record_linears(*arguments)
    else:
        flat = launch_record(*arguments)
    return [Recorded(y, u, direction) for y, u in zip(flat[::2], flat[1::2], strict=True)]


def _check(
    z_pair: Tensor, weight: Tensor, bias: Tensor | None, coeff: Tensor | None = None
) -> None:
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
