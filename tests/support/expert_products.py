"""What ``expert_linear`` must do in whichever implementation serves it, against fp64."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from support.numeric import UNIT, by_columns, in_gaps, normal, poisoned, same_bits, seeded
from torch import Tensor

# Rows, experts that each chooses, experts, outputs, inputs.
SMALL = [(1, 1, 1, 1, 1), (3, 2, 3, 9, 70)]
SIZES = [*SMALL, (3, 2, 5, 33, 70), (7, 3, 4, 1, 257), (40, 2, 3, 65, 64), (2, 8, 8, 18, 1)]

Run = Callable[..., Tensor]


class Case(NamedTuple):
    """Arguments, and what each slot reads as (M, k, K)."""

    x: Tensor
    weight: Tensor
    expert: Tensor
    bias: Tensor | None
    slots: Tensor


def case(
    sizes: tuple[int, ...], dtype: torch.dtype, own: bool, biased: bool, device: str = "cpu"
) -> Case:
    rows, chosen, experts, n, k = sizes
    rng = seeded(rows + n)
    x = normal(rng, rows, chosen, k, dtype=dtype) if own else normal(rng, rows, k, dtype=dtype)
    weight, bias = normal(rng, experts, n, k, dtype=dtype), normal(rng, experts, n, dtype=dtype)
    expert = torch.randint(0, experts, (rows, chosen), generator=rng)
    slots = x if own else x.unsqueeze(1).expand(-1, chosen, -1)
    made = (x, weight, expert, bias if biased else None, slots)
    return Case(*(None if part is None else part.to(device) for part in made))


def check_formula(of: Case, out: Tensor, dtype: torch.dtype, cut: bool = False) -> None:
    """One rounding to ``dtype`` on top of sums in fp32 (fp64); ``cut``: where Triton's interpreter
    cuts bf16 off.
    """
    bias = torch.zeros_like(of.weight[..., 0]) if of.bias is None else of.bias
    weight, bias = of.weight.double()[of.expert], bias.double()[of.expert]
    expected = torch.einsum("mjnk,mjk->mjn", weight, of.slots.double()) + bias
    size = torch.einsum("mjnk,mjk->mjn", weight.abs(), of.slots.double().abs()) + bias.abs()
    wide = torch.promote_types(of.x.dtype, torch.float32)
    rounding = UNIT[dtype] * (2 if cut and dtype == torch.bfloat16 else 1)
    assert (out.dtype, out.shape) == (dtype, expected.shape)
    limit = 1.01 * rounding * expected.abs() + 32 * UNIT[wide] * size
    assert ((out.double() - expected).abs() <= limit).all()


def check_products(
    run: Run,
    dtype: torch.dtype,
    sizes: list[tuple[int, ...]] = SIZES,
    device: str = "cpu",
    bits: bool = True,
    cut: bool = False,
) -> None:
    """Both layouts of what is read and of the weight, strides, dtypes; ``bits``: no slot sees where
    the others are.
    """
    for shape, own, biased in itertools.product(sizes, (False, True), (False, True)):
        of = case(shape, dtype, own, biased, device)
        arguments = (of.x, of.weight, of.expert, of.bias)
        for out_dtype in {dtype, torch.promote_types(dtype, torch.float32)}:
            check_formula(of, run(*arguments, out_dtype=out_dtype), out_dtype, cut)
        out = run(*arguments)
        changed = run(of.x, by_columns(of.weight), of.expert.to(torch.int32), of.bias)
        check_formula(of, changed, dtype, cut)
        if not bits:
            continue
        for other in (poisoned, in_gaps):
            bias = None if of.bias is None else other(of.bias)
            found = run(other(of.x), poisoned(of.weight), by_columns(of.expert), bias)
            assert same_bits(found, out)
        last = slice(len(of.x) // 2, None)
        assert same_bits(run(of.x[last], of.weight, of.expert[last], of.bias), out[last])
        assert same_bits(run(of.x.flip(0), of.weight, of.expert.flip(0), of.bias), out.flip(0))
    for shape in ((0, 2, 3, 5, 7), (3, 0, 3, 5, 7), (3, 2, 3, 0, 7), (3, 2, 3, 5, 0)):
        of = case(shape, dtype, False, True, device)
        check_formula(of, run(of.x, of.weight, of.expert, of.bias), dtype)
