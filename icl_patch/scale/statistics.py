"""Norms and ranks of the sum of a row's changes, over its kept tokens."""

import torch
from torch import Tensor

from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.parameter_changes import ParameterChange, parameter_changes


def sums_and_ranks(patch: ContextPatch, row: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """``‖Σ_t ΔW_t‖_F`` and the rank of ``Σ_t ΔW_t``, t the kept tokens of one row, for every
    changed parameter by its module's name; Δb and Δm have a rank of at most 1.

    From QR decompositions of the factors, in fp64: no matrix of a weight's size is built. Singular
    values count if they exceed the largest one times the larger width times the spacing of fp32, in
    which most factors are computed. Of experts it is the root of the sum of squares, and the sum of
    the ranks.

    Returns:
        Sums (L,) fp64 and ranks (L,) int64, 0 for a block that has no such module.
    """
    sums: dict[str, Tensor] = {}
    ranks: dict[str, Tensor] = {}
    for place, (index, layer) in enumerate(zip(patch.layer_indices, patch.layers, strict=True)):
        for change in parameter_changes(patch.blocks[index].spec, layer):
            if change.name not in sums:
                sums[change.name] = torch.zeros(len(patch.layers), dtype=torch.float64)
                ranks[change.name] = torch.zeros(len(patch.layers), dtype=torch.int64)
            square, rank = 0.0, 0
            for u, v in _matrices(change, row, patch.kept_mask[row]):
                values = _singular_values(u, v)
                spacing = torch.finfo(torch.float32).eps * max(u.shape[1], v.shape[1])
                square += float(values.square().sum())
                rank += int((values > values.max() * spacing).sum())
            sums[change.name][place], ranks[change.name][place] = square**0.5, rank
    return sums, ranks


def _matrices(change: ParameterChange, row: int, kept: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The factors (n, N) and (n, K) of each changed matrix, fp64; a vector has K = 1."""
    if change.index is None:
        u, v = change.u[row, kept], None if change.v is None else change.v[row, kept]
        return [(u.double(), torch.ones_like(u[:, :1]).double() if v is None else v.double())]
    u, v = change.in_slots()
    index, u = change.index[row, kept], u[row, kept].double()
    v = torch.ones_like(u[..., :1]) if v is None else v[row, kept].double()
    return [(u[index == expert], v[index == expert]) for expert in index.unique()]


def _singular_values(u: Tensor, v: Tensor) -> Tensor:
    """Of ``Σ_t u_t v_tᵀ``."""
    triangles = [torch.linalg.qr(factor.T, mode="r").R for factor in (u, v)]
    return torch.linalg.svdvals(triangles[0] @ triangles[1].T)
