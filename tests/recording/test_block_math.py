"""The updates as formulas: against the materialised matrices, and the paper's Appendix B written
out.
"""

import pytest
import torch
import torch.nn.functional as F
from support.numeric import ULP, UNIT, every_dtype, every_narrow, seeded, within_roundings
from torch import Tensor

from icl_patch import ops
from icl_patch.ops.stable_update import floor_scale
from icl_patch.recording import block_math

SUMS = 48 * ULP  # of as many terms in fp64
SOLVED = 32 * ULP  # what the solver leaves of its equation


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def norm_of(h: Tensor, eps: float) -> Tensor:
    """RMSNorm without its scale, the definition in fp64."""
    h = h.double()
    return h / (h.square().mean(-1, keepdim=True) + eps).sqrt()


def relative(x: Tensor, y: Tensor) -> float:
    """``max|x - y| / max|y|`` over each row, the largest; NaN is infinite."""
    error = (x.double() - y.double()).abs().amax(-1) / y.double().abs().amax(-1)
    return float(error.nan_to_num(torch.inf).max())


# Readers


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_a_reader_gives_what_it_gave_with_the_context(bias: bool) -> None:
    """``(W + u vᵀ) z + b = W z_ctx + b`` with the matrix built."""
    z, z_ctx, weight = normal(0, 5, 48), normal(1, 5, 48), normal(2, 72, 48)
    b = normal(3, 72) if bias else torch.zeros(72).double()
    u = block_math.reader_update(F.linear(z_ctx, weight, b), F.linear(z, weight, b))
    v = ops.read_direction(z).v
    patched = weight + u.unsqueeze(2) * v.unsqueeze(1)  # (M, I, d)
    assert relative(torch.einsum("mik,mk->mi", patched, z) + b, z_ctx @ weight.T + b) <= SUMS


@every_dtype
def test_reader_update_is_rounded_once(dtype: torch.dtype) -> None:
    y_ctx, y = normal(0, 5, 72, dtype=dtype), normal(1, 5, 72, dtype=dtype) * 2.0**-9
    u = block_math.reader_update(y_ctx, y)
    assert u.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(u, (y_ctx.double() - y.double()).to(u.dtype))
    if dtype in (torch.bfloat16, torch.float16):
        assert not torch.equal(u, (y_ctx - y).float())


def test_a_reader_of_a_scaled_input() -> None:
    """An expert reads ``s z``, of which v gives s: its change is ``u s``."""
    change, share = normal(0, 3, 5, 37), normal(1, 3, 5, 1)
    share[1, 2] = change[1, 2] = 0
    u = block_math.scaled_reader_update(change, share)
    torch.testing.assert_close(u * share, change, rtol=4 * ULP, atol=0)
    assert not u[1, 2].any()


# Writers


@every_dtype
def test_what_a_writer_has_to_produce(dtype: torch.dtype) -> None:
    """The sum of a block ``f w ⊙ hidden + m MLP`` with the context, from ``hidden`` without it."""
    wide = torch.promote_types(dtype, torch.float32)
    hidden_ctx, hidden, mlp = (normal(seed, 5, 63, dtype=dtype).to(wide) for seed in range(3))
    weight, delta = normal(3, 63, dtype=dtype), block_math.context_change(hidden_ctx, hidden)
    for factor, multiplier, scale in ((1.0, 1.0, None), (0.3, -2.0, weight), (7.0, 7.0, None)):
        target = block_math.writer_target(delta, factor, multiplier, scale)
        assert target.dtype == wide
        w = 1.0 if scale is None else scale.double()
        with_context = factor * w * hidden_ctx.double() + multiplier * mlp.double()
        patched = factor * w * hidden.double() + multiplier * (mlp.double() + target.double())
        assert relative(patched, with_context) <= 8 * UNIT[wide]
        assert relative(patched - multiplier * target.double(), with_context) > 0.1


@every_dtype
def test_weight_and_bias_update(dtype: torch.dtype) -> None:
    """``(W + u vᵀ) h = W h + delta`` and ``b + Δb``, with the matrix built."""
    wide = torch.promote_types(dtype, torch.float32)
    delta, h, weight = normal(0, 5, 37).to(wide), normal(1, 5, 63, dtype=dtype), normal(2, 37, 63)
    h[3] = 0
    for asked in (None, torch.float64):
        u, (v, inverse, _) = block_math.weight_update(delta, h, asked)
        unit = UNIT[v.dtype]
        assert u.dtype == v.dtype == (asked or wide)
        changed = weight + u.double().unsqueeze(2) * v.double().unsqueeze(1)
        produced = torch.einsum("mnk,mk->mn", changed, h.double()) - h.double() @ weight.T
        live = [0, 1, 2, 4]
        assert relative(produced[live], delta[live]) <= 64 * max(unit, ULP)
        assert inverse.ne(0).tolist() == [True, True, True, False, True]
        assert not produced[3].any()
        gain = block_math.weight_gain(h, v.double())
        torch.testing.assert_close(gain[live], torch.ones(4, 1).double(), rtol=64 * unit, atol=0)
    assert torch.equal(block_math.bias_update(delta), delta)
    assert torch.equal(block_math.bias_update(delta, torch.float64), delta.double())


@pytest.mark.parametrize("bias", [False, True], ids=["matrices", "biases"])
def test_expert_update(bias: bool) -> None:
    """``Σ_j s_j (W_j + u v_jᵀ) h_j`` or ``Σ_j s_j (b_j + Δb)`` is delta more than before."""
    delta, weights, h = normal(0, 3, 2, 37), normal(1, 3, 2, 4), normal(2, 3, 2, 4, 63)
    matrices = normal(3, 3, 2, 4, 37, 63)
    h[1, 1, 2] = 0  # an expert whose matrix has no effect: the others do without it
    weights[2, 0] = torch.tensor([0.5, -0.5, 0.25, -0.25])  # no change has an effect
    u, v, total, share = block_math.expert_update(delta, weights, h, torch.float64, bias=bias)
    if bias:
        assert v is None
        produced = (weights.unsqueeze(-1) * u.unsqueeze(-2)).sum(-2)
    else:
        changed = matrices + u.unsqueeze(-2).unsqueeze(-1) * v.unsqueeze(-2)
        outputs = (torch.einsum("btjnk,btjk->btjn", x, h) for x in (changed, matrices))
        now, before = ((weights.unsqueeze(-1) * x).sum(-2) for x in outputs)
        produced = now - before
        assert not v[1, 1, 2].any()
    # a sum that nearly cancels is divided by
    bound = 256 * ULP * (1 + (weights.abs().sum(-1, keepdim=True) * share).abs()) * 63
    error = (produced - delta).abs()
    there = torch.ones(3, 2, dtype=torch.bool)
    there[2, 0] = False
    assert (error <= bound)[there].all()
    assert not produced[2, 0].any()
    assert (total[2, 0], share[2, 0]) == (0, 0)
    expected = weights.sum(-1, keepdim=True)
    if not bias:
        expected[1, 1] -= weights[1, 1, 2]
    torch.testing.assert_close(total, expected, rtol=0, atol=8 * ULP)


# Scale writers


def scale_writer_error(
    delta: Tensor, scale: Tensor, before: Tensor, new_scale: Tensor, after: Tensor, eps: float
) -> float:
    """Of ``m' ⊙ Norm(h') - m ⊙ Norm(h) = delta``, relative to the target ``g`` of the row."""
    g = delta.double() + scale.double() * norm_of(before, eps)
    return relative(new_scale.double() * norm_of(after, eps), g)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_direct_scale(eps: float) -> None:
    delta, scale, h = normal(0, 7, 48), normal(1, 48), normal(2, 7, 48)
    new_scale = block_math.direct_scale(delta, ops.rms_normalize(h, eps), scale)
    assert new_scale.shape == (7, 48)
    assert scale_writer_error(delta, scale, h, new_scale, h, eps) <= SUMS
    produced = new_scale * norm_of(h, eps) - scale * norm_of(h, eps)
    assert within_roundings(produced, delta, 96, delta.abs() + (scale * norm_of(h, eps)).abs())
    assert (
        scale_writer_error(delta, scale, h, block_math.direct_scale(delta, h, scale), h, eps) > 1e-2
    )


def test_direct_scale_at_zero() -> None:
    """A zero of the norm's output is left alone where nothing is wanted of it, and infinite, which
    callers refuse, where something is.
    """
    delta = torch.tensor([[0.0, 2.0, 0.0, -2.0]])
    normalized = torch.tensor([[0.0, 0.0, 3.0, 0.5]])
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert block_math.direct_scale(delta, normalized, scale).tolist() == [
        [1.0, torch.inf, 3.0, 0.0]
    ]


def invert_as_the_paper_does(
    g: Tensor, m: Tensor, rms: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Appendix B.2: bisection on eq. (8) for μ on ``(-∞, min m²)``, then eq. (7); eps only changes
    the radius. Returns μ, h_target.
    """
    low = (
        m.square().amin()
        - (g * m).square().sum(-1).sqrt() * ((rms.square() + eps) / rms.square()).sqrt()
    ).unsqueeze(-1)
    high = m.square().amin().expand_as(low)
    for _ in range(200):
        mu = (low + high) / 2
        too_far = (g * m / (m.square() - mu)).square().mean(-1, keepdim=True) > (
            rms.square() / (rms.square() + eps)
        ).unsqueeze(-1)
        low, high = torch.where(too_far, low, mu), torch.where(too_far, mu, high)
    y = g * m / (m.square() - low)
    return low, y * (rms.square() + eps).sqrt().unsqueeze(-1)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_stable_scale_is_the_papers(eps: float) -> None:
    """``Δm = -μ ⊘ m`` against Appendix B.1 step by step, which divides the remainder r by the
    normalised target.
    """
    delta, scale, h = 0.7 * normal(0, 20, 48), 2 + 0.3 * normal(1, 48), 3 * normal(2, 20, 48)
    assert torch.equal(floor_scale(scale, delta)[0], scale)  # none is small
    g = delta + scale * norm_of(h, eps)
    mu, h_target = invert_as_the_paper_does(g, scale, h.square().mean(-1).sqrt(), eps)
    h_norm = norm_of(h_target, eps)
    remainder = g - scale * h_norm
    papers = remainder / h_norm

    tokens = (x.reshape(4, 5, 48) for x in (delta, h))
    stable = block_math.stable_scale(next(tokens), scale, next(tokens), eps)
    u, change = stable.u.reshape(20, 48), (stable.new_scale - scale).reshape(20, 48)
    assert stable.status.shape == (4, 5)
    alone = block_math.stable_scale(delta[7], scale, h[7], eps)
    assert torch.equal(alone.u, stable.u[1, 2]) and alone.status.shape == ()
    # two ways to solve, and a difference of numbers as large as the largest
    close = {"rtol": 0, "atol": 2 * SOLVED * float((scale.abs() + papers.abs()).max())}
    near = 2 * SOLVED * float(h_target.abs().max())
    torch.testing.assert_close(h + u, h_target, rtol=0, atol=near)
    torch.testing.assert_close(change, papers, **close)
    torch.testing.assert_close(change, -mu / scale, **close)
    assert papers.abs().amin(-1).min() > 1e-8  # a comparison of zeros would prove nothing
    with pytest.raises(AssertionError):
        torch.testing.assert_close(change, delta / norm_of(h, eps), **close)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_small_scales_lose_few_digits(share: float) -> None:
    """The norm reads ``addend + (inner + u)`` in fp32, of which only u can change."""
    scale = 0.01 * 3000.0 ** torch.linspace(0, 1, 48)  # from 0.01 to 30
    addend, inner, delta = (normal(seed, 9, 48, dtype=torch.float32) for seed in range(3))
    addend, delta = share * addend, 100 * delta  # a change larger than the norm's output
    stable = ops.stable_scale(delta, scale, addend + inner, 1e-6)
    result = stable.new_scale * norm_of(addend + (inner + stable.u), 1e-6)
    wanted = delta.double() + scale * norm_of(addend + inner, 1e-6)
    # where the scale is below 0.15; u, two sums, and sums four times larger than their result
    assert relative(result[:, :16], wanted[:, :16]) <= 16 * UNIT[torch.float32]


@every_narrow
def test_an_update_moves_off_zero(dtype: torch.dtype) -> None:
    """Where ``h_down + (v·h) u`` is 0, and there alone."""
    h, y = normal(0, 3, 63, dtype=dtype), normal(1, 3, 48, dtype=torch.float32)
    u, v = normal(2, 3, 48, dtype=torch.float32), block_math.read_direction(h).v
    u[0, 3], u[2, 40] = -y[0, 3], -y[2, 40]
    moved = block_math.move_off_zero(u, v, y, h, dtype)
    assert (moved != u).nonzero().tolist() == [[0, 3], [2, 40]]
    patched = block_math.add_rank_one(y, h, moved, v, dtype)
    rms = y.square().mean(-1, keepdim=True).sqrt()
    assert (patched.abs() > 2.0**-18 * rms).all()
    assert ((moved - u).abs() <= 2.0**-15 * rms).all()


@every_narrow
def test_off_zero_in_a_sum_that_cancels(dtype: torch.dtype) -> None:
    """A step that the output's rounding would swallow leaves the sum 0."""
    patched = normal(0, 3, 48, dtype=dtype)
    addend = patched.abs() + 1
    patched[0, 3], patched[2, 40] = 8.0, 0.0
    addend[0, 3], addend[2, 40] = -8.0, 0.0
    step = block_math.off_zero(patched, patched, addend)
    assert step.nonzero().tolist() == [[0, 3], [2, 40]]
    assert ((patched + step).to(dtype) + addend).all()
    assert step.max() <= 2.0**-15 + 16 * torch.finfo(dtype).eps


@every_narrow
def test_an_inner_scale_whose_norm_cancels_the_addend(dtype: torch.dtype) -> None:
    """Moved, it makes the sum differ from 0, and is as near as the output's dtype allows."""
    normalized, new_scale = normal(0, 3, 37, dtype=dtype), normal(1, 3, 37, dtype=torch.float32)
    scaled, addend = (new_scale * normalized).to(dtype), normal(2, 3, 37, dtype=dtype)
    addend[1, 4], addend[2, 0] = -scaled[1, 4], -scaled[2, 0]
    moved = block_math.scale_off_zero(new_scale, scaled, addend)
    assert (moved != new_scale).nonzero().tolist() == [[1, 4], [2, 0]]
    assert ((moved * normalized).to(dtype) + addend).all()
    assert ((moved / new_scale - 1).abs() <= 2.0**-12 + 4 * torch.finfo(dtype).eps).all()


# A decode step


@every_dtype
def test_record_linear_is_the_readers_formulas(dtype: torch.dtype) -> None:
    """Both products, their difference and the patched output in one op, within their roundings."""
    for rows, k, n in ((0, 5, 3), (1, 1, 1), (2, 63, 37), (3, 1000, 257)):
        z, weight, bias = (normal(0, *size, dtype=dtype) for size in ((2 * rows, k), (n, k), (n,)))
        pair, u, _ = ops.record_linear(z, weight, bias)
        wide = torch.promote_types(dtype, torch.float32)
        assert (pair.dtype, u.dtype) == (dtype, wide)
        y_ctx, y = F.linear(z.double(), weight.double(), bias.double()).chunk(2)
        size = F.linear(z.double().abs(), weight.double().abs(), bias.double().abs())
        size, expected = size[:rows] + size[rows:], block_math.reader_update(y_ctx, y)
        assert within_roundings(u, expected, 2 * k + 4, size)
        # with u as expected the patched output is the context's; each is rounded once more
        bound = UNIT[dtype] * y_ctx.abs() + (4 * k + 8) * UNIT[wide] * size
        for found in pair.double().chunk(2):
            assert ((found - y_ctx).abs() <= bound).all()
        if n > 1 and rows:  # the bound is less than the change
            assert not within_roundings(u, 0.9 * expected, 2 * k + 4, size)
            assert not ((y - y_ctx).abs() <= bound).all()


# Closing


def test_round_sum() -> None:
    residual = torch.tensor([4.0, 4.0, -4.0, 0.0, 4.0, 4.0, torch.inf])
    edge = 4 * 2.0**-40
    rest = [1e-30, torch.nan, torch.inf, torch.inf]
    total = torch.tensor([edge, edge * (1 - 2.0**-52), -edge / 2, *rest], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = block_math.round_sum(total, residual, dtype)
        assert rounded.dtype == dtype
        expected = torch.tensor([edge, 0, 0, *rest], dtype=torch.float64).to(dtype)
        torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)
    x = normal(0, 1000)
    assert torch.equal(block_math.round_sum(x, x, torch.bfloat16), x.bfloat16())


def check_closed(
    closed: block_math.Closed, target: Tensor, residual: Tensor, base: Tensor, gain: Tensor
) -> None:
    """Every target is hit, as the block computes its output."""
    assert not closed.misses.any()
    assert closed.factor.dtype == torch.float64
    total = residual.double() + (base.double() + closed.factor * gain.double())
    assert torch.equal(block_math.round_sum(total, residual, target.dtype), target)


def writer(kind: str, seed: int, rows: int = 12, n: int = 64) -> tuple[Tensor, Tensor]:
    """base and gain of a weight writer, whose ``κ = v·h`` is 1 up to rounding, or of a scale
    writer's normalised input.
    """
    if kind == "weight":
        return normal(seed, rows, n), 1 + 2.0**-50 * normal(seed + 1, rows, 1)
    return torch.zeros(rows, n), normal(seed, rows, n, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["weight", "scale"])
@every_narrow
def test_close_hits_the_target(dtype: torch.dtype, kind: str) -> None:
    for seed, size in enumerate((1e-3, 1.0, 1e3)):
        residual = (size * normal(seed, 12, 64)).to(dtype)
        target = normal(seed + 10, 12, 64).to(dtype)
        base, gain = writer(kind, seed + 20)
        started = (target.double() - residual.double() - base.double()) / gain.double()
        started *= 1 + 1e-3 * normal(seed + 30, 12, 64)
        closed = block_math.close(target, residual, base, gain, started)
        check_closed(closed, target, residual, base, gain)


@pytest.mark.parametrize("kind", ["weight", "scale"])
@every_narrow
def test_close_hits_zeros_and_small_targets(dtype: torch.dtype, kind: str) -> None:
    """Elements that are exactly 0, which a rounded product cannot cancel to, and ones far below the
    residual.
    """
    # What fp64 leaves of a sum is 2⁻⁵³ of the residual: a target needs its own digits above that,
    # or to be a number of round_sum's.
    smallest = {torch.float32: 25, torch.bfloat16: 39, torch.float16: 24}[dtype]
    residual = (1 + normal(0, 12, 64).abs().clamp(max=0.9)).to(dtype)
    exponent = torch.linspace(0, smallest, 64).round()
    target = (normal(1, 12, 64).sign() * (1 + normal(2, 12, 64).abs() / 5) * 2**-exponent).to(dtype)
    target[:, ::3] = 0
    target[0] = 0
    base, gain = writer(kind, 3)
    closed = block_math.close(target, residual, base, gain, torch.zeros(12, 64))
    check_closed(closed, target, residual, base, gain)
    if kind == "scale":  # the zeros are a case: fp64 does not cancel all of them to the last bit
        total = residual.double() + closed.factor * gain.double()
        assert (total[target == 0] != 0).any()


@every_narrow
def test_misses_are_counted(dtype: torch.dtype) -> None:
    """Where the gain is 0 nothing can be done: the factor stays what it was, and counts as a miss
    unless the sum is right anyway.
    """
    residual, target = normal(0, 5, 32).to(dtype), normal(1, 5, 32).to(dtype)
    gain, started = normal(2, 5, 32), normal(3, 5, 32)
    gain[1, :3] = 0
    gain[4, 7] = 0
    gain[2, 9] = 0
    target[2, 9] = residual[2, 9]
    closed = block_math.close(target, residual, torch.zeros(5, 32), gain, started)
    assert closed.misses.tolist() == [0, 3, 0, 0, 1]
    assert torch.equal(closed.factor[gain == 0], started[gain == 0])
    # below 2⁻⁴⁰ of the residual a sum is taken for 0; that may not pass as a hit
    target = torch.tensor([[2.0**-39, 2.0**-45, 0.0, -(2.0**-60)]]).to(dtype)
    zero, one = torch.zeros(1, 4), torch.ones(1, 4)
    missed = block_math.close(target, one.to(dtype), zero, one, zero).misses
    assert missed.tolist() == [2 if dtype != torch.float16 else 0]  # where both are 0


@pytest.mark.parametrize("branch", [0.0, -0.25])
def test_close_behind_a_factor_of_the_branch(branch: float) -> None:
    """The output of a branch that is multiplied by 0 does not depend on the factor, which stays."""
    parts = [normal(seed, 5, 32, dtype=torch.float32) for seed in range(5)]
    target, residual, base, gain, started = parts
    closed = block_math.close(*parts, branch)
    assert torch.equal(closed.output, residual if branch == 0 else target)
    assert torch.equal(closed.misses, (closed.output != target).sum(-1))
    total = residual.double() + branch * (base.double() + closed.factor * gain.double())
    assert torch.equal(total.float(), closed.output)
    assert torch.equal(closed.factor, started.double()) == (branch == 0)
    correction = block_math.correction(closed.factor, residual, base, gain, started, branch)
    assert (correction == 0).all() == (branch == 0)
    multiplied = block_math.correction(
        closed.factor, residual, branch * base, branch * gain, started
    )
    torch.testing.assert_close(correction, multiplied)


def test_correction_is_the_size_of_the_change() -> None:
    target, residual = (normal(seed, 6, 32).bfloat16() for seed in (0, 1))
    base, gain = writer("scale", 2, 6, 32)
    exact = (target.double() - residual.double() - base) / gain.double()
    started = exact + 1e-3 * normal(4, 6, 32) / gain.double()
    started[2] = exact[2]
    started[3] = 0
    residual[0, 3] *= 4000  # an element whose size a norm of the row would not see past
    target[0, 3] = (residual[0, 3].double() + base[0, 3] + started[0, 3] * gain[0, 3]).bfloat16()
    closed = block_math.close(target, residual, base, gain, started)
    change = ((closed.factor - started) * gain).abs()
    size = residual.double().abs() + (base + closed.factor * gain).abs()
    size = size.maximum(size.sqrt().mean(-1, keepdim=True) ** 2)
    expected = (change / size).square().mean(-1).sqrt()
    correction = block_math.correction(closed.factor, residual, base, gain, started)
    torch.testing.assert_close(correction, expected)
    assert correction[2] <= 4 * ULP
    assert correction[3] > 0.3  # all that the writer writes, beside the residual stream
    assert ((correction[[0, 1, 4, 5]] > 2e-4) & (correction[[0, 1, 4, 5]] < 5e-3)).all()
    parts = [residual[:1], base[:1], gain[:1], started[:1]]
    zero = block_math.close(torch.zeros(1, 32).bfloat16(), *parts)
    assert block_math.correction(zero.factor, *parts).isfinite().all()
    assert zero.misses.tolist() == [0]
