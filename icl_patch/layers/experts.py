"""PatchedExperts: the experts of a mixture, with a change of weights per token.

The experts of transformers hold each of their matrices as one parameter of three dimensions. A
patch holds factors for a token's active experts only, its *slots*: ``gate_up_proj[e] + u_j vᵀ`` for
the readers, ``down_proj[e] + u v_jᵀ`` or ``down_proj_bias[e] + Δb`` for the writer. No tensor of a
weight's size is built.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icl_patch import ops
from icl_patch.layers.patched_module import PatchedModule, rows_of
from icl_patch.layers.product_interception import FirstProductChanged

# tokens of several a row: with more of them an expert has enough for a product of its own
_FUSED_TOKENS = 64


def _has_matrices(module: Any, names: tuple[str, ...], dim: int) -> bool:
    matrices = [getattr(module, name, None) for name in names]
    return all(isinstance(matrix, Tensor) and matrix.dim() == dim for matrix in matrices)


class PatchedExperts(PatchedModule):
    """Experts with a change of weights per token and slot.

    ``o = Σ_j s_j W_down,j h_j + κ u`` with ``h_j = gate(W_gate_up,j z + u_j (v·z))`` over a token's
    active experts. With ``v_j = h_j/(‖h_j‖² S)``, ``S = Σ_j s_j``, every expert's ``W_down,j + u
    v_jᵀ`` gives its share, and ``κ = Σ_j s_j (v_j·h_j) = 1``; where the experts have output biases,
    ``b_j + Δb`` does, and ``κ = S``.

    Args:
        base_layer: experts in transformers' layout, see :meth:`fits`.

    Source: Goldwaser et al. (2025), Lemmas 7 and 11.
    """

    base_layer: Any  # a module with the experts' matrices
    _PATCH = ("read_u", "read_v", "index", "write_u", "write_v")
    _INPUTS: ClassVar[tuple[str, ...]] = ("z", "index", "weights")
    read_u: Tensor | None  # (M, k, 2I)
    read_v: Tensor | None  # (M, K)
    index: Tensor | None  # (M, k), the experts that the factors are for
    write_u: Tensor | None  # (M, d)
    write_v: Tensor | None  # (M, k, I); None for a bias
    tokens: int  # a row of a replay

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is a set of experts in the layout that transformers' own implementations
        share.
        """
        needed = ("is_transposed", "has_bias", "_apply_gate", "has_gate")
        others = ("has_post_expert_norm", "_is_expert_parallel")
        return (
            _has_matrices(module, ("gate_up_proj", "down_proj"), 3)
            and all(hasattr(module, name) for name in needed)
            and bool(module.has_gate)
            and not any(getattr(module, name, False) for name in others)
        )

    @staticmethod
    def is_transposed(module: nn.Module) -> bool:
        """Whether the matrices are stored as (experts, in, out)."""
        return bool(getattr(module, "is_transposed", False))

    def off(self) -> None:
        """Be the base module again, bit for bit, and drop the patch."""
        super().off()
        self.tokens = 1

    def _observe(self, z: Tensor, index: Tensor, weights: Tensor) -> None:
        assert self.observer is not None
        self.observer(z, index)

    # -- the parts, expert by expert

    def gathers(self, z: Tensor) -> bool:
        """Whether :func:`icl_patch.ops.expert_linear` may multiply by the base module's matrices in
        its place.
        """
        matrices = [*self.weights("gate_up_proj"), *self.weights("down_proj")]
        return self.runs_plainly(z) and all(
            type(matrix) in (nn.Parameter, Tensor) and matrix.dtype == z.dtype
            for matrix in matrices
        )

    def uses_expert_linear(self, z: Tensor, rows: int, tokens: int) -> bool:
        """Whether that op multiplies (rows, tokens) of the reduced stream: one token a row, as in a
        decode step, or few tokens in all.

        Recording and replay decide alike, so that their bits agree.
        """
        return (tokens == 1 or rows * tokens <= _FUSED_TOKENS) and self.gathers(z)

    def weights(self, name: str) -> list[Tensor]:
        """The experts' matrices ``name``, logically (E, N, K), in parts along N."""
        matrix: Tensor = getattr(self.base_layer, name)
        return [matrix.mT if self.is_transposed(self.base_layer) else matrix]

    def unpatched(self, z: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The base module's output: z (M, d) -> (M, d)."""
        return self.base_layer(z, index, weights)

    def _product(self, name: str, x: Tensor, index: Tensor, fused: bool) -> Tensor:
        """``W_e x + b_e`` for every slot: x (M, K), or (M, k, K) where the slots differ -> (M, k,
        N).

        With ``fused`` by :func:`icl_patch.ops.expert_linear`, without a look from the host and
        before its rounding; else expert by expert.
        """
        bias: Tensor | None = getattr(self.base_layer, f"{name}_bias", None)
        parts = [self._multiply(weight, x, index, bias, fused) for weight in self.weights(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    @staticmethod
    def _multiply(
        weight: Tensor, x: Tensor, index: Tensor, bias: Tensor | None, fused: bool
    ) -> Tensor:
        """:meth:`_product` of one part."""
        if fused:
            return ops.expert_linear(
                x, weight, index, bias, out_dtype=torch.promote_types(x.dtype, torch.float32)
            )
        out = x.new_empty(*index.shape, weight.shape[1])
        for expert in index.unique().tolist():
            rows, slots = (index == expert).nonzero(as_tuple=True)
            inputs = x[rows] if x.dim() == 2 else x[rows, slots]
            y = F.linear(inputs, weight[expert], None if bias is None else bias[expert])
            out = out.to(y.dtype)  # another one under autocast
            out[rows, slots] = y
        return out

    def read(self, z: Tensor, index: Tensor, fused: bool = False) -> Tensor:
        """``W_gate_up,j z`` of the active experts: (M, d) -> (M, k, 2I); ``fused`` as in
        :meth:`_product`.
        """
        return self._product("gate_up_proj", z, index, fused)

    def inner(self, read: Tensor) -> Tensor:
        """h: (M, k, 2I) -> (M, k, I)."""
        return self.base_layer._apply_gate(read)

    def write(self, h: Tensor, index: Tensor, weights: Tensor, fused: bool = False) -> Tensor:
        """``Σ_j s_j (W_down,j h_j + b_j)``, summed in fp32 (fp64 for fp64): (M, k, I) -> (M, d)."""
        outputs = self._product("down_proj", h, index, fused)
        wide = torch.promote_types(outputs.dtype, torch.float32)
        return (outputs.to(wide) * weights.to(wide).unsqueeze(-1)).sum(1)

    def add_read(self, read: Tensor, z: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """``y_j + u_j (v·z)`` rounded to the model's dtype: read, u (M, k, 2I), z, v (M, d)."""
        coefficient = (z.to(v.dtype) * v).sum(-1)[:, None, None]
        return (read + coefficient * u).to(read.dtype)

    @staticmethod
    def gain(h: Tensor, weights: Tensor, v: Tensor | None) -> Tensor:
        """κ, the factor of u, (M, 1) fp64: ``Σ_j s_j (v_j·h_j)``, or S for a bias."""
        shares = (
            weights.double() if v is None else weights.double() * (h.double() * v.double()).sum(-1)
        )
        return shares.sum(-1, keepdim=True)

    def _replay(self, z: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """z (M, d), the chosen experts (M, k) and their weights (M, k) -> (M, d)."""
        fused = self.uses_expert_linear(z, len(z) // self.tokens, self.tokens)
        read = self.read(z, index, fused)
        if self.read_u is not None and self.read_v is not None:
            read = self.add_read(read, z, self._of_slots(self.read_u, index), self.read_v)
        h = self.inner(read.to(z.dtype) if fused else read)
        out = self.write(h, index, weights, fused)
        if self.write_u is None:
            return out.to(z.dtype)
        v = None if self.write_v is None else self._of_slots(self.write_v, index)
        return self.add_written(out, self.gain(h, weights, v), self.write_u, z.dtype)

    def _of_slots(self, factor: Tensor, index: Tensor) -> Tensor:
        """The factors of the experts that are active now; 0 for an expert that was not active when
        the factors were recorded.
        """
        assert self.index is not None
        same = index.unsqueeze(-1) == self.index.unsqueeze(-2)  # (M, k, recorded k)
        slot, known = same.long().argmax(-1), same.any(-1, keepdim=True)
        return torch.where(known, factor.take_along_dim(slot.unsqueeze(-1), 1), 0)

    @staticmethod
    def add_written(out: Tensor, gain: Tensor, u: Tensor, dtype: torch.dtype) -> Tensor:
        """``o + κ u`` (M, d), in fp64 for an fp64 u, else rounded to ``dtype``."""
        total = out + gain.to(u.dtype) * u
        return total if u.dtype == torch.float64 else total.to(dtype)


class PatchedScaledExperts(PatchedExperts):
    """Experts with weights that multiply their input instead of their output: ``Σ_e f(W_e s_e z)``
    over all experts.

    ``s_e = 0`` for those that are not active, and ``f(0) = 0``. With ``(v·z) = 1`` the coefficient
    of an expert's ``u`` is ``s_e``. These experts are readers only: their sum has no weights by
    which Lemma 11 could divide delta among them.

    Source: Goldwaser et al. (2025), Lemma 7, with ``s_e z`` in place of z.
    """

    _INPUTS = ("x",)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is a set of experts in this layout."""
        named = _has_matrices(module, ("gate_up_proj", "down_proj"), 3)
        return named and not PatchedExperts.fits(module)

    @staticmethod
    def is_transposed(module: nn.Module) -> bool:
        """Whether the matrices are stored as (experts, in, out): always."""
        return True

    def active(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of rows x (E·M, d), expert after expert: the experts (M, k) and their inputs
        (M, k, d).
        """
        by_row = x.reshape(self.base_layer.gate_up_proj.shape[0], -1, x.shape[-1]).transpose(0, 1)
        used = (by_row != 0).any(-1)
        index = used.long().topk(int(used.sum(-1).max()), dim=-1).indices
        return index, by_row.take_along_dim(index.unsqueeze(-1), 1)

    def with_read(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """The base experts, with their first product (E, M, 2I) replaced by ``change`` of it."""
        with FirstProductChanged(torch.bmm, change):
            out: Tensor = self.base_layer(x)
        return out

    def _observe(self, x: Tensor) -> None:  # type: ignore[override]
        assert self.observer is not None
        index, slots = self.active(x)
        self.observer(slots.flatten(1), index)

    def _replay(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x (E·M, d), expert after expert -> the same."""
        assert self.index is not None and self.read_u is not None and self.read_v is not None
        index, slots = self.active(x)
        u, v = self._of_slots(self.read_u, index), self.read_v
        return self.with_read(x, lambda product: self.add_to_all(product, slots, index, u, v))

    def add_to_all(
        self, product: Tensor, slots: Tensor, index: Tensor, u: Tensor, v: Tensor
    ) -> Tensor:
        """The product (E, M, 2I) with the active experts' changes added; slots (M, k, d), index (M,
        k), u (M, k, 2I), v (M, d).
        """
        by_row = product.transpose(0, 1)
        read = by_row.take_along_dim(index.unsqueeze(-1), 1)
        coefficient = (slots.to(v.dtype) * v.unsqueeze(1)).sum(-1, keepdim=True)
        changed = (read + coefficient * u).to(product.dtype)
        wide = index.unsqueeze(-1).expand_as(changed)
        return by_row.scatter(1, wide, changed).transpose(0, 1).contiguous()


# -- layouts of their own, with the factors of PatchedExperts


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
        return all(_has_matrices(part, ("weight",), 3) for part in parts) and all(
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
        z = rows_of(x)
        index, weights = self._choice(z)
        if self.override is None:
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
        return _has_matrices(getattr(module, "mlp", None), ("w1", "v1", "w2"), 2) and all(
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
        return super()._run(rows_of(x), index, weights).reshape(x.shape)


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
