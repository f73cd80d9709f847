"""The changes themselves on a pretrained model: the space that the tokens' changes span, how they
grow with a few-shot context, and how a disturbance grows in a replay.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from real_fidelity import Arrays
from real_prompts import ids_of, shots
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.analysis.dynamics import Trajectory
from icl_patch.patch.parameter_changes import parameter_changes
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.recording.passes import observe
from icl_patch.recording.sequences import assemble

SHARES = (0.5, 0.9, 0.99)
"""Of the squared norm of all changes: how many directions hold this much."""
DISTURBANCE = 1e-4
"""Of the block's output, after the first block."""


# -- the space that the changes of many tokens span


@torch.no_grad()
def spans(
    model: AttachedModel, sequences: Sequence[tuple[Tensor, Tensor]], keep_first: int
) -> Arrays:
    """The spectra of all tokens' changes ``u_t v_tᵀ`` of each matrix, for contexts (1, C) with
    their kept tokens (1, T); the first ``keep_first`` tokens of a context stay.

    Returns:
        By module: ``directions`` (L, 3), the directions that hold :data:`SHARES` of the squared
        norm; ``rank`` (L,), singular values above 1e-6 of the largest; ``mean`` (L,), the share
        that the mean change of all tokens holds; and the number of ``tokens``.
    """
    factors: list[list[dict[str, tuple[Tensor, Tensor]]]] = []
    for context, kept in sequences:
        patch = model.compute(assemble(context, kept, keep_first=keep_first)).patch
        factors.append(_rank_one(patch))
    found: Arrays = {"tokens": np.array(sum(kept.shape[1] for _, kept in sequences))}
    for name in factors[0][0]:
        rows = []
        for block in range(len(factors[0])):
            u, v = (torch.cat([part[block][name][i] for part in factors]) for i in (0, 1))
            rows.append(spectrum(u, v))
        for key in rows[0]:
            found[f"{name}/{key}"] = np.array([row[key] for row in rows])
    return found


def _rank_one(patch: ContextPatch) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """The changes of every block: u (T, N) and v (T, K) of the first row; of a vector, v = 1."""
    return [
        {
            change.name: (
                change.u[0],
                torch.ones_like(change.u[0, :, :1]) if change.v is None else change.v[0],
            )
            for change in parameter_changes(block.spec, layer)
            if change.index is None
        }
        for block, layer in zip(patch.blocks, patch.layers, strict=True)
    ]


def spectrum(u: Tensor, v: Tensor) -> dict[str, Any]:
    """Of the T matrices ``u_t v_tᵀ``, seen as vectors: from their Gram matrix
    ``(u_s·u_t)(v_s·v_t)``. See :func:`spans`.
    """
    u, v = u.double(), v.double()
    gram = (u @ u.mT) * (v @ v.mT)
    values = torch.linalg.eigvalsh(gram).clamp(min=0).flip(0)
    held = values.cumsum(0) / values.sum()
    counts = [int((held < share - 1e-12).sum()) + 1 for share in SHARES]
    return {
        "directions": counts,
        "rank": int((values > 1e-12 * values[0]).sum()),
        "mean": float(gram.sum() / len(gram) / gram.diagonal().sum()),
    }


# -- a few-shot context that grows


def growth(
    patcher: ContextPatcher,
    tokenizer: Any,
    task: dict[str, Any],
    shuffled: bool,
    sizes: tuple[int, int],
) -> dict[str, Any]:
    """The implicit learning dynamics over the pairs of a task: the norms of the steps from pair to
    pair, and the probability of the right answer's first token.

    Args:
        shuffled: give the pairs each other's answers: the same lines, nothing to learn.
        sizes: pairs in the context, and questions.

    Returns:
        steps: (pairs, parameters, questions), ``‖W_k - W_{k-1}‖_F``; total: (parameters,
        questions), ``‖W_n - W_0‖_F``; right: (pairs + 1, questions).
    """
    count, asked = sizes
    pairs, rest = task["pairs"][:count], task["pairs"][count:][:asked]
    if shuffled:
        answers = [answer for _, answer in pairs]
        random.Random(0).shuffle(answers)
        pairs = [[given, answer] for (given, _), answer in zip(pairs, answers, strict=True)]
    lines = [ids_of(tokenizer, shots([pair]), first=not i) for i, pair in enumerate(pairs)]
    context = torch.tensor([[token for line in lines for token in line]]).repeat(len(rest), 1)
    rows = [torch.tensor(ids_of(tokenizer, f"{given} ->", first=False)) for given, _ in rest]
    kept = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)
    dynamics = patcher.dynamics(context, kept, kept_mask=mask)
    ends = [0, *np.cumsum([len(line) for line in lines]).tolist()]
    row, last = torch.arange(len(rest)), mask.sum(1) - 1
    answers = [ids_of(tokenizer, f" {answer}", first=False)[0] for _, answer in rest]
    logits = [dynamics.patches[end].logits for end in ends]
    right = torch.stack([x[row, last].float().softmax(-1)[row, answers] for x in logits])  # type: ignore[index]
    steps, total = [], []
    for name in dynamics.parameters:
        changes = dynamics.trajectory(name).changes[ends][:, row, last]
        at_ends = Trajectory(changes)
        steps.append(at_ends.step_norms())
        total.append(at_ends.norms()[-1])
    return {
        "steps": torch.stack(steps, 1).numpy(),
        "total": torch.stack(total).numpy(),
        "right": right.numpy(),
    }


# -- a disturbance of the residual stream


@torch.no_grad()
def sensitivity(model: AttachedModel, context: Tensor, kept: Tensor, seed: int) -> Arrays:
    """How a random disturbance of the kept tokens after the first block grows from block to block,
    relative to the blocks' outputs: (L, T) for the model with its context, for the kept tokens
    alone, and for exact patches' replays.
    """
    generator = torch.Generator().manual_seed(seed)
    whole, width = torch.cat([context, kept], 1), kept.shape[1]
    noise = torch.randn(
        width, model.model.config.get_text_config().hidden_size, generator=generator
    )
    patches = {
        "replayed": model.compute(assemble(context, kept)).patch,
        "replayed, first token kept": model.compute(assemble(context, kept, keep_first=1)).patch,
    }
    runs: dict[str, Callable[[], Tensor]] = {
        "with its context": lambda: _outputs(model, whole)[:, -width:],
        "without a context or a patch": lambda: _outputs(model, kept),
        **{
            name: lambda patch=patch: _stacked(model.replay(patch)[1])
            for name, patch in patches.items()
        },
    }
    found = {}
    for name, run in runs.items():
        before = run()
        with disturbed(model.blocks[0].module, noise):
            after = run()
        found[name] = ((after - before).norm(dim=-1) / before.norm(dim=-1) / DISTURBANCE).numpy()
    return found


@contextmanager
def disturbed(block: torch.nn.Module, noise: Tensor) -> Iterator[None]:
    """Within this context the block adds :data:`DISTURBANCE` times its outputs' norm in the
    directions of ``noise`` (T, d) to its last T tokens.
    """
    width = len(noise)
    directions = DISTURBANCE * noise / noise.norm(dim=-1, keepdim=True)

    def add(_module: torch.nn.Module, _args: Any, out: Any) -> Any:
        hidden = out[0] if isinstance(out, tuple) else out
        if hidden.shape[1] < width:  # the prefix alone
            return out
        hidden = hidden.clone()
        tail = hidden[:, -width:]
        hidden[:, -width:] = tail + directions * tail.norm(dim=-1, keepdim=True)
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    handle = block.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _outputs(model: AttachedModel, ids: Tensor) -> Tensor:
    """The blocks' outputs (L, T, d) of the unpatched model."""
    with observe(model.blocks) as activations:
        model.model(input_ids=ids, use_cache=False)
    return _stacked(activations)


def _stacked(activations: Sequence[Any]) -> Tensor:
    return torch.stack([entry.output[0].float() for entry in activations])
