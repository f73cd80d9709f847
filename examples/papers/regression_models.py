"""The models of Dherin et al. §4.1 and appendices C and D, and their task: linear functions,
learned from the context.

A token is ``(x, y)`` in R^(d+1), the query is ``(x, 0)``, and the prediction is the last component
of the query's output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from icl_patch import PatchedLinear
from icl_patch.recording.block_math import reader_update

DIMENSION = 2
WIDTH = DIMENSION + 1


@dataclass(frozen=True, eq=False)
class Tasks:
    """B tasks: the context's tokens (B, N, d + 1), the query (B, d + 1), its value (B,) and the
    function ω (B, d).
    """

    context: Tensor
    query: Tensor
    target: Tensor
    omega: Tensor


def sample(tasks: int, length: int, generator: torch.Generator) -> Tasks:
    """Tasks with ``h(x) = ω·x``, where ω and all x are drawn from N(0, I)."""
    omega = torch.randn(tasks, DIMENSION, generator=generator)
    x = torch.randn(tasks, length + 1, DIMENSION, generator=generator)
    y = (x * omega[:, None]).sum(-1, keepdim=True)
    tokens = torch.cat([x, y], -1)
    query = torch.cat([x[:, -1], torch.zeros(tasks, 1)], -1)
    return Tasks(tokens[:, :-1], query, y[:, -1, 0], omega)


class Attention(nn.Module):
    """``A(C, x) = W_H [H_1, …, H_h]`` for a query x that sees C and itself: the last token of a
    causal attention.
    """

    def __init__(self, width: int = 32, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values = (
            nn.Linear(WIDTH, width, bias=False) for _ in range(3)
        )
        self.output = nn.Linear(width, WIDTH, bias=False)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, h, T, d_k)

    def _scores_and_values(
        self, context: Tensor, query: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = (
            self._split(self.queries(query)),
            self._split(self.keys(query)),
            self._split(self.values(query)),
        )
        scale = q.shape[-1] ** -0.5
        of_context = scale * q @ self._split(self.keys(context)).transpose(-1, -2)  # (B, h, Q, N)
        return (
            of_context,
            scale * (q * k).sum(-1, keepdim=True),
            self._split(self.values(context)),
            v,
        )

    def forward(self, context: Tensor, query: Tensor) -> Tensor:
        """(B, N, d + 1) and queries (B, Q, d + 1), which do not see each other -> (B, Q, d + 1)."""
        of_context, of_self, values, own = self._scores_and_values(context, query)
        weights = torch.cat([of_context, of_self], -1).softmax(-1)
        heads = weights[..., :-1] @ values + weights[..., -1:] * own
        return self.output(heads.transpose(1, 2).flatten(2))

    def prefixes(self, context: Tensor, query: Tensor) -> Tensor:
        """``A(c_1, …, c_i, x)`` for i = 0 … N: (B, N, d + 1) and (B, d + 1) -> (B, N + 1, d +
        1).
        """
        of_context, of_self, values, own = self._scores_and_values(context, query[:, None])
        length = context.shape[1]
        # (N + 1, N): row i sees the first i tokens
        seen = torch.ones(length + 1, length, dtype=torch.bool).tril(-1)
        of_context = of_context.expand(-1, -1, length + 1, -1).masked_fill(~seen, -torch.inf)
        weights = torch.cat([of_context, of_self.expand(-1, -1, length + 1, -1)], -1).softmax(-1)
        heads = weights[..., :-1] @ values + weights[..., -1:] * own
        return self.output(heads.transpose(1, 2).flatten(2))

    def suffixes(self, context: Tensor, query: Tensor) -> Tensor:
        """``A(c_{i+1}, …, c_N, x)`` for i = 0 … N, as :meth:`prefixes`: without positions the order
        of the context does not matter.
        """
        return self.prefixes(context.flip(1), query).flip(1)


class Recurrence(nn.Module):
    """``A(C, x) = W_H s``, with ``s ← tanh(W_x token + W_s s + b)`` run over C and then x: an RNN
    as the contextual layer.

    ``W_s`` starts orthogonal, so that the state remembers: it learns faster than from the usual
    start.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inputs, self.recurrent = nn.Linear(WIDTH, width), nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, WIDTH, bias=False)
        nn.init.orthogonal_(self.recurrent.weight)

    def _states(self, context: Tensor) -> list[Tensor]:
        """The state after 0 … N tokens: N + 1 times (B, width)."""
        states = [context.new_zeros(len(context), self.recurrent.in_features)]
        for token in self.inputs(context).unbind(1):
            states.append(torch.tanh(torch.addmm(token, states[-1], self.recurrent.weight.T)))
        return states

    def _read(self, state: Tensor, query: Tensor) -> Tensor:
        return self.output(torch.tanh(self.inputs(query) + self.recurrent(state)))

    def forward(self, context: Tensor, query: Tensor) -> Tensor:
        """(B, N, d + 1) and queries (B, Q, d + 1), which do not see each other -> (B, Q, d + 1)."""
        return self._read(self._states(context)[-1][:, None], query)

    def prefixes(self, context: Tensor, query: Tensor) -> Tensor:
        """``A(c_1, …, c_i, x)`` for i = 0 … N: (B, N, d + 1) and (B, d + 1) -> (B, N + 1, d +
        1).
        """
        return self._read(torch.stack(self._states(context), 1), query[:, None])


class Block(nn.Module):
    """``Φ_W(C, x) = W' ReLU(W A(C, x) + b) + b'``: a contextual block without skip connections or
    norms (Definition 2.1).
    """

    def __init__(self, layer: Attention | Recurrence, inner: int = 128) -> None:
        super().__init__()
        self.layer = layer
        self.first, self.second = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def mlp(self, z: Tensor, first: nn.Module | None = None) -> Tensor:
        """The prediction from the MLP's input: (..., d + 1) -> (...); ``first`` is used in the
        place of W.
        """
        return self.second(F.relu((first or self.first)(z)))[..., -1]

    def forward(self, context: Tensor, query: Tensor) -> Tensor:
        """Predictions with the context: (B, N, d + 1) and (B, Q, d + 1) -> (B, Q)."""
        return self.mlp(self.layer(context, query))

    def update(self, context: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``ΔW = u vᵀ`` of Corollary 2.5.1 for each query, and ``z = A(x)``: (B, Q, inner), (B, Q,
        d + 1), (B, Q, d + 1).
        """
        z, z_ctx = self.layer(context[:, :0], query), self.layer(context, query)
        return *rank_one(self.first, z_ctx, z), z

    def without_context(self, z: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """``Φ_{W + u vᵀ}(x)``: predictions (...) from ``z = A(x)`` alone."""
        patched = PatchedLinear(self.first)
        patched.set_patch(u.flatten(0, -2), v.flatten(0, -2))
        return self.mlp(z.flatten(0, -2), patched).reshape(z.shape[:-1])


def rank_one(first: nn.Module, z_ctx: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """``u = W z_ctx - W z`` and ``v = z / ‖z‖²``, so that ``(W + u vᵀ) z = W z_ctx``."""
    return reader_update(first(z_ctx), first(z)), z / z.square().sum(-1, keepdim=True)


class StackBlock(nn.Module):
    """``LN(y + W_2 ReLU(W_1 y + b_1) + b_2)`` with ``y = LN(x + attention(x))``: a post-LN block
    (appendix C.1).
    """

    def __init__(self, token: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.output = (
            nn.Linear(token, 3 * width, bias=False),
            nn.Linear(width, token, bias=False),
        )
        self.first, self.second = nn.Linear(token, inner), nn.Linear(inner, token)
        self.norm_1, self.norm_2 = nn.LayerNorm(token), nn.LayerNorm(token)

    def contextual(self, x: Tensor) -> Tensor:
        """``y``: (B, T, token) -> (B, T, token), causal."""
        q, k, v = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.norm_1(x + self.output(heads.transpose(1, 2).flatten(2)))

    def rest(
        self, y: Tensor, first: nn.Module | None = None, bias_change: Tensor | None = None
    ) -> Tensor:
        """The output after ``y``, with ``first`` in the place of W_1 and ``bias_change`` added to
        b_2.
        """
        branch = self.second(F.relu((first or self.first)(y)))
        return self.norm_2(y + (branch if bias_change is None else branch + bias_change))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, token) -> (B, T, token)."""
        return self.rest(self.contextual(x))


class Stack(nn.Module):
    """``Φ^(L) ∘ … ∘ Φ^(1)`` of post-LN blocks between a linear map into the residual stream and one
    out of it.
    """

    def __init__(self, layers: int = 10, width: int = 32, heads: int = 8, inner: int = 128) -> None:
        super().__init__()
        self.embed, self.read = nn.Linear(WIDTH, width, bias=False), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(StackBlock(width, width, heads, inner) for _ in range(layers))

    def forward(self, context: Tensor, query: Tensor) -> Tensor:
        """Predictions with the context: (B, N, d + 1) and (B, 1, d + 1) -> (B, 1)."""
        return self.read(self.outputs(context, query)[-1])[..., 0]

    def outputs(self, context: Tensor, query: Tensor) -> list[Tensor]:
        """Each block's output at the query with the context: L times (B, 1, width)."""
        x, seen = self.embed(torch.cat([context, query], 1)), []
        for block in self.blocks:
            x = block(x)
            seen.append(x[:, -1:])
        return seen

    def outputs_without_context(self, context: Tensor, query: Tensor) -> list[Tensor]:
        """The same on the query alone with W_1 + ΔW_1 and b_2 + Δb_2 in every block (Theorem B.2,
        block after block).
        """
        full, x, seen = self.embed(torch.cat([context, query], 1)), self.embed(query), []
        for block in self.blocks:
            y_full = block.contextual(full)
            y_ctx, y = y_full[:, -1:], block.contextual(x)
            patched = PatchedLinear(block.first)
            patched.set_patch(*rank_one(block.first, y_ctx, y))
            x, full = block.rest(y, patched, y_ctx - y), block.rest(y_full)
            seen.append(x)
        return seen


@dataclass(frozen=True)
class Training:
    """How a model is trained: Adam, gradients clipped to norm 1, a rate that warms up and then
    stays or falls, and checkpoints.
    """

    steps: int
    every: int
    batch: int = 32
    length: int = 100
    rate: float = 0.005
    warmup: int = 0
    decay: bool = False


def train(
    model: nn.Module, training: Training, seed: int, checkpoint: Callable[[int, float], None]
) -> None:
    """Minimise ``½ mean (ŷ - ω·x)²`` over fresh tasks; ``checkpoint(step, mean loss since the last
    one)`` is called at intervals.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=training.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, training))
    for start, stop in pairwise(range(0, training.steps + 1, training.every)):
        total = 0.0
        for _ in range(start, stop):
            tasks = sample(training.batch, training.length, generator)
            loss = half_squared(
                model(tasks.context, tasks.query[:, None])[:, 0], tasks.target
            ).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        checkpoint(stop, total / (stop - start))


def _rate(step: int, training: Training) -> float:
    if step < training.warmup:
        return (step + 1) / training.warmup
    return 1 - step / training.steps if training.decay else 1.0


def half_squared(prediction: Tensor, target: Tensor) -> Tensor:
    """``½ (ŷ - y)²``, the paper's loss of one task."""
    return 0.5 * (prediction - target).square()
