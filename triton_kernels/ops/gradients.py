"""The derivative of the patched linear map, in plain torch. It is deterministic like the map, for
it uses no scattered additions.
"""

from typing import Any

import torch
from torch import Tensor


def setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Save the tensors that :func:`backward` needs."""
    z, weight, u, v, bias, index, *_ = inputs
    ctx.save_for_backward(z, weight, u, v, index)
    ctx.has_bias = bias is not None


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """With g = ∂y: ``∂z = g W + Σ (g·u_r) v_r``, ``∂W = gᵀ z``, ``∂u_r = (z·v_r) g``, ``∂v_r =
    (g·u_r) z``, ``∂bias = Σ g``.
    """
    z, weight, u, v, index = ctx.saved_tensors
    own = grad.to(z.dtype)
    dz, dweight = own @ weight, own.T @ z
    dbias = grad.sum(0).to(z.dtype) if ctx.has_bias else None
    if u is None or not len(u):  # no rows, or a pool that no row uses
        nothing = [None if factor is None else torch.zeros_like(factor) for factor in (u, v)]
        return dz, dweight, *nothing, dbias, None, None, None
    g, wide = grad.float(), z.float()
    row_u, row_v = (_by_row(factor, index).float() for factor in (u, v))
    coeff = torch.einsum("mk,mrk->mr", wide, row_v.expand(len(z), -1, -1))
    pull = torch.einsum("mn,mrn->mr", g, row_u.expand(len(z), -1, -1))
    if index is not None:  # NaN in a factor that no row uses must not leak
        coeff, pull = (torch.where((index < 0).unsqueeze(1), 0, x) for x in (coeff, pull))
        row_v = torch.where((index < 0)[:, None, None], 0, row_v)
    dz = (dz.float() + torch.einsum("mr,mrk->mk", pull, row_v.expand(len(z), -1, -1))).to(z.dtype)
    du, dv = coeff.unsqueeze(-1) * g.unsqueeze(1), pull.unsqueeze(-1) * wide.unsqueeze(1)
    return dz, dweight, _collect(du, u, index), _collect(dv, v, index), dbias, None, None, None


def _by_row(factor: Tensor, index: Tensor | None) -> Tensor:
    """(M, R, ·) or (1, R, ·)."""
    if factor.dim() == 2:
        return factor.unsqueeze(1)
    return factor if index is None else factor[index.long().clamp(min=0)]


def _collect(rows: Tensor, factor: Tensor, index: Tensor | None) -> Tensor:
    """The rows' gradients (M, R, ·) in the factor's layout. For a pool they are added by a matrix
    product, which has a fixed order of summation.
    """
    if index is not None:
        chosen = (
            index.long().unsqueeze(0) == torch.arange(len(factor), device=rows.device).unsqueeze(1)
        ).to(rows.dtype)
        rows = (chosen @ rows.flatten(1)).reshape(factor.shape)
    elif factor.dim() == 3 and len(factor) == 1:
        rows = rows.sum(0, keepdim=True)
    return rows.reshape(factor.shape).to(factor.dtype)
