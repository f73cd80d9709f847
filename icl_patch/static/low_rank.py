"""A low-rank change of a matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor


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

    def to(self, device: torch.device) -> "LowRank":
        """Both factors on another device."""
        return LowRank(self.u.to(device), self.v.to(device))

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
