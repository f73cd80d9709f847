"""The norms and the gated product in the implementation that runs here; ``test_dispatch.py`` runs
the checks on the others.
"""

import pytest
import torch
from support import row_ops
from support.inversion import needs_native
from support.numeric import (
    every_dtype,
    every_narrow,
    normal,
    numbers_of_threads,
    poisoned_memory,
    same_bits,
    seeded,
)
from support.rows import uniform
from torch import Tensor

from icl_patch import ops

every_activation = pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])


@every_dtype
def test_row_ops(dtype: torch.dtype) -> None:
    with poisoned_memory():
        row_ops.check_all(dtype)


# What the native ops promise beyond that


@needs_native
@every_activation
def test_the_activation_to_two_units_in_the_last_place(activation: str) -> None:
    for size in (0.1, 1, 5, 30, 120, 1e4, 1e30):
        gate = uniform(seeded(0), -size, size, 4, 1 << 15).float()
        y = ops.gated_product(gate, torch.ones_like(gate), activation).double()
        expected = row_ops.activation_by_formula(gate.double(), activation)
        spacing = torch.exp2(torch.floor(torch.log2(expected.abs().clamp(min=2.0**-126))) - 23)
        assert ((y - expected).abs() <= 2 * spacing).all()


@needs_native
@every_activation
@every_narrow
def test_the_product_rounds_where_the_modules_do(dtype: torch.dtype, activation: str) -> None:
    gate, up = (2 * normal(seeded(0), 2, 5, 777)).to(dtype)
    act = ops.gated_product(gate.float(), torch.ones_like(gate).float(), activation)
    assert same_bits(ops.gated_product(gate, up, activation), act.to(dtype) * up)


@needs_native
@every_narrow
def test_the_norm_rounds_where_the_modules_do(dtype: torch.dtype) -> None:
    x, scale = (normal(seeded(s), 5, 777, dtype=dtype) for s in range(2))
    normed = ops.rms_norm(x.float(), torch.ones(777), 1e-5)
    first = (normed.to(dtype).float() * scale.float()).to(dtype)
    assert same_bits(ops.rms_norm(x, scale, 1e-5), first)
    last = ops.rms_norm(x, scale, 1e-5, scale_offset=1.0, cast_first=False)
    assert same_bits(last, (normed * (scale.float() + 1)).to(dtype))
    other = ops.rms_norm(x, scale, 1e-5, scale_offset=1.0)
    assert dtype == torch.float32 or not same_bits(last, other)


@needs_native
def test_threads_do_not_change_a_bit() -> None:
    x, up = (normal(seeded(s), 7, 6001, dtype=torch.bfloat16) for s in range(2))

    def run() -> list[Tensor]:
        z_pair, delta, direction = ops.norm_pair(x[:6], up[0], 1e-5)
        gated = [ops.gated_product(x, up, activation) for activation in ("silu", "gelu_tanh")]
        return [*gated, z_pair, delta, direction.v, ops.rms_norm(x, up, 1e-5)]

    alone = run()
    for _ in numbers_of_threads(2, 3):
        assert all(same_bits(one, other) for one, other in zip(run(), alone, strict=True))
    for row in zip(x.split(1), up.split(1), alone[0].split(1), strict=True):
        assert same_bits(ops.gated_product(*row[:2], "silu"), row[2])
