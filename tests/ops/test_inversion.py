"""The RMSNorm inversion, native and in plain torch, against a reference that shares no code with
either, and its properties.
"""

import itertools
from collections.abc import Iterable

import pytest
import torch
from support.inversion import (
    ROOT_ULP,
    Invert,
    check_rows,
    every_implementation,
    needs_native,
    sweep,
)
from support.numeric import FLOATS, ULP, every_dtype, normal, same_bits, seeded
from support.rows import ROWS, rows_of, signs, some, uniform

from icl_patch import ops
from icl_patch.ops import InversionStatus as Status
from icl_patch.ops.stable_update import reference_stable_scale


@every_implementation
def test_a_search_that_starts_at_zero(invert: Invert) -> None:
    """No bound of the bracket lies above 0, and the first step is beyond all bounds: the search may
    not go to and fro between them.
    """
    m = torch.tensor([[0.0, 2.0**-24, 105.9375, 291.75, 65504.0]])
    g = torch.tensor([[0.0, 2.0**-24, 146.75, 567.5, 65504.0]])
    result = invert(g, m, torch.ones(1))
    check_rows(m, g, torch.ones(1), 0.0, result)
    assert result.status == Status.EASY


@pytest.mark.parametrize(
    "family", ["gaussian", "sparse", "near_hard", "zeros", "all_zero", "ties", "plateaus"]
)
@every_implementation
def test_no_feasible_point_is_better(invert: Invert, family: str) -> None:
    """Small steps test for a minimum, large ones and flips of sign for the global one."""
    count, n, eps = 40, 4, 0.01
    rng = seeded(2)
    m, g = rows_of(family, count, n, torch.float64)
    rms = uniform(rng, 0.5, 2, count)
    result = invert(g, m, rms, eps)
    y = result.hidden / (rms.square() + eps).sqrt().unsqueeze(1)
    radius = y.norm(dim=1, keepdim=True)
    step = radius * 10 ** uniform(rng, -3, 1, 400, count, 1) * normal(rng, 400, count, n)
    other = torch.where(some(rng, 0.5, 400, count, 1), y, signs(rng, 400, count, n) * y) + step
    other *= radius / other.norm(dim=-1, keepdim=True)
    found, best = ((m * x - g).square().sum(-1) for x in (y, other))
    assert (best - found >= -64 * ULP * (best + g.square().sum(-1))).all()


@every_dtype
@every_implementation
def test_inversion_of_thousands_of_rows(invert: Invert, dtype: torch.dtype) -> None:
    """Few evaluations, the radius, the equations and no number that is not finite, on every row of
    every family: 62,208 natively.
    """
    rows = 36 if invert is ops.invert_rmsnorm else 6
    for m, g, rms, eps in sweep([dtype], [1, 2, 3, 9, 16, 33, 130, 257], ROWS, rows):
        check_rows(m, g, rms, eps, invert(g, m, rms, eps))


@every_implementation
def test_fallback_gives_the_direction_of_the_missing_norm(invert: Invert) -> None:
    m = torch.tensor([[0.5, -0.5, 2.0, 0.5]]).double()
    g = torch.tensor([[0.0, 0.0, 1.0, 0.0]]).double()
    fallback = torch.tensor([[3.0, -4.0, 100.0, 0.0]]).double()
    result = invert(g, m, torch.ones(1), fallback=fallback)
    # Off the pole y = g m / (m² - 0.25) = 2/3.75; the rest of the norm, 4, lies along (3, -4, ·,
    # 0)/5.
    rest = (4 - (2 / 3.75) ** 2) ** 0.5
    expected = torch.tensor([[0.6 * rest, -0.8 * rest, 2 / 3.75, 0.0]]).double()
    torch.testing.assert_close(result.hidden, expected)
    assert result.status == Status.HARD
    without = invert(g, m, torch.ones(1))
    torch.testing.assert_close(without.hidden, torch.tensor([[rest, 0.0, 2 / 3.75, 0.0]]).double())
    for useless in ([0.0] * 4, [torch.nan] * 4, [0.0, torch.inf, 0.0, 0.0]):
        other = invert(g, m, torch.ones(1), fallback=torch.tensor([useless]).double())
        assert same_bits(other.hidden, without.hidden)


@every_implementation
def test_fallback_may_not_leave_a_coordinate_unreachable(invert: Invert) -> None:
    """Through m_k = 0 only y_k ≠ 0 reaches g_k, so a fallback that is 0 there is not followed."""
    m = torch.tensor([[0.0, 0.0, 2.0]])
    g = torch.tensor([[1.0, -2.0, 0.5]])
    fallback = torch.tensor([[1.0, 0.0, 1.0]])
    result = invert(g, m, torch.ones(1), fallback=fallback)
    assert result.status == Status.HARD
    torch.testing.assert_close((result.new_scale * result.hidden).float(), g)
    followed = invert(g, m, torch.ones(1), fallback=torch.tensor([[1.0, 3.0, 1.0]]))
    torch.testing.assert_close(followed.hidden[0, 1] / followed.hidden[0, 0], torch.tensor(3.0))
    torch.testing.assert_close((followed.new_scale * followed.hidden).float(), g)


@every_implementation
def test_statuses(invert: Invert) -> None:
    """Those of numbers that are not finite, and of bad radii: test_inversion_rows.py."""
    m = torch.tensor([[1.0, 2], [1, 2], [0, 2], [0, 2], [0, 2]])
    g = torch.tensor([[1.0, 1], [0, 1], [1, 1], [1, 9], [0, 9]])
    expected = [Status.EASY, Status.HARD, Status.HARD, Status.UNREACHABLE, Status.EASY]
    assert invert(g, m, torch.ones(5)).status.tolist() == expected


@every_implementation
def test_zeros(invert: Invert) -> None:
    """All of m zero, several of them, with g and without: what can be reached is, and what cannot
    is said.
    """
    for n in (1, 2, 7, 8, 9, 40):
        last = torch.zeros(n).index_fill_(0, torch.tensor([n - 1]), 1.0)
        rows = {
            "m = g = 0": (torch.zeros(n), torch.zeros(n), Status.HARD),
            "m = 0": (torch.zeros(n), torch.arange(1.0, n + 1), Status.HARD),
            "m = 0, g in one place": (torch.zeros(n), last, Status.HARD),
            "g = 0": (torch.arange(1.0, n + 1), torch.zeros(n), Status.HARD),
            "m = g = -0": (torch.zeros(n).neg(), torch.zeros(n).neg(), Status.HARD),
            "m = -0": (torch.zeros(n).neg(), torch.arange(1.0, n + 1).neg(), Status.HARD),
        }
        if n > 2:
            ends = torch.cat([torch.zeros(2), torch.ones(n - 2)])
            rows |= {
                "m = 0 twice, g small": (ends, torch.full((n,), 1e-3), Status.HARD),
                "m = 0 twice, g large": (ends, torch.full((n,), 1e3), Status.UNREACHABLE),
                "m = 0 twice, g = 0 there": (ends, 1e3 * ends, Status.EASY),
                "m = 0 twice, g = 0 there, small": (ends, 1e-3 * ends, Status.HARD),
            }
        m, g = (torch.stack([row[i] for row in rows.values()]) for i in (0, 1))
        for (c, eps), fallback in itertools.product(
            [(1.0, 0.0), (0.5, 0.75)], (None, torch.ones_like(g), torch.zeros_like(g))
        ):
            result = invert(g, m, torch.full((len(g),), c), eps, fallback)
            assert dict(zip(rows, map(Status, result.status.tolist()), strict=True)) == {
                name: row[2] for name, row in rows.items()
            }
            check_rows(m, g, torch.full((len(g),), c), eps, result)


@every_implementation
def test_the_ends_of_fp64(invert: Invert) -> None:
    """The largest numbers, and the smallest denormal ones: hard rows, of which the pole takes all
    that is missing.
    """
    m = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    for g in ([1.7e308, 1.0, 2.0], [8e307, 1e307, 2e307], [5e-324, 1e-320, 0.0]):
        target = torch.tensor([g], dtype=torch.float64)
        result = invert(target, m, torch.ones(1, dtype=torch.float64))
        assert result.status.tolist() == [Status.HARD]
        assert result.shift.tolist() == [0.0]
        assert abs(float(result.hidden.square().mean()) - 1) <= 16 * ULP
        normed = result.hidden / result.hidden.square().mean().sqrt()
        reached = result.new_scale * normed
        assert ((reached - target).abs() <= 16 * ULP * target.abs() + 5e-324).all()


@pytest.mark.parametrize("power", [-400, -60, 60, 400])
@every_implementation
def test_wide_fp64_rows_are_inverted_like_scaled_ones(invert: Invert, power: int) -> None:
    """``g → βg, m → βm`` leaves y alone: m² and β²s fit fp64, and p² and (p/s)³ may not be let
    overflow on the way.
    """
    beta = 2.0**power
    for family in ("gaussian", "sparse", "zeros", "ties", "graded"):
        m, g = rows_of(family, 20, 9, torch.float64)
        plain = invert(g, m, torch.ones(20).double(), 0.1)
        scaled = invert(beta * g, beta * m, torch.ones(20).double(), 0.1)
        assert torch.equal(scaled.status, plain.status)
        few = {"rtol": 16 * ULP, "atol": 0}  # a power of two rounds nothing
        torch.testing.assert_close(scaled.hidden, plain.hidden, **few)
        torch.testing.assert_close(scaled.new_scale / beta, plain.new_scale, **few)
        torch.testing.assert_close(scaled.shift / beta / beta, plain.shift, **few)


OVERFLOWING = {
    "large-g": (torch.float64, [1e160, 2e160], [1.0, 3.0], 1.0),
    "large-m": (torch.float64, [1.0, 2.0], [1e155, 3e155], 1.0),
    "wide": (torch.float64, [1e300, 1e-300], [1e-300, 1e300], 1.0),
    "large-rms": (torch.float32, [0.0, 200.0], [1.0, 3.0], 3e38),
}


@pytest.mark.parametrize(("dtype", "g", "m", "c"), OVERFLOWING.values(), ids=OVERFLOWING)
@every_implementation
def test_overflow_is_not_silent(
    invert: Invert, dtype: torch.dtype, g: list[float], m: list[float], c: float
) -> None:
    """A row whose answer is no number may have a status that says so, but not one that says all is
    well.
    """
    result = invert(*(torch.tensor(x, dtype=dtype) for x in ([g], m, [c])))
    finite = all(x.isfinite().all() for x in (result.hidden, result.shift, result.new_scale))
    assert finite or result.status >= Status.NONFINITE


# Far more rows: pytest -m stress

STRESS_SIZES = [1, 2, 3, 5, 8, 9, 16, 31, 64, 100, 171, 300]
LONG = [1151, 5376, 16385, 65536]
# 520 times 14 families, 4 dtypes, 12 sizes and 3 radii: 1,048,320
MANY = [([family], STRESS_SIZES, 520) for family in ROWS] + [(ROWS, [n], 4) for n in LONG]


@needs_native
@pytest.mark.stress
@pytest.mark.parametrize(("families", "sizes", "rows"), MANY)
def test_a_million_rows_and_long_ones(families: Iterable, sizes: list[int], rows: int) -> None:
    for m, g, rms, eps in sweep(list(FLOATS.values()), sizes, families, rows):
        check_rows(m, g, rms, eps, ops.invert_rmsnorm(g, m, rms, eps))


@needs_native
@pytest.mark.stress
@pytest.mark.parametrize("family", ROWS)
def test_the_update_against_plain_torch(family: str) -> None:
    """All of it, in fp64 and in single precision; beside the hard case y is known to √ulp."""
    for m, g, _, eps in sweep([torch.float32, torch.float64], STRESS_SIZES, [family], 40):
        h = normal(seeded(len(g)), *g.shape, dtype=g.dtype)
        result, expected = ops.stable_scale(g, m, h, eps), reference_stable_scale(g, m, h, eps)
        assert torch.equal(result.status, expected.status)
        assert (result.evaluations <= 32).all()
        size = (expected.u.double().abs() + h.double().abs()).norm(dim=1, keepdim=True)
        assert ((result.u.double() - expected.u.double()).abs() <= ROOT_ULP * size).all()
