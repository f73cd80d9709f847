"""PatchedLinear: a linear module with a low-rank change of its weight, or a change of its bias, per
token.
"""

import copy
import warnings
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from icl_patch import ops
from icl_patch.layers.patched_module import Mode, PatchedModule, matches_rows, untouched
from icl_patch.layers.product_interception import with_linear_changed

LINEAR = (nn.Linear, Conv1D)
"""Modules whose weight is one matrix; that of Conv1D is (K, N)."""


class PatchedLinear(PatchedModule):
    """A linear module with a low-rank change of its weight per token: ``y = base_layer(z) + Σ_r
    (z·v_r) u_r + Δb``.

    A drop-in for ``nn.Linear``, Conv1D and any other module that maps (..., K) to (..., N) by a
    matrix. With no patch set it is the base module, bit for bit::

        layer = PatchedLinear(model.lm_head)
        # one change for all rows: u (1, R, N), v (1, R, K); one for each row: u (M, N), v (M, K)
        layer.set_patch(u, v)
        layer.update_patch(u, v)  # new values in the same memory: a captured CUDA graph sees them
        merged = layer.merge()    # a plain module with W + Σ_r u_r v_rᵀ, rounded to its dtype
        layer.set_bias_change(bias_change)  # a change of the bias instead
        layer.clear_patch()

    Source: Goldwaser et al. (2025), Lemmas 6, 8 and 9.
    """

    _PATCH: ClassVar[tuple[str, ...]] = ("u", "v", "bias_change", "shared", "out_dtype")
    u: Tensor | None
    v: Tensor | None
    bias_change: Tensor | None
    shared: bool | None
    out_dtype: torch.dtype | None
    # of the ranks that have a part of the matrix's inputs each, whose outputs are summed
    group: dist.ProcessGroup | None = None

    def set_patch(
        self,
        u: Tensor,
        v: Tensor,
        *,
        shared: bool | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """Apply ``W + u vᵀ`` from now on.

        Args:
            u: shared by all rows (1, R, N); else one per row of the input (..., K): (..., N), or
                flat (M, N) or (M, R, N). Any float.
            v: the same with K for N.
            shared: whether all rows share it. By default a patch (1, R, N) is shared. For an input
                of one sequence (1, T, K) it could also be one patch for each of the T tokens: pass
                ``shared`` there, or a warning appears.
            out_dtype: of the output; the base module's by default.

        Raises:
            ValueError: u and v do not agree in their leading dimensions, or a patch that is to be
                shared is not (1, R, N).
        """
        if u.dim() < 2 or u.shape[:-1] != v.shape[:-1]:
            raise ValueError(
                "expected u (..., N) and v (..., K) with the same leading dimensions, got"
                f" {tuple(u.shape)}, {tuple(v.shape)}"
            )
        if shared and (u.dim() != 3 or u.shape[0] != 1):
            raise ValueError(
                "expected a patch that all rows share as u (1, R, N) and v (1, R, K), got"
                f" {tuple(u.shape)}, {tuple(v.shape)}"
            )
        self.off()
        self.u, self.v, self.shared, self.out_dtype, self.mode = (
            u,
            v,
            shared,
            out_dtype,
            Mode.REPLAY,
        )

    def update_patch(self, u: Tensor, v: Tensor) -> None:
        """Copy new factors into the memory of those that are set.

        Raises:
            ValueError: no patch is set, or its factors have other shapes; nothing is changed then.
        """
        if self.u is None or self.v is None:
            raise ValueError(
                "expected a patch to update, got a module without one: call set_patch first"
            )
        if u.shape != self.u.shape or v.shape != self.v.shape:
            expected = f"u {tuple(self.u.shape)} and v {tuple(self.v.shape)}"
            raise ValueError(
                f"expected {expected}, as they were set, got {tuple(u.shape)} and {tuple(v.shape)}"
            )
        with torch.no_grad():
            # v is converted before u is written: that may fail, and v may share u's memory
            v = v.to(
                self.v.device,
                self.v.dtype,
                copy=v.untyped_storage().data_ptr() == self.u.untyped_storage().data_ptr(),
            )
            self.u.copy_(u)
            self.v.copy_(v)

    def merge(self) -> nn.Module:
        """A copy of the base module with the patch in its parameters: ``W + Σ_r u_r v_rᵀ`` or ``b +
        Δb``, computed in fp64 and rounded to their dtype.

        Raises:
            TypeError: the base module is not an ``nn.Linear`` or a Conv1D with a plain weight, or
                it has hooks.
            ValueError: the patch is not the same for all rows or does not fit, or it changes a bias
                that the module lacks.
        """
        base = self.base_layer
        if type(base) not in LINEAR or type(base.weight) is not nn.Parameter:
            kind = type(base)
            raise TypeError(
                "expected torch.nn.Linear or Conv1D with a plain weight to merge into, got"
                f" {kind.__module__}.{kind.__qualname__}: merge adapters, and load weights without"
                " quantisation, first"
            )
        if not untouched(base):
            raise TypeError(
                f"expected a {type(base).__name__} that does nothing else to merge into, got one"
                " with hooks or another forward"
            )
        changes: dict[str, Tensor] = {}
        if self.u is not None and self.v is not None:
            if self.u.dim() != 3 or self.u.shape[0] != 1 or self.shared is False:
                raise ValueError(
                    f"expected a patch that all rows share, u (1, R, N), got {tuple(self.u.shape)}"
                )
            change = torch.einsum("rn,rk->nk", self.u[0].double(), self.v[0].double())
            changes["weight"] = change.T if type(base) is Conv1D else change
        if self.bias_change is not None:
            if self.bias_change.dim() != 1 or base.bias is None:
                raise ValueError(
                    f"expected a bias and a change (N,) of it, got {base.bias is not None},"
                    f" {tuple(self.bias_change.shape)}"
                )
            changes["bias"] = self.bias_change
        merged = copy.deepcopy(base)
        with torch.no_grad():
            for name, change in changes.items():
                parameter = getattr(merged, name)
                if change.shape != parameter.shape:
                    raise ValueError(
                        f"expected a change of {name} {tuple(parameter.shape)}, got"
                        f" {tuple(change.shape)}"
                    )
                parameter.copy_(parameter.double() + change.double())
        return merged

    def set_bias_change(self, bias_change: Tensor, *, out_dtype: torch.dtype | None = None) -> None:
        """Apply ``b + Δb`` from now on: ``bias_change`` (N,), or one per row of the input (..., K):
        (..., N) or flat (M, N).
        """
        self.off()
        self.bias_change, self.out_dtype, self.mode = bias_change, out_dtype, Mode.REPLAY

    def linear_map(self, z: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The base module's matrix (N, K) and bias, if the module computes ``F.linear(z, matrix,
        bias)`` and nothing else.
        """
        base = self.base_layer
        if not self.runs_plainly(z):
            return None
        weight = base.weight if type(base) in (nn.Linear, Conv1D) else None
        if type(weight) is not nn.Parameter or weight.dtype != z.dtype:
            return None
        bias = base.bias
        assert bias is None or isinstance(bias, Tensor)
        return (weight.T if type(base) is Conv1D else weight), bias

    def plain(self, z: Tensor, rows: int | None = None) -> tuple[Tensor, torch.dtype]:
        """The plain output to which the patch is added, (..., K) -> (..., N), and the dtype of the
        base module's output.

        The plain output is the base module's, in fp32 before its rounding where our kernels compute
        it, by the path of ``rows`` rows (:func:`icl_patch.ops.product_path`; z's by default).
        """
        linear = self.linear_map(z)
        if linear is None:
            plain = self.base_layer(z)
            return plain, plain.dtype
        flat = z.reshape(-1, z.shape[-1])
        wide = torch.promote_types(z.dtype, torch.float32)
        path = ops.product_path(flat, len(flat) if rows is None else rows)
        y = ops.patched_linear(flat, linear[0], bias=linear[1], out_dtype=wide, path=path)
        return y.reshape(*z.shape[:-1], y.shape[-1]), z.dtype

    def _replay(self, z: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        if self.bias_change is not None:
            plain, dtype = self.plain(z)
            return add_bias_change(plain, self.bias_change, self.out_dtype or dtype)
        assert self.u is not None and self.v is not None
        rows = z.reshape(-1, z.shape[-1])
        if (
            self.shared is None
            and self.u.shape[:-1] == z.shape[:-1] == (1, len(rows)) != (1, 1)
            and not torch.compiler.is_compiling()
        ):
            warnings.warn(
                f"a patch u {tuple(self.u.shape)} of an input {tuple(z.shape)} is taken for one of"
                f" rank {len(rows)} that all rows share: say shared=True in set_patch if it is,"
                " shared=False if each row has its own",
                stacklevel=2,
            )
        u, v = self._by_row(self.u, z, len(rows)), self._by_row(self.v, z, len(rows))
        linear = self.linear_map(z)
        if linear is not None:
            y = ops.patched_linear(rows, linear[0], u, v, linear[1], out_dtype=self.out_dtype)
            return y.reshape(*z.shape[:-1], y.shape[-1])

        def changed(plain: Tensor) -> Tensor:
            if isinstance(plain, DTensor):  # of a matrix that ranks share, with gradients
                return DTensor.from_local(
                    changed(plain.to_local()), plain.device_mesh, plain.placements
                )
            y = plain.reshape(-1, plain.shape[-1])
            return ops.add_low_rank(y, rows, u, v, out_dtype=self.out_dtype).reshape(plain.shape)

        if self.group is None:
            return changed(self.base_layer(z))
        # each rank adds its part of the change, and the model's own sum over the ranks adds them up
        changed_product: Tensor = with_linear_changed(self.base_layer, changed, z)
        return changed_product

    def _by_row(self, factor: Tensor, z: Tensor, rows: int) -> Tensor:
        """A factor in a form that the ops take: (1, R, ·), (M, R, ·) or (M, ·)."""
        if factor.dim() == 2:
            return factor
        if factor.dim() == 3 and factor.shape[0] == 1 and self.shared is not False:
            return factor
        if factor.shape[:-1] == z.shape[:-1]:
            return factor.flatten(0, -2)
        if factor.dim() != 3 or factor.shape[0] != rows:
            raise ValueError(
                f"expected factors (1, R, ·), {(*z.shape[:-1], '·')} or flat ({rows}, ·), got"
                f" {tuple(factor.shape)}"
            )
        return factor


def add_bias_change(y: Tensor, bias_change: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """``y + Δb`` for rows y (..., N) and Δb (..., N), flat (M, N) or (N,), rounded once to
    ``out_dtype`` or y's dtype.
    """
    if not matches_rows(bias_change, y):
        raise ValueError(
            f"expected bias_change {tuple(y.shape)}, flat or ({y.shape[-1]},), got"
            f" {tuple(bias_change.shape)}"
        )
    wide = torch.promote_types(torch.promote_types(y.dtype, bias_change.dtype), torch.float32)
    bias_change = bias_change if bias_change.dim() == 1 else bias_change.reshape(y.shape)
    return (y.to(wide) + bias_change.to(wide)).to(out_dtype or y.dtype)
