"""StaticLinear: a linear module with static changes of its weight, chosen by row of the batch."""

from typing import Any

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.patched_module import Mode


class StaticLinear(PatchedLinear):
    """A linear module with one of P low-rank changes of its weight for each row of the batch:
    ``y = base_layer(z) + Σ_r (z·v_pr) u_pr`` with ``p = rows[b]``.

    ``rows[b] = -1`` gives row b the bits of the plain map. The row map is read at every call, so
    that its content may change between two calls of a compiled model.
    """

    _PATCH = (*PatchedLinear._PATCH, "rows")
    rows: Tensor | None

    def set_pool(self, u: Tensor, v: Tensor, rows: Tensor | None = None) -> None:
        """Apply changes u (P, R, N), v (P, R, K); ``rows`` (B,) or (1,) int64 names one of them for
        each row of the batch, or one for all. Without it P is 1.
        """
        if rows is None:
            self.set_patch(u, v, shared=True)
            return
        self.off()
        self.u, self.v, self.rows, self.mode = u, v, rows, Mode.REPLAY

    def _replay(self, z: Tensor) -> Tensor:
        if self.rows is None:
            return super()._replay(z)
        assert self.u is not None and self.v is not None
        flat = z.reshape(-1, z.shape[-1])
        if (len(flat) if z.dim() < 3 else z.shape[0]) % len(self.rows):
            raise ValueError(
                f"expected a row map of 1 or {z.shape[0]} entries, one for each row of the batch,"
                f" got {len(self.rows)}"
            )
        rows = self.rows.to(z.device)
        index = rows.repeat_interleave(len(flat) // len(self.rows), output_size=len(flat))
        options: dict[str, Any] = {"index": index, "out_dtype": self.out_dtype}
        linear = self.linear_map(z)
        if linear is not None:
            y = ops.patched_linear(flat, linear[0], self.u, self.v, linear[1], **options)
        else:
            plain = self.base_layer(z)
            y = ops.add_low_rank(
                plain.reshape(-1, plain.shape[-1]), flat, self.u, self.v, **options
            )
        return y.reshape(*z.shape[:-1], y.shape[-1])


def padded(factors: list[Tensor]) -> Tensor:
    """Factors (R_p, n) as one pool (P, max R_p, n), with zeros for the missing ranks."""
    rank = max(len(factor) for factor in factors)
    return torch.stack(
        [torch.nn.functional.pad(factor, (0, 0, 0, rank - len(factor))) for factor in factors]
    )
