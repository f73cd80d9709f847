"""Ridge regression of a target on an input, with folds, and its best change of a given rank.

For inputs a, targets t and weights w of n rows,

    S = Σ w a aᵀ,   C = Σ w t aᵀ,   Δ = C (S + ρ I)⁻¹,   ρ = λ mean(diag S),

all in fp64. With fewer rows than a has elements the dual form ``Δ = Tᵀ (H Hᵀ + ρ I)⁻¹ H`` gives
the same with a system of n equations (H and T: the rows of a and t times √w).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

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


class Moments(ABC):
    """The moments of some rows: all that a ridge regression needs of them. They add up."""

    @abstractmethod
    def __add__(self, other: Any) -> "Moments":
        """The moments of both sets of rows."""

    @abstractmethod
    def summed(self, over_processes: Callable[[Tensor], Tensor]) -> "Moments":
        """The sum over processes."""

    @abstractmethod
    def size(self) -> Tensor:
        """``Σ w a·a`` of the rows."""

    @abstractmethod
    def solve(self, ridge: float) -> "Solution":
        """The ridge solution for λ."""

    @abstractmethod
    def squares(self) -> Tensor:
        """``Σ w t tᵀ`` (N, N) of the rows."""

    @abstractmethod
    def error(self, change: Tensor) -> Tensor:
        """``Σ w (t − Δ a)(t − Δ a)ᵀ`` (N, N) of the rows for a change Δ (N, K)."""


@dataclass(frozen=True, eq=False)
class PrimalMoments(Moments):
    """S (K, K), C (N, K), and ``T = Σ w t tᵀ`` (N, N)."""

    s: Tensor
    c: Tensor
    t: Tensor

    def __add__(self, other: "PrimalMoments") -> "PrimalMoments":
        """Sums."""
        return PrimalMoments(self.s + other.s, self.c + other.c, self.t + other.t)

    def __iadd__(self, other: "PrimalMoments") -> "PrimalMoments":
        """Sums, in the memory of this one."""
        for own, more in ((self.s, other.s), (self.c, other.c), (self.t, other.t)):
            own += more
        return self

    def summed(self, over_processes: Callable[[Tensor], Tensor]) -> "PrimalMoments":
        """Sums, in the memory of this one."""
        return PrimalMoments(*(over_processes(x) for x in (self.s, self.c, self.t)))

    def size(self) -> Tensor:
        """The trace of S."""
        return self.s.trace()

    def solve(self, ridge: float) -> "Solution":
        """A Cholesky factorisation of K x K."""
        rho = ridge * self.size() / len(self.s)
        system = self.s + rho * torch.eye(len(self.s), dtype=self.s.dtype, device=self.s.device)
        change = torch.cholesky_solve(self.c.T, torch.linalg.cholesky(system)).T
        return Solution(change, change, self.c.T)

    def squares(self) -> Tensor:
        """T."""
        return self.t

    def error(self, change: Tensor) -> Tensor:
        """``T − Δ Cᵀ − C Δᵀ + Δ S Δᵀ``."""
        mixed = (change @ self.s / 2 - self.c) @ change.T
        return self.t + mixed + mixed.T


@dataclass(frozen=True, eq=False)
class DualMoments(Moments):
    """H (n, K) and T (n, N)."""

    inputs: Tensor
    targets: Tensor

    def __add__(self, other: "DualMoments") -> "DualMoments":
        """The rows of both."""
        return DualMoments(
            torch.cat([self.inputs, other.inputs]), torch.cat([self.targets, other.targets])
        )

    def summed(self, over_processes: Callable[[Tensor], Tensor]) -> "DualMoments":
        """Raises TypeError: the rows of the other processes are not there."""
        raise TypeError("expected primal moments, which add up over processes, got rows")

    def size(self) -> Tensor:
        """From the inputs of the rows."""
        return self.inputs.square().sum()

    def solve(self, ridge: float) -> "Solution":
        """A Cholesky factorisation of n x n."""
        gram = self.inputs @ self.inputs.T
        rho = ridge * self.size() / self.inputs.shape[1]
        system = gram + rho * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        mixture = torch.cholesky_solve(self.targets, torch.linalg.cholesky(system))  # (n, N)
        return Solution(mixture.T @ self.inputs, mixture.T, gram @ self.targets)

    def squares(self) -> Tensor:
        """From the targets of the rows."""
        return self.targets.T @ self.targets

    def error(self, change: Tensor) -> Tensor:
        """From the residuals of the rows."""
        residual = self.targets - self.inputs @ change.T
        return residual.T @ residual


def moments(inputs: Tensor, targets: Tensor, weights: Tensor, dual: bool) -> Moments:
    """The moments of rows a (n, K), t (n, N) with weights w (n,), in fp64, in one of the two forms.

    Rows with a target that is not finite, or with weight 0, are left out.

    Raises:
        ValueError: an input is not finite.
    """
    kept = targets.isfinite().all(-1) & (weights > 0)
    root = weights[kept].double().sqrt().unsqueeze(1)
    h, t = root * inputs[kept].double(), root * targets[kept].double()
    if not h.isfinite().all():
        raise ValueError("expected finite inputs that are not all 0, got NaN or infinity")
    return DualMoments(h, t) if dual else PrimalMoments(h.T @ h, t.T @ h, t.T @ t)


def summed(
    by_fold: Sequence[Moments], over_processes: Callable[[Tensor], Tensor] | None = None
) -> list[Moments]:
    """The moments of each fold, primal ones summed over processes that have rows of their own.

    Raises:
        ValueError: no row is left, or the inputs are all 0.
    """
    found = [own if over_processes is None else own.summed(over_processes) for own in by_fold]
    if not any(float(own.size()) for own in found):
        raise ValueError("expected finite inputs that are not all 0, got none with a target")
    return found


def moments_of(
    inputs: Tensor, targets: Tensor, weights: Tensor, fold: Tensor, folds: int
) -> list[Moments]:
    """The moments of each fold's rows; fewer rows than elements of an input take the dual form.

    Args:
        inputs: a (n, K); targets: t (n, N); weights: w (n,).
        fold: (n,) int64, from 0 to ``folds`` − 1.

    Raises:
        ValueError: no row is left, or the inputs are all 0 or not finite.
    """
    dual = len(inputs) < inputs.shape[1]
    rows = [fold == k for k in range(folds)]
    return summed([moments(inputs[k], targets[k], weights[k], dual) for k in rows])


def sums(by_fold: Sequence[Moments]) -> list[Moments]:
    """The moments without each fold, if there are several, and at the end those of all folds."""
    others = [[moments for j, moments in enumerate(by_fold) if j != k] for k in range(len(by_fold))]
    return [reduce(add, some) for some in (*others, by_fold) if some]


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
    by_fold: Sequence[Moments],
    without: Sequence[Moments],
    lambdas: Sequence[float] = LAMBDAS,
    left: Tensor | None = None,
) -> tuple[float, float]:
    """The λ with the smallest squared error out of fold, and the share of the targets' squares
    that it explains there.

    by_fold: the moments of each fold; without: those of all rows outside of it.
    left: W (M, N); the error is that of ``W t``.
    """
    metric = None if left is None else left.double().T @ left.double()

    def size(x: Tensor) -> float:
        """The trace of x, or of ``W x Wᵀ``."""
        return float((x.trace() if metric is None else (x * metric).sum()).detach())

    errors = [
        sum(
            size(own.error(rest.solve(ridge).change))
            for own, rest in zip(by_fold, without, strict=True)
        )
        for ridge in lambdas
    ]
    best = min(range(len(errors)), key=errors.__getitem__)
    total = sum(size(own.squares()) for own in by_fold)
    return lambdas[best], 1 - errors[best] / total if total else 1.0
