"""The linear ops against the materialised matrix in fp64."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from support import row_ops
from support.linear_cases import LAYOUTS, Case, check_rows_without_a_patch, linear_case
from support.numeric import (
    FLOATS,
    UNIT,
    by_columns,
    every_dtype,
    in_gaps,
    normal,
    same_bits,
    seeded,
)
from support.op_calls import (
    DIFFERENTIABLE,
    check_derivatives,
    check_without_derivatives,
    read_by,
)
from torch import Tensor

from icl_patch import ops


def plain_map(case: Case, out_dtype: torch.dtype | None = None) -> Tensor:
    return ops.patched_linear(case.z, case.weight, bias=case.bias, out_dtype=out_dtype)


def patched_map(case: Case, **options: torch.dtype) -> Tensor:
    """With gradients off, where the native op is tried before all checks, it has the same bits."""
    out = ops.patched_linear(**case.arguments, **options)
    with torch.no_grad():
        assert same_bits(ops.patched_linear(**case.arguments, **options), out)
    return out


def check_linear(case: Case, out: Tensor, out_dtype: torch.dtype) -> None:
    """The change is accumulated in fp32 or fp64 and the sum rounded once; the plain output may be
    rounded to z's dtype before.
    """
    expected, size = case.expected()
    plain, plain_size = replace(case, row_u=0 * case.row_u).expected()
    assert (out.dtype, out.shape) == (out_dtype, expected.shape)
    dtypes = [x.dtype for x in (case.z, case.u, case.v)]
    unit, wide = (
        UNIT[functools.reduce(torch.promote_types, of, torch.float32)]
        for of in (dtypes, dtypes[:1])
    )
    length = case.z.shape[1] + case.row_u.shape[1] + 2
    rounding = max(UNIT[out_dtype], unit)
    tiny = torch.finfo(out_dtype).smallest_normal * UNIT[out_dtype]
    # The last summand is the reference's own error, which only counts in fp64.
    term_error = length * (unit * (size - plain_size) + 2 * 2.0**-53 * size)
    plain_error = UNIT[case.z.dtype] * plain.abs() + length * wide * plain_size
    bound = rounding * expected.abs() + plain_error + term_error
    assert ((out.double() - expected).abs() <= 1.01 * bound + 2 * tiny).all()
    # Tighter: on top of the plain output, which is not rounded yet.
    own = plain_map(case, torch.promote_types(case.z.dtype, torch.float32)).double()
    on_plain = own + (expected - plain)
    bound = rounding * on_plain.abs() + term_error + case.row_u.shape[1] * unit * own.abs()
    assert ((out.double() - on_plain).abs() <= 1.01 * bound + tiny).all()


SIZES = list(itertools.product((0, 1, 3, 17), (1, 63, 100), (1, 63, 100)))


@pytest.mark.parametrize("own_factors", [False, True], ids=["fp32-factors", "own-factors"])
@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
def test_patched_linear(dtype: torch.dtype, layout: str, own_factors: bool) -> None:
    for seed, sizes in enumerate(SIZES):
        rank = 1 + seed % 4
        factor_dtype = dtype if own_factors else torch.float32
        case = linear_case(layout, sizes, rank, dtype, factor_dtype, seed % 3 > 0, seed)
        for out_dtype in (dtype, list(FLOATS.values())[seed % 4]):
            check_linear(case, patched_map(case, out_dtype=out_dtype), out_dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
def test_patched_linear_strides(dtype: torch.dtype, layout: str) -> None:
    case = linear_case(layout, (7, 63, 100), 3, dtype)

    for stride in (by_columns, in_gaps):
        changed = {name: stride(getattr(case, name)) for name in ("z", "weight", "u", "v")}
        strided = replace(case, **changed)
        assert not strided.z.is_contiguous()
        assert not strided.weight.is_contiguous()
        check_linear(strided, patched_map(strided), dtype)
    repeated = replace(case, z=case.z[:1].expand(7, -1))
    check_linear(repeated, patched_map(repeated), dtype)


@pytest.mark.parametrize(
    "factor_dtype", [torch.float32, torch.float64], ids=["fp32-factors", "fp64-factors"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
def test_patched_linear_is_add_low_rank_on_the_plain_map(
    dtype: torch.dtype, layout: str, factor_dtype: torch.dtype
) -> None:
    """Bit for bit, before the plain map is rounded: what is recorded step by step is replayed in
    one launch. On any other output it is right to the rounding.
    """
    wide = torch.promote_types(dtype, torch.float32)
    for seed, sizes in enumerate((*SIZES, (3, 513, 1023), (18, 129, 257))):
        options = {"bias": seed % 2 > 0, "seed": seed}
        case = linear_case(layout, sizes, 1 + seed % 4, dtype, factor_dtype, **options)
        factors = {"u": case.u, "v": case.v, "index": case.index}
        for out_dtype in (dtype, torch.float64):
            out = ops.patched_linear(**case.arguments, out_dtype=out_dtype)
            plain = plain_map(case, wide)
            added = ops.add_low_rank(plain, case.z, **factors, out_dtype=out_dtype)
            assert same_bits(out, added)
            if out.numel() > 100:
                assert not torch.equal(out, plain.to(out_dtype))
        spread = in_gaps(plain.to(dtype))
        out = ops.add_low_rank(spread, case.z, **factors)
        alone = replace(case, weight=torch.zeros_like(case.weight), bias=None)
        term, size = alone.expected()
        expected = spread.double() + term
        rounding = 16 * UNIT[wide] * (size + spread.abs())
        assert out.dtype == dtype
        assert (
            (out.double() - expected).abs() <= 1.01 * UNIT[dtype] * expected.abs() + rounding
        ).all()


@every_dtype
@pytest.mark.parametrize("rows", [6, 17])
def test_index_minus_one_gives_the_bits_of_the_plain_map(rows: int, dtype: torch.dtype) -> None:
    case = linear_case("pool", (rows, 63, 100), 2, dtype)
    check_rows_without_a_patch(ops.patched_linear, case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autocast_rounds_nothing_even_where_gradients_are_wanted(layout: str) -> None:
    """There plain torch computes, whose products autocast would round."""
    case = linear_case(layout, (5, 17, 33), 2)
    arguments = {"u": case.u.requires_grad_(), "v": case.v, "index": case.index}
    plain = plain_map(case)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.add_low_rank(plain, case.z, **arguments), ops.patched_linear(**case.arguments)
    assert torch.equal(found[0], ops.add_low_rank(plain, case.z, **arguments))
    assert torch.equal(found[1], ops.patched_linear(**case.arguments))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_derivatives(name: str) -> None:
    for place in read_by(name):
        check_derivatives(name, place)


def test_results_without_derivatives() -> None:
    check_without_derivatives()


# read_direction, rms_normalize


@every_dtype
def test_read_direction(dtype: torch.dtype) -> None:
    row_ops.check_read_direction(dtype)
    v, inverse, _ = ops.read_direction(torch.ones(2, 0, 0, dtype=dtype))
    assert (v.shape, inverse.shape) == ((2, 0, 0), (2, 0))


def test_derivatives_beside_a_row_of_zeros() -> None:
    """That row has no direction: its results and their derivatives are 0."""
    z_pair, weight = (
        normal(seeded(s), *size, dtype=torch.float64) for s, size in ((0, (4, 9)), (1, (6, 9)))
    )
    z_pair[3] = 0
    z = z_pair[2:].clone().requires_grad_()
    v, inverse, _ = ops.read_direction(z)
    pulled = normal(seeded(2), 2, 9, dtype=torch.float64)
    (found,) = torch.autograd.grad((pulled * v).sum() + inverse.sum(), z)
    row, norm2 = z[0].detach(), z[0].detach().square().sum()
    expected = pulled[0] / norm2 - 2 * (pulled[0] @ row + 1) * row / norm2**2
    torch.testing.assert_close(found, torch.stack([expected, torch.zeros(9).double()]))
    both = z_pair.clone().requires_grad_()
    y_pair, change, _ = ops.record_linear(both, weight)
    # the row's output is its own, without a change
    (found,) = torch.autograd.grad(y_pair[3].sum() + change[1].sum(), both)
    expected = torch.zeros(4, 9).double()
    expected[1] = weight.sum(0)
    torch.testing.assert_close(found, expected)


@every_dtype
def test_rms_normalize(dtype: torch.dtype) -> None:
    x = normal(seeded(0), 2, 3, 63, dtype=dtype)
    x[0, 1] *= 1e-3
    x[1, 1] = 0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for eps in (1e-6, 1e-2, 0.5):
        out = ops.rms_normalize(x, eps)
        expected = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
        assert (out.dtype, out.shape) == (wide, x.shape)
        assert ((out.double() - expected).abs() <= 16 * UNIT[wide] * expected.abs()).all()
        assert not out[1, 1].any()
    x[1, 1] = 1
    rms = ops.rms_normalize(x, 0.0).double().square().mean(-1).sqrt()
    assert ((rms - 1).abs() <= 16 * UNIT[wide]).all()
