"""Linear maps of one input in one launch: gate and up, or q, k and v. Each has the bits of a launch
of its own.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from icl_patch.kernels.ops.direction import ReadDirection
from icl_patch.kernels.ops.linear import (
    Map,
    check_inputs,
    plan_before,
    plan_linear,
    product_path,
    sums_coefficients,
)
from icl_patch.kernels.ops.recording import Recorded, check_pair
from icl_patch.kernels.runtime import library
from icl_patch.kernels.runtime.config import Config, config_for, gpu_name
from icl_patch.kernels.runtime.launching import cached_launch, needs_op

MOST = 3
"""So many maps share a launch; more take several."""

Optional = Sequence[Tensor | None] | None


def launch_linears(
    z: Tensor,
    weights: Sequence[Tensor],
    us: Sequence[Tensor | None],
    vs: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    coeff: Tensor | None,
    out_dtype: torch.dtype | None,
    path: str | None,
    config: Config | None = None,
) -> list[Tensor]:
    """:func:`patched_linears` straight to the kernel; with ``coeff`` (M, 1) :func:`record_linears`:
    each map's y_pair and u.
    """
    flat = [x for of in zip(weights, biases, us, vs, strict=True) for x in of]
    outputs: list[Tensor] = cached_launch(_plan, (z, coeff, *flat), out_dtype, path, config)
    return outputs


def _plan(z: Tensor, coeff: Tensor | None, *rest: Any) -> Callable[..., list[Tensor]]:
    *flat, out_dtype, path, config = rest
    record = coeff is not None
    rows = len(z) // 2 if record else len(z)

    def planned(of: Map) -> tuple[Config, Map]:
        weight, bias, u, v = of
        if record:
            check_pair(z, weight, bias, coeff)
        else:
            check_inputs(z, weight, u, v, bias, None, out_dtype)
        if u is not None and v is not None and u.dim() == 2:
            u, v = u.unsqueeze(1), v.unsqueeze(1)
        chosen = config or config_for(
            gpu_name(z.device), weight.dtype, len(weight), path or product_path(rows)
        )
        return chosen, (weight, bias, u, v)

    maps = [planned(tuple(flat[i : i + 4])) for i in range(0, len(flat), 4)]
    launches = []
    for (chosen, _), alike in groupby(maps, key=lambda planned: _form(*planned)):
        group = [of for _, of in alike]
        u = group[0][2]
        alone = u is not None and not sums_coefficients(chosen, rows, u.shape[1])
        most = 1 if alone else MOST
        for i in range(0, len(group), most):
            launches.append(
                _launch(z, group[i : i + most], out_dtype or z.dtype, chosen, record=record)
            )

    def call(z: Tensor, coeff: Tensor | None, *flat: Tensor | None) -> list[Tensor]:
        outputs: list[Tensor] = []
        for count, launch in launches:
            outputs += launch(z, coeff, *flat[: 4 * count])
            flat = flat[4 * count :]
        return outputs

    return call


def _form(config: Config, of: Map) -> tuple[Config, tuple[Any, ...]]:
    """Maps that can share a launch have the same."""
    strides = tuple(x if x is None else (x.dtype, x.stride()) for x in of)
    return config, (*strides, of[2] if of[2] is None else of[2].shape[:2])


def _launch(
    z: Tensor, group: Sequence[Map], dtype: torch.dtype, config: Config, *, record: bool
) -> tuple[int, Callable[..., Sequence[Tensor]]]:
    """The number of maps, and their launch."""
    weight, bias, u, v = group[0]
    before = plan_before(z, v, None, config)
    launch = plan_linear(
        z, weight, u, v, bias, None, dtype, config, record=record, others=group[1:]
    )
    absent = (None,) * (4 * (MOST - len(group)))

    def call(z: Tensor, coeff: Tensor | None, *flat: Tensor | None) -> Sequence[Tensor]:
        if before is not None:
            coeff = before(z, flat[3], None)
        found = launch(z, *flat[:4], None, coeff, *flat[4:], *absent)
        return found if isinstance(found, tuple) else [found]

    return len(group), call


library.define(
    "triton_linears(Tensor z, Tensor[] weights, Tensor?[] us, Tensor?[] vs, Tensor?[] biases,"
    " Tensor? coeff, ScalarType? out_dtype, str? path) -> Tensor[]",
    launch_linears,
)


@library.fake("triton_linears")
def _(
    z: Tensor,
    weights: Sequence[Tensor],
    us: Sequence[Tensor | None],
    vs: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    coeff: Tensor | None,
    out_dtype: torch.dtype | None,
    path: str | None,
) -> list[Tensor]:
    outputs = []
    for weight in weights:
        outputs.append(z.new_empty((z.shape[0], weight.shape[0]), dtype=out_dtype or z.dtype))
        if coeff is not None:
            size = (z.shape[0] // 2, weight.shape[0])
            outputs.append(z.new_empty(size, dtype=torch.float32))
    return outputs


def _run(z: Tensor, weights: Sequence[Tensor], *args: Any) -> list[Tensor]:
    if not needs_op(z, *weights):
        return launch_linears(z, weights, *args)
    outputs: list[Tensor] = torch.ops.icl_patch.triton_linears(z, weights, *args)
    return outputs


def patched_linears(
    z: Tensor,
    weights: Sequence[Tensor],
    us: Optional = None,
    vs: Optional = None,
    biases: Optional = None,
    *,
    out_dtype: torch.dtype | None = None,
    path: str | None = None,
) -> list[Tensor]:
    """``[patched_linear(z, W, u, v, b) for W, u, v, b in zip(weights, us, vs, biases)]`` bit for
    bit, in one launch for up to three neighbours of the same configuration and layout.

    Args:
        z: (M, K), as for :func:`icl_patch.kernels.patched_linear`.
        weights: (N_i, K) each.
        us, vs, biases: one for each weight, or None; None for none at all. Maps with patches share
            a launch while the kernel computes their coefficients itself (``Config.fused``).
        out_dtype, path: as for ``patched_linear``.

    Returns:
        (M, N_i) each. Not differentiable.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or a length does not fit.
    """
    none = [None] * len(weights)
    return _run(z, weights, us or none, vs or none, biases or none, None, out_dtype, path)


def record_linears(
    z_pair: Tensor,
    weights: Sequence[Tensor],
    biases: Optional = None,
    *,
    direction: ReadDirection,
    path: str | None = None,
) -> list[Recorded]:
    """``[record_linear(z_pair, W, b, direction=direction) for W, b in zip(weights, biases)]`` bit
    for bit, in one launch for up to three neighbours of the same configuration and layout.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or a length does not fit.
    """
    none = [None] * len(weights)
    flat = _run(z_pair, weights, none, none, biases or none, direction.coeff, None, path)
    return [Recorded(y, u, direction) for y, u in zip(flat[::2], flat[1::2], strict=True)]
