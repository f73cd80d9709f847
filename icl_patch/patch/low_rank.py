"""Matrices of low rank: norms, inner products and products with a vector, from vectors alone."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """``M = Σ_r u_r v_rᵀ`` for any leading dimensions, stored as the vectors. All arithmetic is in
    fp64.

    Attributes:
        u, v: (..., R, N) and (..., R, K).
        index: (..., R) int64, the expert of each slot, if M stands for the matrices of several
            experts.
    """

    u: Tensor
    v: Tensor
    index: Tensor | None = None

    def __getitem__(self, place: Any) -> "LowRank":
        """A part along the leading dimensions; None adds one."""
        return LowRank(
            self.u[place], self.v[place], None if self.index is None else self.index[place]
        )

    @property
    def rank(self) -> int:
        """R."""
        return self.u.shape[-2]

    def dense(self) -> Tensor:
        """M: (..., N, K); for several experts, the sum of their matrices."""
        return self.u.double().mT @ self.v.double()

    def truncated(self, rank: int) -> "LowRank":
        """The nearest matrix of at most this rank, in the dtypes of u and v. It keeps the largest
        singular values, and multiplies both factors by the root of each.
        """
        left, left_r = torch.linalg.qr(self.u.double().mT)
        right, right_r = torch.linalg.qr(self.v.double().mT)
        u, sizes, v = torch.linalg.svd(left_r @ right_r.mT, full_matrices=False)
        root = sizes[..., None, :rank].sqrt()
        return LowRank(
            ((left @ u[..., :rank]) * root).mT.to(self.u.dtype).contiguous(),
            ((right @ v[..., :rank, :].mT) * root).mT.to(self.v.dtype).contiguous(),
        )

    def inner(self, other: "LowRank") -> Tensor:
        """The Frobenius inner product ``<M, M'> = Σ_rs (u_r·u'_s)(v_r·v'_s)``: (...), leading
        dimensions broadcast.
        """
        # (..., R, R')
        products = (self.u.double() @ other.u.double().mT) * (self.v.double() @ other.v.double().mT)
        if self.index is not None and other.index is not None:
            products = torch.where(
                self.index.unsqueeze(-1) == other.index.unsqueeze(-2), products, 0.0
            )
        return products.sum((-2, -1))

    def norm(self) -> Tensor:
        """``‖M‖_F``: (...). For a matrix of rank 1 it is also the spectral norm."""
        return self.inner(self).clamp(min=0).sqrt()

    def cosine(self, other: "LowRank") -> Tensor:
        """``<M, M'> / (‖M‖ ‖M'‖)``: (...); NaN where one of them is 0."""
        return self.inner(other) / (self.norm() * other.norm())

    def on(self, z: Tensor) -> Tensor:
        """``M z = Σ_r (v_r·z) u_r``: z (..., K) -> (..., N).

        Raises:
            ValueError: this stands for the matrices of several experts.
        """
        if self.index is not None:
            raise ValueError("expected the change of one matrix, got those of several experts")
        coeff = self.v.double() @ z.double().unsqueeze(-1)  # (..., R, 1)
        return (coeff * self.u.double()).sum(-2)

    def against(self, weight: Tensor) -> Tensor:
        """``<M, W> = trace(Mᵀ W) = Σ_r u_r·(W v_r)``: W (..., N, K) -> (...)."""
        return ((self.v.double() @ weight.double().mT) * self.u.double()).sum((-2, -1))
