"""The ridge regression: against least squares, its dual form, and the best change of a rank."""

import pytest
import torch
from torch import Tensor

from icl_patch.static.ridge import (
    DualMoments,
    LowRank,
    PrimalMoments,
    choose_ridge,
    moments_of,
    sums,
)

K, N = 13, 7


def draw(n: int, folds: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, K, generator=g, dtype=torch.float64) * torch.arange(1, K + 1)
    noise = torch.randn(n, N, generator=g, dtype=torch.float64)
    targets = inputs @ torch.randn(K, N, generator=g, dtype=torch.float64) + noise
    weights = torch.rand(n, generator=g, dtype=torch.float64) + 0.1
    return inputs, targets, weights, torch.arange(n) % folds


def least_squares(a: Tensor, t: Tensor, w: Tensor, ridge: float) -> Tensor:
    """Δ of ``Σ w ‖t − Δ a‖² + ρ ‖Δ‖²``, by lstsq of the rows with √ρ I below them."""
    root = w.sqrt().unsqueeze(1)
    rho = ridge * (w.unsqueeze(1) * a * a).sum(0).mean()
    rows = torch.cat([root * a, rho.sqrt() * torch.eye(K, dtype=a.dtype)])
    wanted = torch.cat([root * t, torch.zeros(K, N, dtype=a.dtype)])
    return torch.linalg.lstsq(rows, wanted).solution.T


@pytest.mark.parametrize("n", [8, 12, 13, 60])
@pytest.mark.parametrize("ridge", [1e-4, 1.0])
def test_every_fold_is_the_least_squares_of_the_others(n: int, ridge: float) -> None:
    a, t, w, fold = draw(n)
    for k, entry in enumerate(sums(moments_of(a, t, w, fold, 3))):
        kept = fold != k  # of the last one: all
        expected = least_squares(a[kept], t[kept], w[kept], ridge)
        error = (entry.solve(ridge).change - expected).norm() / expected.norm()
        assert error < 1e-10


def test_fewer_rows_than_inputs_take_the_dual_form() -> None:
    for n, kind in ((K - 1, DualMoments), (K, PrimalMoments)):
        assert type(sums(moments_of(*draw(n), 3))[-1]) is kind


@pytest.mark.parametrize("rank", [None, 1, 3, 7])
@pytest.mark.parametrize("left", [False, True])
def test_the_dual_form_is_the_primal_one(rank: int | None, left: bool) -> None:
    a, t, w, _ = draw(40)
    root = w.sqrt().unsqueeze(1)
    h, targets = root * a, root * t
    matrix = torch.randn(9, N, dtype=torch.float64) if left else None
    primal, dual = (
        moments.solve(0.1).low_rank(rank, matrix).dense()
        for moments in (
            PrimalMoments(h.T @ h, targets.T @ h, targets.T @ targets),
            DualMoments(h, targets),
        )
    )
    assert (primal - dual).norm() < 1e-10 * primal.norm()


def test_one_token_gives_its_own_patch() -> None:
    """``u vᵀ`` with ``v = a/‖a‖²``, as λ goes to 0."""
    a, t, _, fold = draw(1, folds=1)
    change = moments_of(a, t, torch.ones(1), fold, 1)[0].solve(1e-14).change
    expected = torch.outer(t[0], a[0] / a[0].square().sum())
    assert (change - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_a_change_of_a_rank_fits_the_rows_best(rank: int) -> None:
    a, t, w, fold = draw(50, folds=1)
    matrix = torch.randn(9, N, dtype=torch.float64)
    solution = moments_of(a, t, w, fold, 1)[0].solve(0.1)
    inputs, targets = (w.sqrt().unsqueeze(1) * x for x in (a, t))
    rho = 0.1 * (inputs**2).sum(0).mean()

    def loss(change: Tensor) -> float:
        error = targets @ matrix.T - inputs @ change.T
        return float((error**2).sum() + rho * (change**2).sum())

    # The loss of any change is that of W Δ plus its distance from W Δ in the metric of the inputs,
    # so the best of a rank is the singular value decomposition in that metric (Eckart and Young).
    whole = matrix @ solution.change
    metric = inputs.T @ inputs + rho * torch.eye(K, dtype=torch.float64)
    factor = torch.linalg.cholesky(metric)
    lost = torch.linalg.svdvals(whole @ factor)[rank:].square().sum()
    best = solution.low_rank(rank, matrix)
    assert best.rank == rank
    # fp64 over sums of 50 rows
    assert abs(loss(best.dense()) - loss(whole) - lost) < 1e-9 * loss(whole)
    assert lost > 1e-3 * loss(whole)


@pytest.mark.parametrize("n", [10, 24])  # the dual form, and the primal one
def test_the_ridge_is_chosen_out_of_fold(n: int) -> None:
    a, t, w, fold = draw(n, seed=3)
    other = draw(n, seed=4)[1]
    t = t + 20 * other / other.std()  # noise, so that neither end of the grid is best
    lambdas, generator = (1e-4, 1e-2, 1.0, 10.0, 1e4), torch.Generator().manual_seed(0)
    matrix = torch.randn(9, N, generator=generator, dtype=torch.float64)
    errors = []
    for ridge in lambdas:
        error = 0.0
        for k in range(3):
            kept, only = fold != k, fold == k
            change = least_squares(a[kept], t[kept], w[kept], ridge)
            rest = (t[only] - a[only] @ change.T) @ matrix.T
            error += float((w[only].unsqueeze(1) * rest**2).sum())
        errors.append(error)
    by_fold = moments_of(a, t, w, fold, 3)
    ridge, explained = choose_ridge(by_fold, sums(by_fold)[:-1], lambdas, matrix)
    assert ridge == lambdas[errors.index(min(errors))]
    assert ridge not in (lambdas[0], lambdas[-1])
    total = float((w.unsqueeze(1) * (t @ matrix.T) ** 2).sum())
    assert explained == pytest.approx(1 - min(errors) / total)


def test_rows_without_a_target_are_left_out() -> None:
    a, t, w, fold = draw(30, folds=1)
    t[4, 2], w[7] = float("nan"), 0
    kept = torch.ones(30, dtype=torch.bool)
    kept[[4, 7]] = False
    change = moments_of(a, t, w, fold, 1)[0].solve(0.1).change
    expected = least_squares(a[kept], t[kept], w[kept], 0.1)
    assert (change - expected).norm() < 1e-10 * expected.norm()


@pytest.mark.parametrize("spoil", [0.0, float("inf")])
def test_inputs_that_say_nothing_are_refused(spoil: float) -> None:
    a, t, w, fold = draw(30)
    with pytest.raises(ValueError, match="expected finite inputs that are not all 0"):
        moments_of(a * spoil, t, w, fold, 1)


def test_a_truncated_change_is_its_singular_value_decomposition() -> None:
    change = LowRank(torch.randn(6, N), torch.randn(6, K))
    u, s, v = torch.linalg.svd(change.dense(), full_matrices=False)
    expected = (u[:, :2] * s[:2]) @ v[:2]
    got = change.truncated(2)
    assert got.rank == 2
    # fp32 factors: a few roundings of the largest singular value
    assert (got.dense() - expected).norm() < 8 * torch.finfo(torch.float32).eps * s[0]
