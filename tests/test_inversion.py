"""The RMSNorm inversion against a reference that shares no code with it: the secular equation in 60 digits."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from numeric import FLOATING, ULP, check_refused, every_dtype, normal, same_bits, seeded
from rows import RADII, ROWS, rows_of, signs, some, uniform
from torch import Tensor

from icl_patch import ops, reference
from icl_patch.ops import InversionStatus as Status

mpmath = pytest.importorskip("mpmath")
mp, mpf = mpmath.mp, mpmath.mpf


@dataclass
class Exact:
    """One row solved in 60 digits: the squares are exact, and so is their difference's every digit that matters."""

    status: Status
    shift: mpf
    y: list[mpf]  # coordinates off the pole only, where the solution is unique
    size: mpf  # sqrt(N), ‖y‖
    e: list[mpf]
    p: list[mpf]
    borderline: bool  # no fp64 arithmetic can tell whether there is a root

    @property
    def condition(self) -> mpf:
        """Relative change of the shift for one of φ: without bound where the pole holds next to nothing of the norm."""
        slope = mp.fsum(p**2 / (e + self.shift) ** 3 for p, e in zip(self.p, self.e, strict=True) if p)
        return self.size**2 / (2 * self.shift * slope) if self.shift else mpf(0)

    def residual(self, shift: float) -> mpf:
        return mp.fsum((p / (e + mpf(shift))) ** 2 for p, e in zip(self.p, self.e, strict=True) if p) / self.size**2 - 1


def solve(m: list[float], g: list[float], c: float, eps: float) -> Exact:
    """Bisection on the paper's eq. (8) with ``s = min m² - μ``, first for the exponent of s and then for 33 digits."""
    with mp.workdps(60):
        squares = [mpf(x) ** 2 for x in m]
        e = [x - min(squares) for x in squares]
        p = [abs(mpf(a) * mpf(b)) for a, b in zip(m, g, strict=True)]
        target = len(m) * mpf(c) ** 2 / (mpf(c) ** 2 + mpf(eps))
        terms = [(a, b) for a, b in zip(p, e, strict=True) if a]

        def phi(s: mpf) -> mpf:
            return mp.fsum((a / (b + s)) ** 2 for a, b in terms)

        pole_is_empty = all(b for _, b in terms)
        at_zero = phi(mpf(0)) if pole_is_empty else mp.inf
        hard = at_zero <= target
        shift = mpf(0) if hard else _bisect(lambda s: phi(s) > target, mp.sqrt(mp.fsum(a**2 for a, _ in terms) / target))
        unreachable = any(a == 0 and b != 0 for a, b in zip(m, g, strict=True)) and (not hard or at_zero == target)
        status = Status.UNREACHABLE if unreachable else Status.HARD if hard else Status.EASY
        y = [mp.sign(a) * mp.sign(b) * k / (d + shift) if k else mpf(0) for a, b, k, d in zip(m, g, p, e, strict=True)]
        borderline = pole_is_empty and abs(at_zero / target - 1) < 1e-14
        return Exact(status, shift, y, mp.sqrt(target), e, p, borderline)


def _bisect(left_of_root: Callable[[mpf], bool], upper: mpf) -> mpf:
    high = mp.frexp(upper)[1] + 1
    low = high - 8000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left_of_root(mp.ldexp(1, middle)) else (low, middle)
    a, b = mp.ldexp(1, low), mp.ldexp(1, high)
    for _ in range(110):
        middle = (a + b) / 2
        a, b = (middle, b) if left_of_root(middle) else (a, middle)
    return b


def check_row(exact: Exact, m: list[float], g: list[float], c: float, eps: float, result: ops.RMSNormInverse, row: int) -> None:
    """One row against the oracle; the shift, and y at the pole, only as far as the sums' rounding determines them."""
    single_precision = result.hidden.dtype == torch.float32
    n, rounding = len(m), 2.0**-24 if single_precision else ULP
    status, shift = Status(int(result.status[row])), float(result.shift[row])
    hidden = [mpf(x) for x in result.hidden[row].double().tolist()]
    new_scale = [mpf(x) for x in result.new_scale[row].tolist()]
    assert status is exact.status or exact.borderline

    with mp.workdps(60):
        mean_square = mp.fsum(x**2 for x in hidden) / n
        assert abs(mp.sqrt(mean_square) / mpf(c) - 1) <= 2 * rounding

        norm = mp.sqrt(mean_square + mpf(eps))
        lost = mpf(2) ** (-149 if single_precision else -1074)  # what underflows in hidden
        for m_k, g_k, scale_k, h_k in zip(m, g, new_scale, hidden, strict=True):
            if status is Status.UNREACHABLE and m_k == 0:
                continue
            assert abs(scale_k * h_k / norm - mpf(g_k)) <= 8 * rounding * abs(mpf(g_k)) + abs(scale_k) * lost / norm

        if status is Status.HARD:
            assert shift == 0
        elif not exact.borderline:
            assert abs(exact.residual(shift)) <= 32 * ULP
        # How far rounding in the sums moves the shift; where that is no small change, the pole's share of y is known to √ulp only.
        shift_error = 32 * ULP * exact.condition
        is_sharp = shift_error < 1e-3 and not exact.borderline
        if is_sharp and status is not Status.HARD:
            assert abs(mpf(shift) / exact.shift - 1) <= shift_error
        for k in range(n):
            if exact.status is Status.HARD and exact.e[k] == 0:
                continue  # not unique; the norm above holds its size
            moved = shift_error * exact.shift / (exact.e[k] + exact.shift) * abs(exact.y[k]) if is_sharp and exact.shift else 0
            y_error = moved + (2 * rounding + 32 * ULP) * abs(exact.y[k]) + (0 if is_sharp else 1e-7 * exact.size)
            assert abs(hidden[k] / mp.sqrt(mpf(c) ** 2 + mpf(eps)) - exact.y[k]) <= y_error + lost / norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", ROWS)
def test_inversion_against_the_oracle(family: str, dtype: torch.dtype) -> None:
    count = 55 if family == "near_hard" else 9
    m, g = rows_of(family, count, 9, dtype)
    for c, eps in RADII if family != "near_hard" else RADII[:1]:
        rms = torch.full((count,), c, dtype=dtype) * (1 if family == "near_hard" else uniform(seeded(1), 0.5, 2, count).to(dtype))
        newton, bisection = (ops.invert_rmsnorm(g, m, rms, eps, method=method) for method in ("newton", "bisection"))
        for row in range(count):
            values = (m[row].double().tolist(), g[row].double().tolist(), float(rms[row]), eps)
            exact = solve(*values)
            check_row(exact, *values, newton, row)
            check_row(exact, *values, bisection, row)


def test_the_families_contain_what_they_should() -> None:
    """The oracle test would prove little on rows that are all alike."""
    seen: dict[str, set[Status]] = {}
    for family in ROWS:
        m, g = rows_of(family, 45, 9)
        seen[family] = {Status(status) for status in ops.invert_rmsnorm(g, m, torch.ones(45)).status.tolist()}
    for family in ("sparse", "near_hard", "zeros_of_both"):
        assert seen[family] == {Status.EASY, Status.HARD}
    assert {Status.HARD, Status.UNREACHABLE} <= seen["zeros"]
    assert {Status.EASY, Status.HARD} <= seen["all_zero"]
    assert seen["gaussian"] == seen["graded"] == seen["full_range"] == {Status.EASY}


@pytest.mark.parametrize("mistake", ["root", "hard", "radius", "scale", "pole"])
def test_the_oracle_can_refuse(mistake: str) -> None:
    """Plausible wrong answers: a root next door, no hard case, the norm's eps forgotten, Δm off, the wrong side of the pole."""
    m, g = rows_of("sparse" if mistake == "hard" else "gaussian", 9, 9, torch.float64)
    eps, rms = 0.1, torch.ones(9, dtype=torch.float64)
    right = ops.invert_rmsnorm(g, m, rms, eps)
    row = int((right.status == (Status.HARD if mistake == "hard" else Status.EASY)).nonzero()[0])
    hidden, shift, new_scale, status = (x.clone() for x in (right.hidden, right.shift, right.new_scale, right.status))
    if mistake == "root":
        shift *= 1 + 1e-9
    elif mistake == "hard":
        status[:] = Status.EASY
    elif mistake == "radius":
        hidden = ops.invert_rmsnorm(g, m, rms, 0.0).hidden
    elif mistake == "scale":
        new_scale *= 1 + 1e-13
    else:
        hidden[row, m[row].abs().argmin()] *= -1
        new_scale[row, m[row].abs().argmin()] *= -1
    wrong = ops.RMSNormInverse(hidden, shift, new_scale, status, right.evaluations)
    values = (m[row].tolist(), g[row].tolist(), 1.0, eps)
    check_row(solve(*values), *values, right, row)
    with pytest.raises(AssertionError):
        check_row(solve(*values), *values, wrong, row)


def objective(y: Tensor, m: Tensor, g: Tensor) -> Tensor:
    return (m * y - g).square().sum(-1)


@pytest.mark.parametrize("family", ["gaussian", "sparse", "near_hard", "zeros", "all_zero", "ties", "plateaus"])
def test_no_feasible_point_is_better(family: str) -> None:
    """Small steps test for a minimum, large ones and flips of sign for the global one."""
    count, n, eps = 40, 4, 0.01
    rng = seeded(2)
    m, g = rows_of(family, count, n, torch.float64)
    rms = uniform(rng, 0.5, 2, count)
    result = ops.invert_rmsnorm(g, m, rms, eps)
    y = result.hidden / (rms.square() + eps).sqrt().unsqueeze(1)
    radius = y.norm(dim=1, keepdim=True)
    step = radius * 10 ** uniform(rng, -3, 1, 400, count, 1) * normal(rng, 400, count, n)
    other = torch.where(some(rng, 0.5, 400, count, 1), y, signs(rng, 400, count, n) * y) + step
    other *= radius / other.norm(dim=-1, keepdim=True)
    found, best = objective(y, m, g), objective(other, m, g)
    assert (best - found >= -1e-13 * (best + g.square().sum(-1))).all()


@pytest.mark.parametrize("n", [1, 2, 3, 16, 64, 257])
def test_inversion_of_thousands_of_rows(n: int) -> None:
    """Few evaluations, the radius, the equation and no number that is not finite, on every row of every family."""
    for family, (c, eps) in itertools.product(ROWS, RADII):
        m, g = rows_of(family, 100, n, seed=n)
        result = ops.invert_rmsnorm(g, m, torch.full((100,), c), eps)
        assert result.evaluations.max() <= 32
        assert (result.status <= Status.UNREACHABLE).all()
        assert all(x.isfinite().all() for x in (result.hidden, result.shift, result.new_scale))
        assert (result.shift >= 0).all()
        hidden = result.hidden.double()
        mean_square = hidden.square().mean(1)
        assert ((mean_square.sqrt() / torch.tensor(c).double() - 1).abs() <= 2.0**-23).all()
        norm = (mean_square + eps).sqrt().unsqueeze(1)
        error = (result.new_scale * (hidden / norm) - g).abs() - result.new_scale.abs() * 2.0**-149 / norm
        reachable = (m != 0) | (result.status != Status.UNREACHABLE).unsqueeze(1)
        assert (error <= 2.0**-21 * g.abs().double())[reachable].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_methods_agree(dtype: torch.dtype) -> None:
    for family, (c, eps) in itertools.product(ROWS, RADII):
        m, g = rows_of(family, 60, 12, dtype, seed=5)
        rms = torch.full((60,), c, dtype=dtype)
        newton, bisection = (ops.invert_rmsnorm(g, m, rms, eps, method=method) for method in ("newton", "bisection"))
        assert torch.equal(newton.status, bisection.status)
        difference = (newton.hidden.double() - bisection.hidden.double()).norm(dim=1) / newton.hidden.double().norm(dim=1)
        assert difference.max() <= (1e-7 if family == "near_hard" else 2.0**-22 if dtype == torch.float32 else 1e-12)
        hard = newton.status == Status.HARD
        assert not newton.shift[hard].any() and not bisection.shift[hard].any()
        assert newton.evaluations[~hard].min() > 0 if (~hard).any() else True
        assert not newton.evaluations[hard].any()
        assert (bisection.evaluations[~hard] == 64).all()


def test_fallback_gives_the_direction_of_the_missing_norm() -> None:
    m = torch.tensor([[0.5, -0.5, 2.0, 0.5]]).double()
    g = torch.tensor([[0.0, 0.0, 1.0, 0.0]]).double()
    fallback = torch.tensor([[3.0, -4.0, 100.0, 0.0]]).double()
    result = ops.invert_rmsnorm(g, m, torch.ones(1), fallback=fallback)
    # Off the pole y = g m / (m² - 0.25) = 2/3.75; the rest of the norm, 4, lies along (3, -4, ·, 0)/5.
    rest = (4 - (2 / 3.75) ** 2) ** 0.5
    torch.testing.assert_close(result.hidden, torch.tensor([[0.6 * rest, -0.8 * rest, 2 / 3.75, 0.0]]).double())
    assert result.status == Status.HARD
    without = ops.invert_rmsnorm(g, m, torch.ones(1))
    torch.testing.assert_close(without.hidden, torch.tensor([[rest, 0.0, 2 / 3.75, 0.0]]).double())
    for useless in (torch.zeros(1, 4), torch.full((1, 4), torch.nan), torch.tensor([[0.0, torch.inf, 0.0, 0.0]])):
        assert same_bits(ops.invert_rmsnorm(g, m, torch.ones(1), fallback=useless.double()).hidden, without.hidden)


def test_fallback_may_not_leave_a_coordinate_unreachable() -> None:
    """Through m_k = 0 only y_k ≠ 0 reaches g_k, so a fallback that is 0 there is not followed."""
    m = torch.tensor([[0.0, 0.0, 2.0]])
    g = torch.tensor([[1.0, -2.0, 0.5]])
    fallback = torch.tensor([[1.0, 0.0, 1.0]])
    result = ops.invert_rmsnorm(g, m, torch.ones(1), fallback=fallback)
    assert result.status == Status.HARD
    torch.testing.assert_close((result.new_scale * result.hidden).float(), g)
    followed = ops.invert_rmsnorm(g, m, torch.ones(1), fallback=torch.tensor([[1.0, 3.0, 1.0]]))
    torch.testing.assert_close(followed.hidden[0, 1] / followed.hidden[0, 0], torch.tensor(3.0))
    torch.testing.assert_close((followed.new_scale * followed.hidden).float(), g)


def one_row(m: list[float], g: list[float], c: float) -> Status:
    result = ops.invert_rmsnorm(torch.tensor([g]).float(), torch.tensor(m).float(), torch.tensor([c]).float())
    return Status(int(result.status))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_statuses(bad: float) -> None:
    assert one_row([1, 2], [1, 1], 1) is Status.EASY
    assert one_row([1, 2], [0, 1], 1) is Status.HARD
    assert one_row([0, 2], [1, 1], 1) is Status.HARD
    assert one_row([0, 2], [1, 9], 1) is Status.UNREACHABLE
    assert one_row([0, 2], [0, 9], 1) is Status.EASY
    assert one_row([bad, 2], [1, 1], 1) is Status.NONFINITE
    assert one_row([1, 2], [1, bad], 1) is Status.NONFINITE
    assert one_row([1, 2], [1, bad], bad) is Status.NONFINITE
    for c in (0.0, -1.0, bad):
        assert one_row([1, 2], [1, 1], c) is Status.BAD_RADIUS


def test_a_search_cut_short_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    m, g = rows_of("graded", 40, 12)
    monkeypatch.setattr(reference, "MAX_EVALUATIONS", 2)
    result = reference.invert_rmsnorm(g, m, torch.ones(40))
    stopped = result.status == Status.NO_CONVERGENCE
    assert 0 < stopped.sum() < 40
    assert (result.evaluations[stopped] == 2).all()


POISON: dict[str, tuple[str, float, Status]] = {
    "g-nan": ("g", torch.nan, Status.NONFINITE),
    "g-inf": ("g", torch.inf, Status.NONFINITE),
    "m-nan": ("m", torch.nan, Status.NONFINITE),
    "m-inf": ("m", -torch.inf, Status.NONFINITE),
    "rms-zero": ("rms", 0.0, Status.BAD_RADIUS),
    "rms-negative": ("rms", -1.0, Status.BAD_RADIUS),
    "rms-nan": ("rms", torch.nan, Status.BAD_RADIUS),
    "rms-inf": ("rms", torch.inf, Status.BAD_RADIUS),
    "fallback-nan": ("fallback", torch.nan, Status.HARD),
}


@pytest.mark.parametrize("method", ["newton", "bisection"])
@pytest.mark.parametrize("poison", POISON)
def test_a_poisoned_row_leaves_the_others_alone(poison: str, method: str) -> None:
    name, value, status = POISON[poison]
    parts = [rows_of(family, 3, 48) for family in ("sparse", "gaussian", "zeros", "full_range")]
    arguments = {
        "m": torch.cat([m for m, _ in parts]),
        "g": torch.cat([g for _, g in parts]),
        "rms": torch.rand(12, generator=seeded(4)) + 0.5,
    }
    arguments["fallback"] = normal(seeded(3), 12, 48, dtype=torch.float32)
    arguments["g"][1] *= 1e-3  # no root: the fallback is looked at

    def invert(m: Tensor, g: Tensor, rms: Tensor, fallback: Tensor) -> ops.RMSNormInverse:
        return ops.invert_rmsnorm(g, m, rms, 1e-6, fallback, method)

    clean = invert(**arguments)
    assert clean.status[1] == Status.HARD
    if name == "rms":
        arguments["rms"][1] = value
    else:
        arguments[name][1, 5] = value
        arguments[name][1, int(arguments["m"][1].abs().nan_to_num(9).argmin())] = value
    result = invert(**arguments)
    assert result.status[1] == status
    assert result.evaluations[1] == 0
    others = torch.arange(12) != 1
    for part in ("hidden", "shift", "new_scale", "status", "evaluations"):
        assert torch.equal(getattr(result, part)[others], getattr(clean, part)[others])
    row = {part: getattr(result, part)[1] for part in ("hidden", "shift", "new_scale")}
    if status is Status.NONFINITE:
        assert all(x.isnan().all() for x in row.values())
    elif status is Status.BAD_RADIUS:
        assert not row["hidden"].any() and row["shift"] == 0
        assert torch.equal(row["new_scale"], arguments["m"][1].double())
    else:
        assert all(x.isfinite().all() for x in row.values())


@pytest.mark.parametrize("method", ["newton", "bisection"])
@pytest.mark.parametrize("n", [1, 7, 48, 129, 1000])
def test_a_row_does_not_see_its_batch(n: int, method: str) -> None:
    parts = [rows_of(family, 5, n) for family in ("gaussian", "sparse", "zeros", "graded", "full_range", "plateaus")]
    m, g = (torch.cat(part) for part in zip(*parts, strict=True))
    rms, eps = torch.rand(30, generator=seeded(0)) + 0.5, 1e-6
    together = ops.invert_rmsnorm(g, m, rms, eps, method=method)

    def check(result: ops.RMSNormInverse, rows: Tensor) -> None:
        for part in ("hidden", "shift", "new_scale", "status", "evaluations"):
            assert torch.equal(getattr(result, part), getattr(together, part)[rows])

    for rows in (torch.arange(30).flip(0), torch.arange(13), *torch.arange(0, 30, 3).split(1)):
        check(ops.invert_rmsnorm(g[rows], m[rows], rms[rows], eps, method=method), rows)
    one_scale = ops.invert_rmsnorm(g[:5], m[3], rms[:5], eps, method=method)
    per_row = ops.invert_rmsnorm(g[:5], m[3].expand(5, n).clone(), rms[:5], eps, method=method)
    assert same_bits(one_scale.hidden, per_row.hidden) and same_bits(one_scale.new_scale, per_row.new_scale)
    in_columns = ops.invert_rmsnorm(g.T.contiguous().T, m.T.contiguous().T, rms, eps, method=method)
    assert torch.equal(in_columns.status, together.status)
    torch.testing.assert_close(in_columns.hidden, together.hidden, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_low_precision_inputs_are_taken_at_their_value(dtype: torch.dtype) -> None:
    m, g = rows_of("gaussian", 9, 48, dtype)
    rms = (torch.rand(9, generator=seeded(0)) + 0.5).to(dtype)
    result = ops.invert_rmsnorm(g, m, rms, 1e-6, fallback=g)
    wide = ops.invert_rmsnorm(g.double(), m.double(), rms.double(), 1e-6, fallback=g.double())
    assert result.hidden.dtype == torch.float32
    assert wide.hidden.dtype == result.shift.dtype == result.new_scale.dtype == torch.float64
    assert (result.status.dtype, result.evaluations.dtype) == (torch.int8, torch.int32)
    assert torch.equal(result.hidden, wide.hidden.float())
    assert torch.equal(result.shift, wide.shift) and torch.equal(result.new_scale, wide.new_scale)


@pytest.mark.parametrize("power", [-400, -60, 60, 400])
def test_wide_fp64_rows_are_inverted_like_scaled_ones(power: int) -> None:
    """``g → βg, m → βm`` leaves y alone: m² and β²s fit fp64, and p² and (p/s)³ may not be let overflow on the way."""
    beta = 2.0**power
    for family in ("gaussian", "sparse", "zeros", "ties", "graded"):
        m, g = rows_of(family, 20, 9, torch.float64)
        plain = ops.invert_rmsnorm(g, m, torch.ones(20).double(), 0.1)
        scaled = ops.invert_rmsnorm(beta * g, beta * m, torch.ones(20).double(), 0.1)
        assert torch.equal(scaled.status, plain.status)
        torch.testing.assert_close(scaled.hidden, plain.hidden, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(scaled.new_scale / beta, plain.new_scale, rtol=1e-12, atol=0)
        torch.testing.assert_close(scaled.shift / beta / beta, plain.shift, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("dtype", "g", "m", "c"),
    [
        (torch.float64, [1e160, 2e160], [1.0, 3.0], 1.0),
        (torch.float64, [1.0, 2.0], [1e155, 3e155], 1.0),
        (torch.float64, [1e300, 1e-300], [1e-300, 1e300], 1.0),
        (torch.float32, [0.0, 200.0], [1.0, 3.0], 3e38),
    ],
    ids=["large-g", "large-m", "wide", "large-rms"],
)
def test_overflow_is_not_silent(dtype: torch.dtype, g: list[float], m: list[float], c: float) -> None:
    """A row whose answer is no number may have a status that says so, but not one that says all is well."""
    result = ops.invert_rmsnorm(torch.tensor([g], dtype=dtype), torch.tensor(m, dtype=dtype), torch.tensor([c], dtype=dtype))
    finite = all(x.isfinite().all() for x in (result.hidden, result.shift, result.new_scale))
    assert finite or result.status >= Status.NONFINITE


@pytest.mark.parametrize("method", ["newton", "bisection"])
@every_dtype
def test_inversion_of_nothing(dtype: torch.dtype, method: str) -> None:
    for scale in (torch.ones(7, dtype=dtype), torch.ones(0, 7, dtype=dtype)):
        target = torch.ones(0, 7, dtype=dtype)
        result = ops.invert_rmsnorm(target, scale, torch.ones(0, dtype=dtype), 1e-6, target, method)
        assert result.hidden.shape == result.new_scale.shape == (0, 7)
        assert result.shift.shape == result.status.shape == result.evaluations.shape == (0,)
        assert result.hidden.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target": torch.ones(5)}, ValueError, "expected target with 2 dimensions, got (5,)"),
        ({"target": torch.ones(3, 0)}, ValueError, "expected target (B, n) with n ≥ 1, got n = 0"),
        ({"target": torch.ones(3, 5, dtype=torch.int32)}, TypeError, FLOATING.format("target", "int32")),
        ({"scale": torch.ones(4)}, ValueError, "expected scale (5,) or (3, 5), got (4,)"),
        ({"scale": torch.ones(1, 5)}, ValueError, "expected scale (5,) or (3, 5), got (1, 5)"),
        ({"scale": torch.ones(5, dtype=torch.int64)}, TypeError, FLOATING.format("scale", "int64")),
        ({"scale": torch.ones(5, device="meta")}, ValueError, "expected scale on cpu, got meta"),
        ({"rms": torch.ones(3, 1)}, ValueError, "expected rms (3,), got (3, 1)"),
        ({"rms": torch.tensor(1.0)}, ValueError, "expected rms (3,), got ()"),
        ({"rms": torch.ones(3, dtype=torch.bool)}, TypeError, FLOATING.format("rms", "bool")),
        ({"fallback": torch.ones(5)}, ValueError, "expected fallback (3, 5), got (5,)"),
        ({"fallback": torch.ones(3, 5, dtype=torch.int64)}, TypeError, FLOATING.format("fallback", "int64")),
        ({"eps": -1e-6}, ValueError, "expected a finite eps ≥ 0, got -1e-06"),
        ({"eps": float("nan")}, ValueError, "expected a finite eps ≥ 0, got nan"),
        ({"eps": float("inf")}, ValueError, "expected a finite eps ≥ 0, got inf"),
        ({"method": "regula falsi"}, ValueError, "expected method 'newton' or 'bisection', got 'regula falsi'"),
    ],
)
def test_invert_rmsnorm_refuses(changes: dict, error: type, message: str) -> None:
    good = {"target": torch.ones(3, 5), "scale": torch.ones(5), "rms": torch.ones(3)}
    ops.invert_rmsnorm(**good)
    check_refused(error, message, lambda: ops.invert_rmsnorm(**good | changes))
