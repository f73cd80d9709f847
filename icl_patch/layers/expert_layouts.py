"""Experts in layouts of their own: JetMoE's, with the router inside, and DBRX's stacked matrices.

The factors are those of :class:`icl_patch.layers.experts.PatchedExperts`, under the same names.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from icl_patch.layers.experts import PatchedExperts, PatchedScaledExperts
from icl_patch.layers.patched_module import Mode


def _gated(activation: Callable[[Tensor], Tensor], read: Tensor) -> Tensor:
    """``activation(gate) ⊙ up``, both halves of ``read`` (..., 2I) -> (..., I)."""
    gate, up = read.chunk(2, dim=-1)
    return activation(gate) * up


class PatchedParallelExperts(PatchedExperts):
    """JetMoE's mixture: the router is part of the module, which sorts its rows by expert.

    The router's matrix is patched as a reader of its own. The module's output has a bias that all
    experts share.
    """

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is a set of experts in this layout."""
        parts = [getattr(module, name, None) for name in ("input_linear", "output_linear")]
        matrices = [getattr(part, "weight", None) for part in parts]
        return all(isinstance(matrix, Tensor) and matrix.dim() == 3 for matrix in matrices) and all(
            hasattr(module, name) for name in ("router", "activation", "bias")
        )

    def weights(self, name: str) -> list[Tensor]:
        """The experts' matrices (E, N, K); ``name`` is that of transformers' own layout."""
        part = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}[name]
        return [getattr(self.base_layer, part).weight]

    def inner(self, read: Tensor) -> Tensor:
        """h: (M, k, 2I) -> (M, k, I)."""
        return _gated(self.base_layer.activation, read)

    def unpatched(self, z: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The experts' output without a patch: (M, d) -> (M, d)."""
        return self.write(self.inner(self.read(z, index)), index, weights).to(z.dtype)

    def _run(self, x: Tensor) -> Any:
        """(B, T, d) -> the same."""
        z = x.reshape(-1, x.shape[-1])
        index, weights = self._choice(z)
        if self.mode is Mode.OFF:
            assert self.observer is not None
            self.observer(z, index)
            return self.base_layer(x)
        out = super()._run(z, index, weights)
        return out.reshape(x.shape) + self.base_layer.bias

    def _choice(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The experts that the router chooses for z (M, d), and their weights: (M, k) each."""
        order, _, gates, sizes, _ = self.base_layer.router(z)
        experts = torch.arange(len(sizes), device=z.device)
        experts = experts.repeat_interleave(torch.tensor(sizes, device=z.device))
        index, weights = torch.empty_like(order), torch.empty_like(gates)
        index[order], weights[order] = experts, gates
        return index.view(len(z), -1), weights.view(len(z), -1)


class PatchedStackedExperts(PatchedExperts):
    """DBRX's experts: each of ``w1``, ``v1`` and ``w2`` holds all experts' matrices one below
    another, (E·I, d). ``w1`` and ``v1`` are the two halves of ``gate_up_proj``.
    """

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is a set of experts in this layout."""
        holder = getattr(module, "mlp", None)
        matrices = [getattr(holder, name, None) for name in ("w1", "v1", "w2")]
        return all(isinstance(matrix, Tensor) and matrix.dim() == 2 for matrix in matrices) and all(
            hasattr(module, name) for name in ("num_experts", "hidden_size")
        )

    def weights(self, name: str) -> list[Tensor]:
        """The experts' matrices, logically (E, N, K); ``name`` is that of transformers' layout."""
        base, holder = self.base_layer, self.base_layer.mlp
        shape = (base.num_experts, -1, base.hidden_size)
        if name == "down_proj":
            return [holder.w2.view(shape).mT]
        return [holder.w1.view(shape), holder.v1.view(shape)]

    def inner(self, read: Tensor) -> Tensor:
        """h: (M, k, 2I) -> (M, k, I)."""
        return _gated(self.base_layer.mlp.activation_fn, read)

    def _run(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """x (B, T, d), the chosen experts (M, k) and their weights (M, k) -> (B, T, d)."""
        return super()._run(x.reshape(-1, x.shape[-1]), index, weights).reshape(x.shape)


_LAYOUTS: tuple[type[PatchedExperts], ...] = (
    PatchedExperts,
    PatchedParallelExperts,
    PatchedStackedExperts,
    PatchedScaledExperts,
)


def experts_class(module: nn.Module) -> type[PatchedExperts] | None:
    """The patched module for a set of experts in one of the known layouts; None for another."""
    return next((layout for layout in _LAYOUTS if layout.fits(module)), None)


def patched_experts(module: Any) -> PatchedExperts:
    """The patched module of a set of experts in one of the known layouts."""
    layout = experts_class(module)
    assert layout is not None
    return layout(module)
