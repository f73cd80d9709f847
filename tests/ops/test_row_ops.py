"""The norms, the gated product and the products of experts in the implementation that runs here;
``test_dispatch.py`` runs the checks on the others.
"""

import itertools

import pytest
import torch
from support import expert_products, row_ops
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
from icl_patch.ops import reference

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
    of = expert_products.case((9, 4, 6, 515, 1000), torch.bfloat16, False, True)

    def run() -> list[Tensor]:
        z_pair, delta, direction = ops.norm_pair(x[:6], up[0], 1e-5)
        gated = [ops.gated_product(x, up, activation) for activation in ("silu", "gelu_tanh")]
        normed = ops.rms_norm(x, up, 1e-5)
        return [*gated, z_pair, delta, direction.v, normed, ops.expert_linear(*of[:4])]

    alone = run()
    for _ in numbers_of_threads(1, 2, 3):
        assert all(same_bits(one, other) for one, other in zip(run(), alone, strict=True))
    for row in zip(x.split(1), up.split(1), alone[0].split(1), strict=True):
        assert same_bits(ops.gated_product(*row[:2], "silu"), row[2])


@needs_native
@pytest.mark.parametrize("grad", [True, False])
@every_dtype
def test_expert_products(dtype: torch.dtype, grad: bool) -> None:
    """With gradients on, the arguments are checked first; without, they are tried."""
    with torch.set_grad_enabled(grad), poisoned_memory():
        expert_products.check_products(ops.expert_linear, dtype, bits=dtype != torch.float64)


@needs_native
def test_a_slot_has_the_bits_of_the_plain_map() -> None:
    of = expert_products.case((5, 2, 3, 33, 257), torch.bfloat16, True, True)
    out = ops.expert_linear(*of[:4])
    for row, slot in itertools.product(range(5), range(2)):
        own = {"weight": of.weight[of.expert[row, slot]], "bias": of.bias[of.expert[row, slot]]}
        alone = ops.patched_linear(of.x[row, slot : slot + 1], **own, path="gemv")
        assert same_bits(out[row, slot], alone[0])


def test_what_nobody_can_look_at_is_not_another_experts() -> None:
    """Where the experts are traced, one that there is not gives 0 or an error."""
    of = expert_products.case((3, 2, 4, 5, 7), torch.float32, False, True)
    for wrong in (-1, 4):
        out = reference.expert_linear(
            of.x, of.weight, of.expert.clone().fill_(wrong), of.bias, torch.float32, gather=True
        )
        assert not out.any()
