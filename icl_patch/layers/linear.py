"""PatchedLinear: a linear module with a low-rank change of its weight, or a change of its bias, per
token.
"""

import copy
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from icl_patch import ops
from icl_patch.dtypes import FLOATS
from icl_patch.layers.patched_module import (
    PatchedModule,
    like_rows_of,
    matches_rows,
    other_rows,
    rows_of,
    untouched,
)
from icl_patch.layers.product_interception import with_linear_changed
from icl_patch.metrics import linf
from icl_patch.tolerances import rounding_limit

LINEAR = (nn.Linear, Conv1D)
"""Modules with one matrix as their weight, (N, K); that of Conv1D is (K, N)."""


class PatchedLinear(PatchedModule):
    """A linear module with a low-rank change of its weight per token: ``y = base_layer(z) + Σ_r
    (z·v_r) u_r + Δb``.

    A drop-in for ``nn.Linear``, Conv1D and any other module that maps (..., K) to (..., N) by a
    matrix, where its parent calls it. A parent that reads its weight instead runs without the
    patch: ``nn.TransformerEncoderLayer`` in eval mode, unless
    ``torch.backends.mha.set_fastpath_enabled(False)`` was called. With no patch set it is the base
    module, bit for bit::

        layer = PatchedLinear(model.lm_head)
        layer.set_patch(u, v)     # one change for each row of the input: u (M, N), v (M, K)
        layer.set_patch(u, v, shared=True)  # one for all rows: u (1, R, N), v (1, R, K)
        merged = layer.merge()    # a plain module with W + Σ_r u_r v_rᵀ, rounded to its dtype
        layer.set_bias_change(bias_change)  # a change of the bias instead
        layer.clear_patch()

    Raises:
        TypeError: the base module is the ``out_proj`` of an ``nn.MultiheadAttention``, which never
            calls it. With a patch: the base module returns no tensor, or is given more than one
            input.

    Source: Goldwaser et al. (2025), Lemmas 6, 8 and 9.
    """

    _PATCH: ClassVar[tuple[str, ...]] = ("u", "v", "bias_change", "shared", "by_row", "out_dtype")
    _INPUTS: ClassVar[tuple[str, ...]] = ("z",)
    u: Tensor | None
    v: Tensor | None
    bias_change: Tensor | None
    shared: bool | None
    by_row: bool | None  # whether a call has taken (B, T, ·) for its rows: later ones must too
    out_dtype: torch.dtype | None
    # of the ranks that each have a part of the matrix's inputs; their outputs are summed
    group: dist.ProcessGroup | None = None

    def __init__(self, base_layer: nn.Module) -> None:
        if isinstance(base_layer, NonDynamicallyQuantizableLinear):
            raise TypeError(
                "expected a linear module that its parent calls, got the out_proj of an"
                " nn.MultiheadAttention, which reads its weight instead: no patch would apply"
            )
        super().__init__(base_layer)

    def set_patch(self, u: Tensor, v: Tensor, *, shared: bool = False) -> None:
        """Apply ``W + u vᵀ`` from now on.

        Args:
            u: of an input (..., K) with M rows: (..., N) or (M, N), one vector for each row;
                (M, R, N), R for each row; or (1, R, N), ``shared`` by all rows. Any float.
            v: the same with K in place of N. In a computed patch, block ``i`` has both in
                ``patch.layers[i]``: ``mlp.down_proj.u`` and ``mlp.down_proj.v``, (B, T, ·).

        Raises:
            ValueError: u and v do not agree in their leading dimensions, or a patch that is to be
                shared is not (1, R, N).
        """
        if (
            u.dim() < 2
            or u.shape[:-1] != v.shape[:-1]
            or (shared and (u.dim() != 3 or u.shape[0] != 1))
        ):
            form = "u (1, R, N) and v (1, R, K)"
            if not shared:
                form = "u (M, N) and v (M, K) for M rows, or (..., N) and (..., K),"
            raise ValueError(
                f"expected {form} with the same leading dimensions, got {tuple(u.shape)},"
                f" {tuple(v.shape)}"
            )
        self.off()
        self.replay(u=u, v=v, shared=shared)

    def merge(self) -> nn.Module:
        """A copy of the base module with the patch in its weight: ``W + Σ_r u_r v_rᵀ``, computed in
        fp64 and rounded to its dtype.

        Raises:
            TypeError: the base module has no matrix that :func:`matrix_of` finds, or it has hooks.
            ValueError: no patch is set that all rows share.
        """
        base = self.base_layer
        matrix_of(base)
        if not untouched(base):
            raise TypeError(
                f"expected {type(base).__name__} without hooks and with its own forward to merge"
                " into, got hooks or another forward: remove them first"
            )
        if self.u is None or self.v is None or not self.shared:
            raise ValueError(
                "expected a patch that all rows share, for a merge, got another or none: call"
                " set_patch(u, v, shared=True) first"
            )
        change = torch.einsum("rn,rk->nk", self.u[0].double(), self.v[0].double())
        merged = copy.deepcopy(base)
        with torch.no_grad():
            weight = matrix_of(merged)
            weight.copy_(weight.double() + change)
        return merged

    def set_bias_change(self, bias_change: Tensor) -> None:
        """Apply ``b + Δb`` from now on: ``bias_change`` (N,), or one per row of the input (..., K):
        (..., N) or flat (M, N).
        """
        self.off()
        self.replay(bias_change=bias_change)

    def linear_map(self, z: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The base module's matrix (N, K) and bias, if the module computes ``F.linear(z, matrix,
        bias)`` and nothing else.
        """
        base: Any = self.base_layer
        if type(base) not in LINEAR or not self.runs_plainly(z):
            return None
        weight = base.weight
        if type(weight) is not nn.Parameter or weight.dtype != z.dtype:
            return None
        return (weight.T if type(base) is Conv1D else weight), base.bias

    def unpatched_output(self, z: Tensor, rows: int | None = None) -> tuple[Tensor, torch.dtype]:
        """The output without the patch, (..., K) -> (..., N), and the dtype of the base module's
        output.

        Where our kernels or CUDA compute it, it is in fp32 and not rounded yet. The kernel is that
        for ``rows`` rows (:func:`icl_patch.ops.product_path`), by default as many as z has.
        """
        linear = self.linear_map(z)
        if linear is None:
            plain = self._base_output(z)
            return plain, plain.dtype
        flat = rows_of(z)
        wide = torch.promote_types(z.dtype, torch.float32)
        path = ops.product_path(flat, len(flat) if rows is None else rows)
        y = ops.patched_linear(flat, linear[0], bias=linear[1], out_dtype=wide, path=path)
        return like_rows_of(z, y), z.dtype

    def _replay(self, z: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        if self.bias_change is not None:
            plain, dtype = self.unpatched_output(z)
            return add_bias_change(plain, self.bias_change, self.out_dtype or dtype)
        linear = self.linear_map(z)
        if linear is not None:
            u, v = self._factors(z)
            y = ops.patched_linear(rows_of(z), linear[0], u, v, linear[1], out_dtype=self.out_dtype)
            return like_rows_of(z, y)
        changed = partial(self._add_change, z)
        if self.group is None:
            return changed(self._base_output(z))
        # each rank adds its part of the change, and the model's own sum over the ranks adds them up
        return with_linear_changed(self.base_layer, changed, z)

    def _base_output(self, z: Tensor) -> Tensor:
        y = self.base_layer(z)
        if not isinstance(y, Tensor):
            raise TypeError(
                "expected a module that returns one tensor to patch, got"
                f" {type(self.base_layer).__name__}, which returns a {type(y).__name__}"
            )
        return y

    def _add_change(self, z: Tensor, plain: Tensor) -> Tensor:
        """The plain output (..., N) of z with the low-rank change of the weight."""
        if isinstance(plain, DTensor):  # of a matrix that ranks share, with gradients
            changed = self._add_change(z, plain.to_local())
            return DTensor.from_local(changed, plain.device_mesh, plain.placements)
        y, rows, factors = rows_of(plain), rows_of(z), self._factors(z)
        return like_rows_of(plain, ops.add_low_rank(y, rows, *factors, out_dtype=self.out_dtype))

    def _factors(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """u and v for the rows of z."""
        assert self.u is not None and self.v is not None
        return self._by_row(self.u, z), self._by_row(self.v, z)

    def _by_row(self, factor: Tensor, z: Tensor) -> Tensor:
        """A factor in a form that the ops take: (1, R, ·), (M, R, ·) or (M, ·)."""
        if not self.shared:
            if factor.shape[:-1] == z.shape[:-1]:
                if factor.dim() == 3:  # for one row it would also be (1, R, ·)
                    vars(self)["by_row"] = True
                return factor.flatten(0, -2)
            rows = z.shape[:-1].numel()
            if factor.dim() > 3 or factor.shape[0] != rows or self.by_row:
                raise ValueError(other_rows("u and v", factor, z, "set_patch(u, v, shared=True)"))
        return factor


@torch.no_grad()
def matrix_of(module: nn.Module) -> Tensor:
    """W (N, K) of a module that computes ``W z + b`` with its weight, in any arithmetic: an
    ``nn.Linear`` or a Conv1D. A class derived from them is tried with random weights.

    Raises:
        TypeError: the module is something else.
    """
    weight: Any = getattr(module, "weight", None)
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    plain = isinstance(module, LINEAR) and type(weight) is nn.Parameter and weight.dtype in FLOATS
    if not plain:
        raise TypeError(
            f"expected torch.nn.Linear or Conv1D with a plain weight, got {name}: merge adapters,"
            " and load weights without quantisation, first"
        )
    transposed = isinstance(module, Conv1D)
    if kind not in LINEAR and not weight.is_meta and not _multiplies(module, weight, transposed):
        raise TypeError(
            f"expected a module that computes W z + b with its weight, got {name}, which computes"
            " something else: replace it by an equal torch.nn.Linear"
        )
    return weight.T if transposed else weight


def _multiplies(module: nn.Module, weight: Tensor, transposed: bool) -> bool:
    """Whether a module computes ``W z + b``, tried with another weight than its own."""
    generator = torch.Generator().manual_seed(1)
    width = weight.shape[0 if transposed else 1]
    other, z = (
        torch.randn(shape, generator=generator).to(weight)
        for shape in (weight.shape, (1, 5, width))
    )
    y = functional_call(module, {"weight": other}, (z,))
    matrix, bias = other.T if transposed else other, getattr(module, "bias", None)
    expected = F.linear(z.double(), matrix.double(), bias if bias is None else bias.double())
    return y.shape == expected.shape and bool(
        (linf(y, expected) <= rounding_limit(weight.dtype)).all()
    )


def add_bias_change(y: Tensor, bias_change: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """``y + Δb`` for rows y (..., N) and Δb (..., N), flat (M, N) or (N,), rounded once to
    ``out_dtype`` or y's dtype.
    """
    if not matches_rows(bias_change, y):
        raise ValueError(other_rows("bias_change", bias_change, y, f"({y.shape[-1]},)"))
    wide = torch.promote_types(torch.promote_types(y.dtype, bias_change.dtype), torch.float32)
    bias_change = bias_change if bias_change.dim() == 1 else bias_change.reshape(y.shape)
    return (y.to(wide) + bias_change.to(wide)).to(out_dtype or y.dtype)
