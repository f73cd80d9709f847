"""What the tests of the RMSNorm inversion share: both implementations, an exact oracle, and the
equations checked on many rows.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache

import mpmath
import pytest
import torch
from support.numeric import ULP, same_bits, seeded
from support.rows import RADII, ROWS, rows_of, uniform
from torch import Tensor

from icl_patch import ops
from icl_patch.ops import InversionStatus as Status
from icl_patch.ops import native, reference

mp, mpf = mpmath.mp, mpmath.mpf
Invert = Callable[..., ops.RMSNormInverse]
DIGITS = 120
ROOT_ULP = 8 * ULP**0.5  # beside the hard case y is known to the root of a rounding only

needs_native = pytest.mark.skipif(not native.cpu_instructions, reason=native.describe())
IMPLEMENTATIONS = [
    pytest.param(ops.invert_rmsnorm, id="native", marks=needs_native),
    pytest.param(reference.invert_rmsnorm, id="torch"),
]
every_implementation = pytest.mark.parametrize("invert", IMPLEMENTATIONS)


@dataclass
class Exact:
    """One row solved in 120 digits: the squares are exact, and so is their difference's every digit
    that matters.
    """

    status: Status
    shift: mpf
    y: list[mpf]  # coordinates off the pole only, where the solution is unique
    size: mpf  # sqrt(N), ‖y‖
    e: list[mpf]
    p: list[mpf]
    borderline: bool  # no fp64 arithmetic can tell whether there is a root

    @property
    def condition(self) -> mpf:
        """Relative change of the shift for one of φ: without bound where the pole holds next to
        nothing of the norm.
        """
        slope = mp.fsum(
            p**2 / (e + self.shift) ** 3 for p, e in zip(self.p, self.e, strict=True) if p
        )
        return self.size**2 / (2 * self.shift * slope) if self.shift else mpf(0)

    def residual(self, shift: float) -> mpf:
        return (
            mp.fsum((p / (e + mpf(shift))) ** 2 for p, e in zip(self.p, self.e, strict=True) if p)
            / self.size**2
            - 1
        )


@cache
def solve(m: tuple, g: tuple, c: float, eps: float) -> Exact:
    """Root of the paper's eq. (8) in ``s = min m² - μ``: bisection, then Newton, then a check of
    the signs beside the root.
    """
    with mp.workdps(DIGITS):
        squares = [mpf(x) ** 2 for x in m]
        e = [x - min(squares) for x in squares]
        p = [abs(mpf(a) * mpf(b)) for a, b in zip(m, g, strict=True)]
        target = len(m) * mpf(c) ** 2 / (mpf(c) ** 2 + mpf(eps))
        terms = [(a**2, b) for a, b in zip(p, e, strict=True) if a]

        def phi(s: mpf, power: int = 2) -> mpf:
            return mp.fsum(a / (b + s) ** power for a, b in terms)

        pole_is_empty = all(b for _, b in terms)
        at_zero = phi(mpf(0)) if pole_is_empty else mp.inf
        hard = at_zero <= target
        shift = (
            mpf(0) if hard else _root(phi, target, mp.sqrt(mp.fsum(a for a, _ in terms) / target))
        )
        unreachable = any(a == 0 and b != 0 for a, b in zip(m, g, strict=True)) and (
            not hard or at_zero == target
        )
        status = Status.UNREACHABLE if unreachable else Status.HARD if hard else Status.EASY
        y = [
            mp.sign(a) * mp.sign(b) * k / (d + shift) if k else mpf(0)
            for a, b, k, d in zip(m, g, p, e, strict=True)
        ]
        borderline = pole_is_empty and abs(at_zero / target - 1) < 64 * ULP
        return Exact(status, shift, y, mp.sqrt(target), e, p, borderline)


def _root(phi: Callable[..., mpf], target: mpf, upper: mpf) -> mpf:
    high = mp.frexp(upper)[1] + 1
    low = high - 8000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if phi(mp.ldexp(1, middle)) > target else (low, middle)
    s, b = mp.ldexp(1, low), mp.ldexp(1, high)
    for _ in range(20):
        middle = (s + b) / 2
        s, b = (middle, b) if phi(middle) > target else (s, middle)
    while True:  # 1/sqrt(φ) is concave: from the left of the root Newton stays there
        value = phi(s)
        step = (mp.sqrt(value / target) - 1) * value / phi(s, 3)
        s += step
        if abs(step) < s * mpf(10) ** (-DIGITS // 2):
            break
    near = mpf(10) ** (-DIGITS // 2)
    assert phi(s * (1 - near)) > target > phi(s * (1 + near))
    return s


def check_row(
    exact: Exact,
    m: tuple[float, ...],
    g: tuple[float, ...],
    c: float,
    eps: float,
    result: ops.RMSNormInverse,
    row: int,
) -> None:
    """One row against the oracle; the shift, and y at the pole, only as far as the sums' rounding
    determines them.
    """
    single_precision = result.hidden.dtype == torch.float32
    n, rounding = len(m), 2.0**-24 if single_precision else ULP
    status, shift = Status(int(result.status[row])), float(result.shift[row])
    hidden = [mpf(x) for x in result.hidden[row].double().tolist()]
    new_scale = [mpf(x) for x in result.new_scale[row].tolist()]
    assert status is exact.status or exact.borderline

    with mp.workdps(DIGITS):
        mean_square = mp.fsum(x**2 for x in hidden) / n
        assert abs(mp.sqrt(mean_square) / mpf(c) - 1) <= (2 if single_precision else 16) * rounding

        norm = mp.sqrt(mean_square + mpf(eps))
        lost = mpf(2) ** (-149 if single_precision else -1074)  # what underflows in hidden
        for m_k, g_k, scale_k, h_k in zip(m, g, new_scale, hidden, strict=True):
            if status is Status.UNREACHABLE and m_k == 0:
                continue
            assert (
                abs(scale_k * h_k / norm - mpf(g_k))
                <= 8 * rounding * abs(mpf(g_k)) + abs(scale_k) * lost / norm
            )

        if status is Status.HARD:
            assert shift == 0
        elif not exact.borderline:
            assert abs(exact.residual(shift)) <= 32 * ULP
        # How far rounding in the sums moves the shift; where that is no small change, the pole's
        # share of y is known to √ulp only.
        shift_error = 32 * ULP * exact.condition
        is_sharp = shift_error < 1e-3 and not exact.borderline
        if is_sharp and status is not Status.HARD:
            assert abs(mpf(shift) / exact.shift - 1) <= shift_error
        y = [x / mp.sqrt(mpf(c) ** 2 + mpf(eps)) for x in hidden]
        # the pole's size is in the norm above
        unique = [k for k in range(n) if exact.status is not Status.HARD or exact.e[k]]
        for k in unique:
            moved = (
                shift_error * exact.shift / (exact.e[k] + exact.shift) * abs(exact.y[k])
                if is_sharp and exact.shift
                else 0
            )
            y_error = (
                moved
                + (2 * rounding + 32 * ULP) * abs(exact.y[k])
                + (0 if is_sharp else ROOT_ULP * exact.size)
            )
            assert abs(y[k] - exact.y[k]) <= y_error + lost / norm
        assert mp.sqrt(mp.fsum((y[k] - exact.y[k]) ** 2 for k in unique)) <= ROOT_ULP * mp.sqrt(n)


def check_against_the_oracle(
    invert: Invert, family: str, count: int, n: int, dtype: torch.dtype, seed: int
) -> int:
    """Rows of every radius; the number of rows."""
    if family == "near_hard":  # which are near only as long as neither rms nor eps moves them
        radii, spread = RADII[:1], torch.ones(count, dtype=dtype)
    else:
        radii, spread = RADII, uniform(seeded(seed + 1), 0.5, 2, count).to(dtype)
    m, g = rows_of(family, count, n, dtype, seed)
    for c, eps in radii:
        rms = c * spread
        result = invert(g, m, rms, eps)
        for row in range(count):
            values = (*(tuple(x[row].double().tolist()) for x in (m, g)), float(rms[row]), eps)
            check_row(solve(*values), *values, result, row)
    return count * len(radii)


def check_rows(m: Tensor, g: Tensor, c: Tensor, eps: float, result: ops.RMSNormInverse) -> None:
    """The Lagrange conditions, which s ≥ 0 makes sufficient: ``‖y‖² = N``, ``m m' = e + s`` and
    ``m' y = g``; in few evaluations, or in those of the bisection.
    """
    single_precision = result.hidden.dtype == torch.float32
    rounding, lost = (2.0**-24, 2.0**-149) if single_precision else (ULP, 2.0**-1074)
    m, g, c, hidden, new_scale = (
        x.double() for x in (m.expand(g.shape), g, c, result.hidden, result.new_scale)
    )
    hard, unreachable = result.status == Status.HARD, result.status == Status.UNREACHABLE
    assert (result.status <= Status.UNREACHABLE).all()
    assert all(x.isfinite().all() for x in (hidden, result.shift, new_scale))
    few = (result.evaluations <= 32) | (result.evaluations == reference.BISECTION_STEPS)
    assert few.all()
    assert not result.shift[hard].any() and not result.evaluations[hard].any()
    assert (result.shift >= 0).all() and (result.shift > 0)[result.status == Status.EASY].all()

    mean_square = hidden.square().mean(1)
    assert ((mean_square.sqrt() / c - 1).abs() <= (2 if single_precision else 16) * rounding).all()
    norm = (mean_square + eps).sqrt().unsqueeze(1)
    out_of_reach = (m == 0) & (g != 0) & (new_scale == 0)
    assert torch.equal(out_of_reach.any(1), unreachable)
    error = (new_scale * (hidden / norm) - g).abs() - new_scale.abs() * lost / norm
    assert (error <= (8 if single_precision else 16) * rounding * g.abs())[~out_of_reach].all()

    a = m.abs()
    e = (a - a.amin(1, keepdim=True)) * (a + a.amin(1, keepdim=True))
    shifted = e + result.shift.unsqueeze(1)
    free = ~(hard.unsqueeze(1) & (e == 0)) & (m != 0)
    assert ((m * new_scale - shifted).abs() <= 8 * ULP * shifted)[free].all()


def sweep(
    dtypes: list[torch.dtype], sizes: list[int], families: list[str], rows: int
) -> Iterator[tuple[str, Tensor, Tensor, Tensor, float]]:
    """``rows`` rows of every family, dtype, size and radius: family, m, g, rms, eps."""
    for seed, (family, dtype, n, (c, eps)) in enumerate(
        itertools.product(families, dtypes, sizes, RADII)
    ):
        m, g = rows_of(family, rows, n, dtype, seed)
        near = family == "near_hard" and eps == 0
        rms = c * (
            torch.ones(rows, dtype=torch.float64)
            if near
            else 2 ** uniform(seeded(seed), -1, 1, rows)
        )
        yield family, m, g, rms.to(dtype), eps


def sweep_together(
    dtypes: list[torch.dtype], sizes: list[int], families: list[str], rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """The rows of :func:`sweep`, those of one dtype, size and eps together: m, g, rms, eps. The
    time of a call hardly depends on the number of its rows.
    """
    found = defaultdict(list)
    for _, m, g, rms, eps in sweep(dtypes, sizes, families, rows):
        found[g.dtype, g.shape[1], eps].append((m, g, rms))
    for (_, _, eps), parts in found.items():
        m, g, rms = (torch.cat(part) for part in zip(*parts, strict=True))
        yield m, g, rms, eps


def mixed_rows(
    n: int, per_family: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows of every family of n coordinates, shuffled."""
    parts = [rows_of(family, per_family, n, dtype, seed) for family in ROWS if family != "single"]
    m, g = (torch.cat(part) for part in zip(*parts, strict=True))
    order = torch.randperm(len(m), generator=seeded(seed))
    return m[order], g[order]


def same_rows(
    x: ops.RMSNormInverse | ops.StableScale,
    y: ops.RMSNormInverse | ops.StableScale,
    rows: Tensor | None = None,
) -> bool:
    """Whether all parts have the same bits; with ``rows``, those of y."""
    pairs = ((getattr(x, field.name), getattr(y, field.name)) for field in fields(x))
    return all(same_bits(a, b if rows is None else b[rows]) for a, b in pairs)
