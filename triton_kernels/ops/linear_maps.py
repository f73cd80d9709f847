"""Several linear maps of one input, in few launches."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from icl_patch.checks import check_patched_linear
from icl_patch.kernels.ops.linear import plan_linear
from icl_patch.kernels.runtime.config import Config, config_for, gpu_name
from icl_patch.kernels.runtime.launching import cached_launch, define, needs_op


def plan_maps(
    z: Tensor, flat: Sequence[Any], config: Config | None = None, *, record: bool = False
) -> Callable[..., list[Tensor]]:
    """Plan the outputs of maps, from z, the coefficients or None, and each map's weight and bias,
    as they lie in ``flat``.

    Up to three neighbours share a launch if they have the same arithmetic and layout, of maps to
    record up to two.
    """
    maps, most, runs = list(zip(flat[::2], flat[1::2], strict=True)), 2 if record else 3, []
    configs = [
        config or config_for(gpu_name(z.device), weight.dtype, len(weight)) for weight, _ in maps
    ]
    alike = [
        (of.arithmetic, weight.stride(), bias is None or bias.stride())
        for of, (weight, bias) in zip(configs, maps, strict=True)
    ]
    i = 0
    while i < len(maps):
        stop = i + 1
        while stop < min(i + most, len(maps)) and alike[stop] == alike[i]:
            stop += 1
        (weight, bias), further = maps[i], [of for of, _ in maps[i + 1 : stop]]
        launch = plan_linear(
            z, weight, z.dtype, configs[i], bias=bias, record=record, further=further
        )
        runs.append((slice(2 * i, 2 * stop), launch))
        i = stop

    def call(z: Tensor, coeff: Tensor | None, *flat: Tensor | None) -> list[Tensor]:
        outputs: list[Tensor] = []
        for run, launch in runs:
            (weight, bias, *others), absent = flat[run], [None] * 6
            further = [*others, *absent][:4]
            made = launch(z, weight, bias, None, None, None, coeff, *further)
            outputs += [made] if isinstance(made, Tensor) else made
        return outputs

    return call


def _plan(z: Tensor, *rest: Any) -> Callable[..., list[Tensor]]:
    *flat, config = rest
    for weight, bias in zip(flat[::2], flat[1::2], strict=True):
        check_patched_linear(z, weight, bias=bias)
    planned = plan_maps(z, flat, config)
    return lambda z, *flat: planned(z, None, *flat)


def launch_maps(
    z: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    config: Config | None = None,
) -> list[Tensor]:
    """:func:`linear_maps` with a configuration, straight to the kernel."""
    maps = (x for of in zip(weights, biases, strict=True) for x in of)
    return cached_launch(_plan, (z, *maps), config)


_linear_maps = define(
    "linear_maps",
    "(Tensor z, Tensor[] weights, Tensor?[] biases) -> Tensor[]",
    lambda z, weights, _: [z.new_empty((z.shape[0], weight.shape[0])) for weight in weights],
    launch_maps,
)


def linear_maps(
    z: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """``y = z Wᵀ + b`` for each weight and bias, with the bits of
    :func:`icl_patch.kernels.patched_linear`; neighbours of the same arithmetic and layout share a
    launch.

    Args:
        z: (M, K) fp32, bf16 or fp16.
        weights, biases: each as for :func:`icl_patch.kernels.patched_linear`.

    Returns:
        (M, N) for each weight, in z's dtype. Not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or a device does not fit.
    """
    if not needs_op(z, *weights, *biases):
        return launch_maps(z, weights, biases)
    for weight, bias in zip(weights, biases, strict=True):
        check_patched_linear(z, weight, bias=bias)
    outputs: list[Tensor] = _linear_maps(z, weights, biases)
    return outputs
