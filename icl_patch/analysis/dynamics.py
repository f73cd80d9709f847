"""The implicit learning dynamics of a context: how the weights change as it grows token by token,
or is absorbed token by token.

A change of a weight is stored as the vectors of ``Σ_r u_r v_rᵀ`` alone.

Source: Dherin et al. (2025), Proposition 3.1 and Appendix E.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.low_rank import LowRank
from icl_patch.patch.parameter_changes import ParameterChange, parameter_changes
from icl_patch.recording.attached_model import AttachedModel, HasAttachedModel
from icl_patch.recording.sequences import Sequences, assemble


@dataclass(frozen=True, eq=False)
class Trajectory:
    """``W_i = W_0 + ΔW_i``, i = 0 … n: the values of one parameter as the context grows to n
    tokens.

    Attributes:
        changes: ``ΔW_i`` (n + 1, ...), the first of them 0. A change of a bias or a scale is its
            vector u, with ``v = 1``.

    Source: Dherin et al. (2025), equations 6 to 9 and Proposition 3.1.
    """

    changes: LowRank

    def norms(self) -> Tensor:
        """``‖W_i - W_0‖_F``: (n + 1, ...) fp64."""
        return self.changes.norm()

    def steps(self) -> LowRank:
        """``W_{i+1} - W_i``: (n, ...), of rank 1 if every step has the same v, else of rank 2.

        Computed as ``(u' - u) v'ᵀ + u (v' - v)ᵀ``: near convergence ``u' v'ᵀ - u vᵀ`` would lose
        digits.
        """
        before, after = self.changes[:-1], self.changes[1:]
        u, v = before.u, before.v
        if before.index is None or after.index is None:
            return LowRank(torch.cat([after.u - u, u], -2), torch.cat([after.v, after.v - v], -2))
        same = after.index.unsqueeze(-1) == before.index.unsqueeze(-2)  # (..., k', k)
        gone = torch.where(same.any(-2).unsqueeze(-1), 0, u)
        u, v = same.to(u.dtype) @ u, same.to(v.dtype) @ v
        return LowRank(
            torch.cat([after.u - u, u, -gone], -2),
            torch.cat([after.v, after.v - v, before.v], -2),
            torch.cat([after.index, after.index, before.index], -1),
        )

    def step_norms(self) -> Tensor:
        """``‖W_{i+1} - W_i‖_F``: (n, ...) fp64."""
        return self.steps().norm()

    def rates(self) -> Tensor:
        """The learning rates ``h_i = 1/‖A(x)‖² = ‖v_{i+1}‖²``: (n, ...) fp64; the largest of a
        token's experts; of a bias 1.

        In a block behind others the token's own residual stream depends on the context so far, and
        ``A(x)`` and ``h_i`` with it.
        """
        return self.changes.v[1:].double().square().sum(-1).amax(-1)

    def gradients(self) -> LowRank:
        """``Δ_i = ∇_W L_i``, so that ``W_{i+1} = W_i - h_i Δ_i``: (n, ...).

        Where all steps share ``v = A(x)/‖A(x)‖²`` this is the paper's ``W_0 (A(c_1…c_i, x) -
        A(c_1…c_{i+1}, x)) A(x)ᵀ``.
        """
        rates, steps = self.rates(), self.steps()
        factor = torch.where(rates > 0, -1 / torch.where(rates > 0, rates, 1.0), 0.0)
        return LowRank(factor[..., None, None] * steps.u, steps.v, steps.index)


@dataclass(frozen=True, eq=False)
class Dynamics:
    """The patches of a context that grows token by token.

    Attributes:
        patches: patches[i] absorbs the context's first i tokens behind those that stay, i = 0 …
            n; each can be replayed if it has all layers.
    """

    patches: tuple[ContextPatch, ...]

    def __len__(self) -> int:
        """n, the number of steps."""
        return len(self.patches) - 1

    @property
    def parameters(self) -> tuple[str, ...]:
        """The changed parameters, by their names in the model's state dict."""
        return tuple(name for name, _ in named_changes(self.patches[-1]))

    def trajectory(self, parameter: str) -> Trajectory:
        """``W_0, …, W_n`` of one parameter for every row and kept token: leading dimensions (n + 1,
        B, T).

        ``ΔW_0`` is 0: nothing is absorbed yet. The first patch's factors may differ from 0, because
        an update may correct rounding with them.

        Raises:
            ValueError: the patches change no such parameter.
        """
        changes = [
            change.low_rank()
            for patch in self.patches
            for name, change in named_changes(patch)
            if name == parameter
        ]
        if not changes:
            raise ValueError(
                f"expected one of the changed parameters {', '.join(self.parameters)}, got"
                f" {parameter!r}"
            )
        u = torch.stack([change.u for change in changes])
        u[0] = 0
        index = [change.index for change in changes if change.index is not None]
        v = torch.stack([change.v for change in changes])
        return Trajectory(LowRank(u, v, torch.stack(index) if index else None))


def named_changes(patch: ContextPatch) -> Iterator[tuple[str, ParameterChange]]:
    """The changes of a patch, each with its parameter's name in the model's state dict."""
    for index, layer in zip(patch.layer_indices, patch.layers, strict=True):
        block = patch.blocks[index]
        for change in parameter_changes(block.spec, layer):
            yield (
                f"{block.path}.{change.name}"
                + (f".{change.parameter}" if change.parameter else ""),
                change,
            )


@torch.no_grad()
def grow(
    attached: AttachedModel, sequences: Sequences, start: int, layers: slice = slice(None)
) -> Dynamics:
    """The patches of the heads of ``start``, ``start + 1``, … columns; see
    :meth:`icl_patch.ContextPatcher.dynamics`.
    """
    if not isinstance(layers, slice):
        raise TypeError(f"expected layers as a slice, such as slice(2, 3), got {layers!r}")
    if (layers.step or 1) < 0 or not attached.block_specs[layers]:
        raise ValueError(
            f"expected at least one of {len(attached.block_specs)} layers, in increasing order, got"
            f" {layers}"
        )
    # the longest first, which shows at once whether the model takes it
    stops = range(sequences.head, start - 1, -1)
    grown = [
        attached.compute(_up_to(sequences, stop)).patch.select(layers=layers) for stop in stops
    ]
    return Dynamics(tuple(grown[::-1]))


def _up_to(sequences: Sequences, stop: int) -> Sequences:
    """Sequences with the first columns of their heads alone."""
    columns = [*range(stop), *range(sequences.head, sequences.ids.shape[1])]
    ids, mask, absorbed = (
        x[:, columns] for x in (sequences.ids, sequences.mask, sequences.absorbed)
    )
    return replace(sequences, ids=ids, mask=mask, absorbed=absorbed, head=stop)


# Appendix E: the context is absorbed from its first token on, and the rest of it stays


@dataclass(frozen=True, eq=False)
class Factorisation:
    """``W_n = W_0 (1 + h_1 A_1)(1 + h_2 A_2) ⋯ (1 + h_n A_n)``, kept as vectors: ``A_i = ΔA(c_i)
    z_iᵀ``, ``h_i = 1/‖z_i‖²``.

    ``z_i = A(c_{i+1}, …, c_n, x)`` is the first dense layer's input when i tokens are absorbed,
    and ``ΔA(c_i) = z_{i-1} - z_i``. Then ``W_i z_i = W_0 z_0`` for every i: the block's output
    stays equal to that with the whole context.

    Attributes:
        inputs: z_0, …, z_n: (n + 1, ..., K).

    Source: Dherin et al. (2025), Corollary E.0.1 and equations 29 to 31.
    """

    inputs: Tensor

    def __len__(self) -> int:
        """n, the number of factors."""
        return len(self.inputs) - 1

    @property
    def deltas(self) -> Tensor:
        """``ΔA(c_i)``: (n, ..., K)."""
        return self.inputs[:-1] - self.inputs[1:]

    @property
    def directions(self) -> Tensor:
        """``h_i z_i = z_i/‖z_i‖²``: (n, ..., K); 0 where ``z_i = 0``, because no update has an
        effect there.
        """
        return ops.read_direction(self.inputs[1:])[0]

    def determinants(self) -> Tensor:
        """``det(1 + h_i A_i) = z_{i-1}·z_i / ‖z_i‖²``: (n, ...). The factor has an inverse where it
        is not 0.
        """
        return (self.inputs[:-1] * self.directions).sum(-1)

    def on(self, z: Tensor, absorbed: int | None = None) -> Tensor:
        """``(1 + h_1 A_1) ⋯ (1 + h_i A_i) z`` for the first ``absorbed`` factors, by default all:
        (..., K) -> (..., K).
        """
        deltas, directions = self.deltas, self.directions
        for i in reversed(range(len(self) if absorbed is None else absorbed)):
            z = z + deltas[i] * (directions[i] * z).sum(-1, keepdim=True)
        return z

    def steps(self, weight: Tensor) -> LowRank:
        """``W_i - W_{i-1} = (W_{i-1} ΔA(c_i)) (h_i z_i)ᵀ``, of rank 1: W_0 (N, K) -> (n, ...).
        Source: equation 27.
        """
        deltas, directions = self.deltas, self.directions
        x = deltas.clone()
        for i in reversed(range(len(self))):  # the i-th factor acts on all the later differences
            x[i + 1 :] += deltas[i] * (directions[i] * x[i + 1 :]).sum(-1, keepdim=True)
        return LowRank((x @ weight.mT).unsqueeze(-2), directions.unsqueeze(-2))

    def total(self, weight: Tensor) -> LowRank:
        """``W_n - W_0`` as the sum of all steps: W_0 (N, K) -> (...), with n slots."""
        steps = self.steps(weight)
        return LowRank(steps.u.squeeze(-2).movedim(0, -2), steps.v.squeeze(-2).movedim(0, -2))


@torch.no_grad()
def factorise(
    patcher: HasAttachedModel,
    context_ids: Tensor,
    kept_ids: Tensor,
    layer: int,
    *,
    keep_first: int = 0,
) -> Factorisation:
    """The factorisation of a context's effect on the readers of one block, for the token that
    follows it.

    It computes a patch for each i up to the number of context tokens. The first i are absorbed, the
    others stay in front of the token.

    Args:
        context_ids: (B, C) int64. kept_ids: (B, 1) int64.
        layer: which block; negative ones count from the end.
        keep_first: as in :meth:`icl_patch.ContextPatcher.compute`; n = C - keep_first tokens are
            absorbed.

    Returns:
        A factorisation with inputs (n + 1, B, K), in the dtype of the factors; its W_0 is any of
        the block's readers.

    Raises:
        ValueError: more than one kept token; there is no such layer, or its block has no readers
            that share their input; or as :meth:`icl_patch.ContextPatcher.compute`.
    """
    attached = patcher.attached_model
    attached.require_attached()
    blocks = attached.block_specs
    if not -len(blocks) <= layer < len(blocks):
        raise ValueError(
            f"expected a layer from {-len(blocks)} to {len(blocks) - 1}, got {layer!r}"
        )
    if "readers.v" not in blocks[layer].spec.factor_names(attached.update):
        raise ValueError(
            f"expected a block with patched readers, got {blocks[layer].path}, which has none:"
            " choose another layer"
        )
    if kept_ids.shape[1:] != (1,):
        raise ValueError(
            f"expected one token in each row, kept_ids (B, 1), got {tuple(kept_ids.shape)}"
        )
    parts = [
        assemble(context_ids, kept_ids, keep_first=keep_first, absorbed=[(0, stop)])
        for stop in range(keep_first + 1, context_ids.shape[1] + 1)
    ]
    ids = torch.cat([context_ids, kept_ids], 1)
    every = assemble(ids, ids[:, keep_first:], keep_first=keep_first)
    parts.insert(0, _up_to(every, keep_first))  # first all are kept
    patches = (attached.compute(part).patch for part in parts)
    v = torch.stack([patch.layers[layer]["readers.v"][:, -1] for patch in patches])
    return Factorisation(v / v.square().sum(-1, keepdim=True))
