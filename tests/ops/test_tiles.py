"""The bf16 products on matrix tiles, whose instructions a model in C++ stands for: the kernel's
logic, on any processor.
"""

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.compiled import address, compiled, needs_compiler
from support.guard_pages import between_guards, status_of_child
from support.linear_cases import Case, linear_case
from support.numeric import UNIT, in_gaps, normal, poisoned, same_bits, seeded
from torch import Tensor

pytestmark = needs_compiler
SHAPES = [(1, 1), (7, 33), (16, 32), (65, 64), (129, 257), (70, 2089)]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """It takes 4 seconds to compile."""
    return compiled("tiles", "-O2")


def numbers(*values: int) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(value) for value in values]


def patched_linear(
    library: ctypes.CDLL,
    z: Tensor,
    weight: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    cut: int = 0,
    slots: Tensor | None = None,
) -> Tensor:
    """u (rows, rank, N) and v (rows, rank, K) contiguous; rows of weight contiguous."""
    y = torch.full((len(z), len(weight)), torch.nan, dtype=out_dtype)
    rank = 0 if u is None else u.shape[1]
    library.patched_linear(
        *numbers(len(z), len(weight), z.shape[1], rank, cut),
        address(z),
        *numbers(*z.stride()),
        address(weight),
        *numbers(weight.stride(0)),
        *map(address, (slots, bias, u, v)),
        ctypes.c_bool(out_dtype == torch.bfloat16),
        address(y),
    )
    return y


def case_of(rows: int, n: int, k: int) -> Case:
    """In bf16, with factors of rank 2 for each row in fp32."""
    return linear_case("row-rank", (rows, n, k), 2, torch.bfloat16, seed=n + k)


def run(library: ctypes.CDLL, of: Case, **options: object) -> Tensor:
    return patched_linear(library, of.z, of.weight, of.u, of.v, of.bias, **options)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_against_the_formula(library: ctypes.CDLL, n: int, k: int) -> None:
    for rows in (1, 3, 16, 17, 35, 50, 64, 81):
        of = case_of(rows, n, k)
        found, (expected, size) = run(library, of), of.expected()
        assert ((found.double() - expected).abs() <= 16 * UNIT[torch.float32] * size).all()
        assert same_bits(run(library, of, out_dtype=torch.bfloat16), found.bfloat16())


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_does_not_see_the_others(library: ctypes.CDLL, n: int, k: int) -> None:
    """Neither their number, from 1 to 64 and beyond, nor its place among them."""
    of = case_of(81, n, k)
    together = run(library, of)
    spans = [(0, rows) for rows in range(1, 65)] + [(place, place + 1) for place in range(1, 81)]
    for first, end in [*spans, (3, 20), (9, 58), (40, 81)]:
        rows = slice(first, end)
        assert same_bits(run(library, of.rows(rows)), together[rows]), rows


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_strides_and_threads_do_not_change_a_bit(library: ctypes.CDLL, rows: int) -> None:
    of = case_of(rows, 150, 170)
    plain = run(library, of)
    spread = replace(of, z=in_gaps(of.z), weight=poisoned(of.weight))
    for cut in (0, 16, 48, 144):
        assert same_bits(run(library, spread, cut=cut), plain)


def test_the_slots_of_experts(library: ctypes.CDLL) -> None:
    """A pass may take its rows from anywhere and put them back there."""
    z, weight, *_ = case_of(70, 50, 90).arguments.values()
    slots = torch.randperm(70, generator=seeded(0))
    plain = patched_linear(library, z, weight)
    assert same_bits(patched_linear(library, z, weight, slots=slots), plain)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_recording_has_the_bits_of_the_replay(library: ctypes.CDLL, n: int, k: int) -> None:
    for pairs in (1, 9, 32, 37):
        z, weight, _, v, *_ = case_of(2 * pairs, n, k).arguments.values()
        v = v[:pairs, :1].contiguous()
        y, u = torch.full((2 * pairs, n), torch.nan), torch.full((pairs, 1, n), torch.nan)
        library.record_linear(*numbers(pairs, n, k, 0), *map(address, (z, weight, v, y, u)))
        z_ctx, z = z[:pairs], z[pairs:]
        assert same_bits(y[:pairs], patched_linear(library, z_ctx, weight))
        assert same_bits(y[pairs:], patched_linear(library, z, weight, u, v))
        plain = patched_linear(library, z, weight)
        assert same_bits(u[:, 0], y[:pairs] - plain)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_nothing_is_read_beyond_the_weight(library: ctypes.CDLL, n: int, k: int) -> None:
    """In a process of its own, which dies there."""
    z, weight, *_ = case_of(3, n, k).arguments.values()
    last = between_guards(weight)
    assert status_of_child(lambda: patched_linear(library, z, last)) == 0


def test_a_poisoned_row_stays_alone(library: ctypes.CDLL) -> None:
    of = case_of(40, 67, 130)
    clean = run(library, of)
    of.z[17, 129] = torch.nan
    dirty = run(library, of)
    others = torch.arange(40) != 17
    assert dirty[17].isnan().all() and same_bits(dirty[others], clean[others])


@pytest.mark.parametrize("columns", [1, 5, 16])
def test_the_model_of_the_instruction(library: ctypes.CDLL, columns: int) -> None:
    """Intel's description of TDPBF16PS step by step: even and odd products are summed apart, each
    step rounded once; then they are added, and then the sum. Denormal numbers are 0, before and
    after each step.
    """
    rng = seeded(columns)

    def scaled(*size: int, exponent: int) -> Tensor:
        return normal(rng, *size) * 2.0 ** torch.randint(-3, 4, size, generator=rng) * 2.0**exponent

    # sums of these products lie around the least normal number, 2⁻¹²⁶
    wide, pairs = (scaled(16, 32, exponent=-64), scaled(16, columns, 2, exponent=-64))
    start = scaled(16, columns, exponent=-127).float()
    wide[0] = 2.0**-130  # denormal; beside large numbers only its own flush makes the products 0
    pairs[:, 0] = 2.0**20
    wide, pairs = wide.bfloat16(), pairs.bfloat16()
    found = start.clone()
    library.multiply_add(*numbers(columns), *map(address, (found, wide, pairs)))

    def flush(x: Tensor) -> Tensor:
        x = x.float()
        return torch.where(x.abs() < 2.0**-126, torch.copysign(torch.zeros(()), x), x)

    def by_steps(rounded: Callable[[Tensor], Tensor]) -> Tensor:
        a, b = rounded(wide).double(), rounded(pairs).double()
        parts = []
        for parity in (0, 1):
            part = torch.zeros(16, columns)
            for k in range(16):  # products are exact in fp64
                part = rounded(a[:, 2 * k + parity, None] * b[k, :, parity] + part.double())
            parts.append(part)
        return rounded(rounded(start) + rounded(parts[0] + parts[1]))

    assert same_bits(found, by_steps(flush))
    assert found[0, 0] == flush(start)[0, 0]
    assert not same_bits(found, by_steps(Tensor.float))
