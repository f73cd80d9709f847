"""Ridge regression of a target on an input, with folds, and its best change of a given rank.

For inputs a, targets t and weights w of n rows,

    S = Σ w a aᵀ,   C = Σ w t aᵀ,   Δ = C (S + ρ I)⁻¹,   ρ = λ mean(diag S),

all in fp64. With fewer rows than a has elements the dual form ``Δ = Tᵀ (H Hᵀ + ρ I)⁻¹ H`` gives
the same with a system of n equations (H and T: the rows of a and t times √w).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LAMBDAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_SINGULAR = 1e-12  # singular values below this share of the largest are rounding


@dataclass(frozen=True, eq=False)
class LowRank:
    """A change ``ΔW = Σ_r u_r v_rᵀ`` of a matrix (N, K): u (R, N), v (R, K)."""

    u: Tensor
    v: Tensor

    @property
    def rank(self) -> int:
        """R."""
        return len(self.u)

    def dense(self) -> Tensor:
        """ΔW (N, K) in fp64."""
        return self.u.double().T @ self.v.double()

    def to(self, dtype: torch.dtype | torch.device) -> "LowRank":
        """Both factors in another dtype or on another device."""
        return LowRank(self.u.to(dtype), self.v.to(dtype))

    def truncated(self, rank: int) -> "LowRank":
        """The nearest change of at most this rank: the largest singular values are kept, and the
        root of each goes into both factors.
        """
        left, left_r = torch.linalg.qr(self.u.double().T)
        right, right_r = torch.linalg.qr(self.v.double().T)
        u, sizes, v = torch.linalg.svd(left_r @ right_r.T, full_matrices=False)
        root = sizes[:rank].sqrt()
        return LowRank(
            ((left @ u[:, :rank]) * root).T.to(self.u.dtype).contiguous(),
            ((right @ v[:rank].T) * root).T.to(self.v.dtype).contiguous(),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.u.nbytes + self.v.nbytes


@dataclass(frozen=True, eq=False)
class Regression:
    """Rows of a ridge regression, scaled by √w, in fp64, with the fold that each belongs to.

    inputs: H (n, K); targets: T (n, N); fold: (n,) int64; folds: how many there are.
    """

    inputs: Tensor
    targets: Tensor
    fold: Tensor
    folds: int

    @classmethod
    def of(
        cls, inputs: Tensor, targets: Tensor, weights: Tensor, fold: Tensor, folds: int
    ) -> "Regression":
        """The regression of these rows; rows with a target that is not finite, or with weight 0,
        are left out.

        Raises:
            ValueError: no row is left, or the inputs are all 0 or not finite.
        """
        kept = targets.isfinite().all(-1) & (weights > 0)
        root = weights[kept].double().sqrt().unsqueeze(1)
        scaled = root * inputs[kept].double()
        if not len(scaled) or not scaled.any() or not scaled.isfinite().all():
            raise ValueError(
                f"expected finite inputs that are not all 0, got {len(scaled)} rows with a target"
            )
        return cls(scaled, root * targets[kept].double(), fold[kept], folds)

    def moments(self) -> "list[Moments]":
        """For each fold the moments of all rows outside the fold; at the end the moments of all
        rows.
        """
        rows = [self.fold != k for k in range(self.folds)] if self.folds > 1 else []
        rows.append(torch.ones_like(self.fold, dtype=torch.bool))
        if len(self.inputs) < self.inputs.shape[1]:
            return [DualMoments(self.inputs[kept], self.targets[kept]) for kept in rows]
        by_fold = [
            (self.inputs[only].T @ self.inputs[only], self.targets[only].T @ self.inputs[only])
            for only in (self.fold == k for k in range(self.folds))
        ]
        s, c = (sum(moments[1:], moments[0]) for moments in zip(*by_fold, strict=True))
        without = [(s - s_k, c - c_k) for s_k, c_k in by_fold] if self.folds > 1 else []
        return [PrimalMoments(*moments) for moments in (*without, (s, c))]


class Moments(ABC):
    """The moments of some rows, which :meth:`solve` needs."""

    @abstractmethod
    def solve(self, ridge: float) -> "Solution":
        """The ridge solution for λ."""


@dataclass(frozen=True, eq=False)
class PrimalMoments(Moments):
    """S (K, K) and C (N, K). They add up over shards of the rows."""

    s: Tensor
    c: Tensor

    def solve(self, ridge: float) -> "Solution":
        """A Cholesky factorisation of K x K."""
        rho = ridge * self.s.diagonal().mean()
        system = self.s + rho * torch.eye(len(self.s), dtype=self.s.dtype, device=self.s.device)
        change = torch.cholesky_solve(self.c.T, torch.linalg.cholesky(system)).T
        return Solution(change, change, self.c.T)


@dataclass(frozen=True, eq=False)
class DualMoments(Moments):
    """H (n, K) and T (n, N)."""

    inputs: Tensor
    targets: Tensor

    def solve(self, ridge: float) -> "Solution":
        """A Cholesky factorisation of n x n."""
        gram = self.inputs @ self.inputs.T
        rho = ridge * gram.diagonal().sum() / self.inputs.shape[1]
        system = gram + rho * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        mixture = torch.cholesky_solve(self.targets, torch.linalg.cholesky(system))  # (n, N)
        return Solution(mixture.T @ self.inputs, mixture.T, gram @ self.targets)


@dataclass(frozen=True, eq=False)
class Solution:
    """``Δ`` (N, K) in fp64, and two factors of ``Δ Cᵀ = Δ (S + ρ I) Δᵀ`` (N, N)."""

    change: Tensor
    gram_left: Tensor
    gram_right: Tensor

    def low_rank(self, rank: int | None, left: Tensor | None = None) -> LowRank:
        """``W Δ``, or Δ without ``left``, cut to a rank: ``u = U``, ``v = Uᵀ W Δ`` with U the top
        eigenvectors of ``W Δ (S + ρ I) Δᵀ Wᵀ``. Of that rank it fits the rows best.

        Without a rank the product is kept whole: u = Wᵀ, v = Δ.
        """
        if rank is None:
            whole = torch.eye(len(self.change), dtype=self.change.dtype, device=self.change.device)
            return LowRank(whole if left is None else left.double().T, self.change)
        gram = self.gram_left @ self.gram_right
        values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
        half = vectors * values.clamp_min(0).sqrt()  # half halfᵀ is the gram matrix
        if left is not None:
            half = left.double() @ half
        values, vectors = torch.linalg.eigh(half.T @ half)
        values, vectors = values[-rank:].flip(0), vectors[:, -rank:].flip(1)
        kept = values > _SINGULAR * values[0].clamp_min(torch.finfo(values.dtype).tiny)
        u = (half @ (vectors[:, kept] / values[kept].sqrt())).T
        v = u @ self.change if left is None else (u @ left.double()) @ self.change
        return LowRank(u, v)


def choose_ridge(
    rows: Regression,
    moments: Sequence[Moments],
    lambdas: Sequence[float] = LAMBDAS,
    left: Tensor | None = None,
) -> tuple[float, float]:
    """The λ with the smallest squared error out of fold, and the share of the targets' squares
    that it explains there.

    left: W (M, N); the error is that of ``W t``.
    """
    # ‖W x‖ = ‖R x‖ with W = Q R, which has no more rows than x has elements
    metric = None if left is None else torch.linalg.qr(left.double(), mode="r").R.T

    def size(x: Tensor) -> float:
        return float((x if metric is None else x @ metric).detach().square().sum())

    errors = []
    for ridge in lambdas:
        error = 0.0
        for k in range(rows.folds):
            only = rows.fold == k
            change = moments[k].solve(ridge).change
            error += size(rows.targets[only] - rows.inputs[only] @ change.T)
        errors.append(error)
    best = min(range(len(errors)), key=errors.__getitem__)
    total = size(rows.targets)
    return lambdas[best], 1 - errors[best] / total if total else 1.0
