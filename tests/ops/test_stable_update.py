"""The stable update in one op: against its plain torch form, and what it promises of every row."""

import itertools
from collections.abc import Callable

import pytest
import torch
from support.inversion import needs_native
from support.numeric import ULP, UNIT, normal, same_bits, seeded
from support.rows import ROWS, rows_of
from torch import Tensor

from icl_patch import ops
from icl_patch.ops import InversionStatus as Status
from icl_patch.ops.stable_update import floor_scale, reference_stable_scale

Update = Callable[..., ops.StableScale]
UPDATES = [pytest.param(ops.stable_scale, id="native", marks=needs_native)]
UPDATES += [pytest.param(reference_stable_scale, id="torch")]
every_update = pytest.mark.parametrize("update", UPDATES)
# Sums of up to 1,152 terms in another order, in fp64; the shift of a row is as far off as its
# condition says.
OTHER_SUMS = 1152 * ULP


def rows(
    count: int, n: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """delta of all sizes, a scale with zeros and nearly zeros in it, h with its own size; each row
    another mixture.
    """
    rng = seeded(seed)
    row = torch.arange(count).unsqueeze(1)
    delta = normal(rng, count, n) * 10.0 ** (row % 7 - 4)
    scale = 1 + 0.5 * normal(rng, count, n)
    scale[(torch.rand(count, n, generator=rng) < 0.2) & (row % 3 == 0)] = 0
    scale[(torch.rand(count, n, generator=rng) < 0.2) & (row % 3 == 1)] *= 1e-6
    h = normal(rng, count, n) * 10.0 ** (row % 5 - 2)
    return delta.to(dtype), scale.to(dtype), h.to(dtype)


def check_update(
    delta: Tensor, scale: Tensor, h: Tensor, eps: float, result: ops.StableScale
) -> None:
    """``m' ⊙ Norm(h + u) = delta + m ⊙ Norm(h)`` and ``RMS(h + u) = RMS(h)``, to the rounding of
    u.
    """
    rounding = UNIT[result.u.dtype]
    delta, scale, h, u = (x.double() for x in (delta, scale.expand(delta.shape), h, result.u))
    after = h + u
    mean, mean_after = (x.square().mean(1, keepdim=True) for x in (h, after))
    rms = mean.sqrt().where(mean > 0, 1.0)
    biggest = (h.abs() + u.abs()).amax(1, keepdim=True)
    assert ((mean_after.sqrt() - rms).abs() <= 16 * rounding * (rms + biggest)).all()
    norm, norm_after = (mean + eps).sqrt().where(mean + eps > 0, 1.0), (rms.square() + eps).sqrt()
    g = delta + scale * (h / norm)
    room = g.abs() + delta.abs() + (scale * h / norm).abs()
    room += result.new_scale.abs() * (after.abs() + u.abs() + h.abs()) / norm_after
    assert ((result.new_scale * (after / norm_after) - g).abs() <= 16 * rounding * room).all()


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 48, 257, 1152])
@needs_native
def test_native_is_like_plain_torch(n: int, eps: float) -> None:
    delta, scale, h = rows(42, n, seed=n)
    for m in (scale, scale[0]):
        result, expected = (
            update(delta, m, h, eps) for update in (ops.stable_scale, reference_stable_scale)
        )
        assert torch.equal(result.status, expected.status)
        size = (expected.u + h).abs().amax(1, keepdim=True)
        assert ((result.u - expected.u).abs() <= OTHER_SUMS * size).all()
        scale_size = expected.new_scale.abs().amax(1, keepdim=True)
        assert ((result.new_scale - expected.new_scale).abs() <= OTHER_SUMS * scale_size).all()
        torch.testing.assert_close(result.shift, expected.shift, rtol=64 * OTHER_SUMS, atol=0)
        check_update(delta, m, h, eps, result)


def test_the_floor_of_the_scale() -> None:
    """A quarter of the scale's RMS, or of the target's where the scale is 0."""
    scale = torch.tensor([[3.0, -0.1, 0.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    target = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 6.0, 0.0, 8.0]])
    floor = (9 + 0.01 + 16) ** 0.5 / 8
    expected = torch.tensor([[3.0, -floor, floor, 4.0], [1.25] * 4])
    torch.testing.assert_close(floor_scale(scale, target).float(), expected)


@pytest.mark.parametrize("family", ROWS)
@every_update
def test_on_adversarial_rows(update: Update, family: str) -> None:
    """The scale and delta of every family; nothing is out of reach, whatever the scale."""
    for n, eps in itertools.product((1, 2, 9, 64), (0.0, 1e-6, 1.0)):
        m, g = rows_of(family, 30, n)
        h = normal(seeded(n), *g.shape, dtype=torch.float32)
        result = update(g, m, h, eps)
        assert (result.status <= Status.HARD).all()
        assert all(x.isfinite().all() for x in (result.u, result.shift, result.new_scale))
        assert (result.evaluations <= 64).all()
        check_update(g, m, h, eps, result)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@every_update
def test_an_output_of_zero(update: Update, eps: float) -> None:
    """h = 0 has no RMS to keep: h_target is of RMS 1, and gives delta."""
    delta, scale, h = rows(14, 33)
    h[::2] = 0
    result = update(delta, scale, h, eps)
    torch.testing.assert_close(
        result.u[::2].square().mean(1), torch.ones(7).double(), rtol=33 * ULP, atol=0
    )
    produced = result.new_scale * result.u / (1 + eps) ** 0.5
    torch.testing.assert_close(produced[::2], delta[::2], rtol=33 * ULP, atol=0)
    check_update(delta, scale, h, eps, result)


@every_update
def test_bad_rows_have_their_status_and_leave_the_others_alone(update: Update) -> None:
    delta, scale, h = (torch.cat([x] * 74)[:1024].clone() for x in rows(14, 21, torch.float32))
    plain = update(delta, scale, h, 1e-6)
    bad = torch.tensor([100, 101, 102, 510, 511, 1023])
    delta[100, 20], scale[101, 0], h[102, 7] = torch.nan, -torch.inf, torch.nan
    delta[510, 8], h[511, 3], scale[1023, 20] = torch.inf, torch.inf, torch.nan
    result = update(delta, scale, h, 1e-6)
    assert (result.status[bad] >= Status.NONFINITE).all()
    assert (result.status[[100, 101, 102, 510, 1023]] == Status.NONFINITE).all()
    good = torch.ones(1024, dtype=torch.bool).index_fill_(0, bad, False)
    for name in ("u", "shift", "new_scale", "status", "evaluations"):
        assert same_bits(getattr(result, name)[good], getattr(plain, name)[good])
