"""What the Triton kernels of ``patched_linear`` must do; see :mod:`kernel_checks`."""

import itertools
from collections.abc import Container, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import interpreter, linear_cases
from support.linear_cases import LAYOUTS, Case, check_linear, check_rows_without_a_patch
from support.numeric import (
    NARROW,
    UNIT,
    by_columns,
    every_narrow,
    in_gaps,
    normal,
    poisoned,
    same_bits,
    seeded,
)
from support.row_ops import unit
from torch import Tensor

from icl_patch import kernels
from icl_patch.kernels.ops import low_rank
from icl_patch.kernels.ops.coefficients import plan_coefficients
from icl_patch.kernels.ops.linear import launch_linear
from icl_patch.kernels.ops.recording import launch_record
from icl_patch.kernels.runtime import launching
from icl_patch.kernels.runtime.config import Config, config_for
from icl_patch.kernels.runtime.launching import INTERPRETED

if INTERPRETED:
    interpreter.prepare()
DEVICE = "cpu" if INTERPRETED else "cuda"
linear_case = partial(linear_cases.linear_case, device=DEVICE)
# bf16 stands for both narrow ones in the interpreter, which is slow; fp16 there:
# test_both_kernels_serve_every_dtype, test_one_rounding
SOME = {name: dtype for name, dtype in NARROW.items() if name != "fp16" or not INTERPRETED}
STRESS = [pytest.mark.stress] if INTERPRETED else []  # heavy for the interpreter alone
every_float = pytest.mark.parametrize("dtype", SOME.values(), ids=SOME)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def heavy(*values: Any) -> Any:
    """A case that runs with the stress tests where it is interpreted."""
    return pytest.param(*values, marks=STRESS)


def all_of(*axes: Iterable[Any], light: Container[Any]) -> list[Any]:
    """Every case with one value of each axis; those that are not light are heavy."""
    return [of if of in light else heavy(*of) for of in itertools.product(*axes)]


# fp32 and bf16, of which one is heavy
bf16_heavy, fp32_heavy = (
    pytest.mark.parametrize(["dtype"], all_of(SOME.values(), light=[(light,)]), ids=SOME)
    for light in (torch.float32, torch.bfloat16)
)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN."""
    empty = torch.empty

    def filled(*size: object, **options: object) -> Tensor:
        out = empty(*size, **options)
        written_by_kernels = out.is_floating_point() and out.device.type == DEVICE
        return out.fill_(torch.nan) if written_by_kernels else out

    monkeypatch.setattr(torch, "empty", filled)


# patched_linear

SIZES = [(1, 70, 130), (2, 1, 63), (3, 65, 1), (5, 33, 200)]
SIZES += [(16, 40, 129), (17, 31, 70), (40, 66, 64)]
RANKS = [1, 2, 3, 1, 4, 5, 1]


# of fp32 the factors' dtype is its own; of bf16 factors in fp32 are in the next tests
@pytest.mark.parametrize(
    ("dtype", "own_factors"),
    all_of(
        SOME.values(),
        (False, True),
        light=[(dtype, dtype != torch.float32) for dtype in SOME.values()],
    ),
)
@every_layout
def test_patched_linear(dtype: torch.dtype, layout: str, own_factors: bool) -> None:
    # in the interpreter one size for each
    number = 2 * LAYOUTS.index(layout) + own_factors + 8 * (dtype == torch.float32)
    for seed, (sizes, rank) in enumerate(zip(SIZES, RANKS, strict=True)):
        if INTERPRETED and seed != number % len(SIZES):
            continue
        factor_dtype = dtype if own_factors else torch.float32
        case = linear_case(layout, sizes, rank, dtype, factor_dtype, seed % 3 > 0, seed)
        check_linear(case, kernels.patched_linear(**case.arguments), dtype)
        no_patch = replace(case, row_u=0 * case.row_u)
        check_linear(no_patch, kernels.patched_linear(**case.plain), dtype)


# ranks, several segments of the coefficients of which the last is not full, and nothing
FURTHER = [
    *(("row-rank", (17, 12, 70), rank) for rank in (1, 2, 3)),
    heavy("row-rank", (17, 12, 70), 16),
    *(("row-rank", (rows, 12, 70), rank) for rows, rank in ((2, 3), (1, 64))),
    heavy("row-rank", (2, 12, 70), 64),
    ("row", (2, 16, 4500), 1),
    *((of, sizes, 2) for of in LAYOUTS for sizes in ((0, 7, 9), (3, 0, 9), (3, 7, 0), (20, 7, 0))),
]


@pytest.mark.parametrize(("layout", "sizes", "rank"), FURTHER)
def test_further_sizes(layout: str, sizes: tuple[int, int, int], rank: int) -> None:
    case = linear_case(layout, sizes, rank, torch.bfloat16, seed=rank)
    out = kernels.patched_linear(**case.arguments, out_dtype=torch.float32)
    check_linear(case, out, torch.float32)


# in the interpreter each layout once; many rows of the pool: test_the_low_rank_term_alone
LIGHT = [(torch.float32, "row-rank", 3), (torch.float32, "shared", 3)]
LIGHT += [(torch.bfloat16, "row", 3), (torch.bfloat16, "pool", 3)]


@pytest.mark.parametrize(
    ("dtype", "layout", "rows"), all_of(SOME.values(), LAYOUTS, (3, 18), light=LIGHT)
)
def test_strides(dtype: torch.dtype, layout: str, rows: int) -> None:
    case = linear_case(layout, (rows, 35, 70), 2, dtype)
    for stride in (poisoned, by_columns, in_gaps):
        changed = {name: stride(getattr(case, name)) for name in ("z", "weight", "u", "v")}
        strided = replace(
            case, **changed, bias=(poisoned if stride is by_columns else stride)(case.bias)
        )
        assert not strided.weight.is_contiguous()
        check_linear(strided, kernels.patched_linear(**strided.arguments), dtype)
    repeated = replace(case, z=case.z[:1].expand(rows, -1))
    check_linear(repeated, kernels.patched_linear(**repeated.arguments), dtype)


@pytest.mark.parametrize("out_dtype", NARROW.values(), ids=NARROW)
@every_float
def test_one_rounding(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Of the fp32 sum with the patch in it."""
    case = linear_case("row", (3, 33, 100), 1, dtype)
    exact = kernels.patched_linear(**case.arguments, out_dtype=torch.float32)
    check_linear(case, exact, torch.float32)
    out = kernels.patched_linear(**case.arguments, out_dtype=out_dtype)
    if INTERPRETED and out_dtype == torch.bfloat16:
        assert ((out.float() - exact).abs() <= unit(out_dtype) * exact.abs()).all()
    else:
        assert same_bits(out, exact.to(out_dtype))


@pytest.mark.parametrize(
    ("dtype", "rows"), all_of(SOME.values(), (6, 20), light=[(torch.float32, 6)])
)
def test_index_minus_one_gives_the_bits_of_the_plain_map(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the row before the first of the pool get read."""
    monkeypatch.setattr(interpreter, "tensors_begin_behind_guards", True)
    case = linear_case("pool", (rows, 13, 70), 2, dtype)
    check_rows_without_a_patch(kernels.patched_linear, case)


# One order of summation


def rows_keep_their_bits(case: Case, counts: list[int]) -> bool:
    """Whether the rows of the whole batch come out the same again, alone, in smaller batches and in
    other places.
    """

    def run(of: Case) -> Tensor:
        return kernels.patched_linear(**of.arguments, out_dtype=torch.float32)

    whole = run(case)
    return all(
        same_bits(run(case.rows(part)), whole[part])
        for count in (*counts, len(whole))
        for start in {0, len(whole) - count}
        for part in [slice(start, start + count)]
    )


# Few rows; coefficients that are summed in one launch and in two (of one batch: the next test);
# more rows than a block has.
BATCHES = {
    "few": ("row", (16, 9, 130), 1, [11] if INTERPRETED else list(range(1, 16))),
    "ranked": ("row-rank", (16, 9, 130), 4, [1]),
    "many": ("row", (40, 9, 100), 1, [17] if INTERPRETED else [1, 17]),
}


@pytest.mark.parametrize(
    ("dtype", "batch"),
    all_of(SOME.values(), BATCHES, light=[(torch.float32, "few"), (torch.bfloat16, "many")]),
)
def test_a_row_does_not_see_its_batch(dtype: torch.dtype, batch: str) -> None:
    layout, sizes, rank, counts = BATCHES[batch]
    case = linear_case(layout, sizes, rank, dtype)
    assert rows_keep_their_bits(case, counts)
    check_linear(case, kernels.patched_linear(**case.arguments), dtype)


@pytest.mark.parametrize(
    ("dtype", "rows", "rank"),
    all_of(SOME.values(), (1, 3), (1, 2), light=[(torch.float32, 1, 1), (torch.bfloat16, 3, 2)]),
)
def test_coefficients_have_the_same_bits_wherever_they_are_summed(
    dtype: torch.dtype, rows: int, rank: int
) -> None:
    k = 2200 if INTERPRETED else 4300  # segments are of 2048
    case = linear_case("row-rank", (rows, 7, k), rank, dtype)
    coeff = coefficients(case.z, case.v)
    exact = torch.einsum("mk,mrk->mr", case.z.double(), case.row_v)
    assert (coeff - exact).abs().max() <= 64 * UNIT[torch.float32] * k
    for n in (20,) if INTERPRETED and rows > 1 else (20, 5000):  # steps of 256 and of 128 elements
        config = config_for("", dtype, n)
        configs = (replace(config, fused=limit) for limit in (4096, 0))
        inside, before = (
            launch_linear(**case.arguments, out_dtype=torch.float32, config=each)
            for each in configs
        )
        assert same_bits(inside, before)
    # Older interpreters round the product of a fused multiply-add.
    orders = [
        documented_order(case.z.unsqueeze(1), case.v, fused)
        for fused in ((True, False) if INTERPRETED else (True,))
    ]
    assert any(same_bits(coeff, order) for order in orders)


def coefficients(z: Tensor, v: Tensor) -> Tensor:
    return plan_coefficients(z, v, None)(z, v, None)


def documented_order(z: Tensor, v: Tensor, fused: bool) -> Tensor:
    """Lanes of 64, segments of 32, neighbours first."""
    products = z.double() * v.double() if fused else z.float() * v.float()
    products = F.pad(products, (0, -z.shape[-1] % 2048)).unflatten(-1, (-1, 32, 64))
    total = torch.zeros_like(products[..., 0, 0, :], dtype=torch.float32)
    for segment in products.unbind(-3):
        partial = torch.zeros_like(total)
        for chunk in segment.unbind(-2):
            partial = (partial + chunk).float()
        total = total + partial
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return total.squeeze(-1)


@pytest.mark.parametrize("dot", [False, True], ids=["fma", "dot"])
@every_narrow
def test_both_kernels_serve_every_dtype(dtype: torch.dtype, dot: bool) -> None:
    case = linear_case("row", (3, 33, 200), 1, dtype)
    config = Config(dot=dot, block_m=16, block_n=16, block_k=64, num_warps=4, num_stages=2)
    check_linear(case, launch_linear(**case.arguments, config=config), dtype)


@pytest.mark.parametrize("sums", [heavy(2), heavy(4), 16])
def test_running_sums_take_parts_of_each_step_and_are_added_in_pairs(sums: int) -> None:
    """With one product in each part the sums are exact, and the order of the pairs shows. A
    recording and its replay add in the same one.
    """
    config = Config(True, 16, 16, 256, 2, 3, sums=sums)
    parts = normal(seeded(0), 20, sums, dtype=torch.bfloat16).to(DEVICE)
    weight = torch.zeros(20, 600, dtype=torch.bfloat16, device=DEVICE)
    for part in range(sums):  # in the first or the second step
        weight[:, 256 * (part % 2) + part * 256 // sums] = parts[:, part]
    total = parts.float()
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    ones = torch.ones(3, 600, dtype=torch.bfloat16, device=DEVICE)
    out = launch_linear(ones, weight, out_dtype=torch.float32, config=config)
    assert same_bits(out, total.T.expand(3, -1))
    z = normal(seeded(sums), 6, 600, dtype=torch.bfloat16).to(DEVICE)
    weight = normal(seeded(1), 20, 600, dtype=torch.bfloat16).to(DEVICE)
    v, _, coeff = kernels.read_direction(z[3:])
    y_pair, u = launch_record(z, [weight], [None], coeff, config=config)
    assert same_bits(launch_linear(z[3:], weight, u, v, config=config), y_pair[3:])
    assert same_bits(launch_linear(z[:3], weight, config=config), y_pair[:3])
    assert same_bits(launch_linear(z[1:2], weight, config=config), y_pair[1:2])


@pytest.mark.parametrize("layout", ["row", "shared", "pool"])
@fp32_heavy
def test_the_low_rank_term_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, layout: str
) -> None:
    """On the plain map before its rounding it has the bits of the whole, whichever way the
    coefficients are summed here and there.
    """
    for rows in (3, 18) if layout == "pool" else (3,):
        # more than a block has, or not
        many = rows == 3 and layout == "pool" and dtype == torch.bfloat16
        n = 1100 if many or not INTERPRETED else 70
        case = linear_case(layout, (rows, n, 70), 2, dtype)
        plain = kernels.patched_linear(**case.plain, out_dtype=torch.float32)
        index = None if case.index is None else in_gaps(case.index)
        parts = {"u": in_gaps(case.u), "v": case.v, "index": index}
        for out_dtype in {dtype} if many and INTERPRETED else {torch.float32, dtype}:
            expected = kernels.patched_linear(**case.arguments, out_dtype=out_dtype)
            for again in (low_rank._MOST_AGAIN, -1):
                launching._launches.clear()
                with monkeypatch.context() as patched:
                    patched.setattr(low_rank, "_MOST_AGAIN", again)
                    out = kernels.add_low_rank(in_gaps(plain), case.z, **parts, out_dtype=out_dtype)
                assert same_bits(out, expected)
    if layout == "pool":
        nowhere = torch.full((len(plain),), -1, device=DEVICE)
        nothing = kernels.add_low_rank(plain, case.z, case.u[:0], case.v[:0], index=nowhere)
        assert same_bits(nothing, plain)
    if layout == "shared":
        assert kernels.add_low_rank(plain[:0], case.z[:0], case.u, case.v).shape == (0, n)
