"""How faithful replays are on a pretrained model: every update and the model's own noise, token by
token and block by block, beside the unmodified model with its context.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from icl_patch import ContextPatcher, metrics
from icl_patch.models import kv_cache
from icl_patch.patch.serialization import UPDATES
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import BlockActivations
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.recording.passes import Computation, observe
from icl_patch.recording.sequences import Sequences, assemble

KEPT = "stable, first token kept"
"""The stable update of all of the context but its first token, which stays."""
REPLAYS = (*reversed(UPDATES), KEPT)
NOISE = ("two rows", "no cache", "token by token")
"""The unmodified model against itself: a batch of two equal rows, one pass over everything, and
one token a call.
"""
RUNS = (*REPLAYS, *NOISE)

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Outcome:
    """A run of the kept tokens: logits (T, V), and the blocks' outputs (L, T, d) in fp32."""

    logits: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, logits: Tensor, activations: Sequence[BlockActivations], blocks: int) -> "Outcome":
        """The first row of a run in one or several calls, of all tokens or of some columns."""
        outputs = [entry.output for entry in activations]
        calls = [outputs[start : start + blocks] for start in range(0, len(outputs), blocks)]
        joined = torch.cat([torch.stack([x[0].float() for x in call]) for call in calls], 1)
        return cls(logits[0], joined[:, -logits.shape[1] :])


@contextmanager
def attached(model: Any) -> Iterator[dict[str, AttachedModel]]:
    """A copy of the model for each update, attached."""
    with ExitStack() as stack:
        yield {
            update: stack.enter_context(ContextPatcher(copy.deepcopy(model), update)).attached_model
            for update in UPDATES
        }


@torch.no_grad()
def measure(
    models: dict[str, AttachedModel], context: Tensor, kept: Tensor, noise_runs: Sequence[str]
) -> Arrays:
    """One sequence, context (1, C) and kept tokens (1, T): for every run the errors of each token,
    (T,), and of each block's output, (L, T); and the sizes of the changes.

    noise_runs: those of :data:`NOISE`.
    """
    sequences, exact = assemble(context, kept), models["exact"]
    cache = exact.prefill(sequences)
    reference = exact.compute_from(copy.deepcopy(cache), sequences)
    first = assemble(context[:, 1:], kept, prefix_ids=context[:, :1])
    computations = {
        "exact": reference,
        **{name: _computed(models[name], cache, sequences) for name in ("stable", "direct")},
        KEPT: _computed(models["stable"], cache, first),
    }
    assert reference.patch.logits is not None
    count = len(exact.blocks)
    target = Outcome.of(reference.patch.logits, reference.activations, count)
    outcomes = {
        name: Outcome.of(*models[_update_of(name)].replay(computation.patch), count)
        for name, computation in computations.items()
    }
    outcomes |= noise(exact, cache, sequences, noise_runs)
    found: Arrays = {"margin": _margin(target.logits)}
    for name, outcome in outcomes.items():
        found |= {f"{name}/{key}": value for key, value in errors(outcome, target).items()}
    for name, computation in computations.items():
        found |= {f"{name}/{key}": value for key, value in conditions(computation).items()}
    return found


def _update_of(name: str) -> str:
    return name.split(",")[0]


def _computed(model: AttachedModel, cache: Any, sequences: Sequences) -> Computation:
    """The patch on top of a copy of a cache of one row."""
    return model.compute_from(copy.deepcopy(cache), sequences)


def noise(
    model: AttachedModel, cache: Any, sequences: Sequences, names: Sequence[str]
) -> dict[str, Outcome]:
    """The unmodified model on the same tokens in other calls, see :data:`NOISE`."""
    columns, count = range(sequences.tail_ids.shape[1]), len(model.blocks)

    def run(name: str) -> tuple[Tensor, list[BlockActivations]]:
        with observe(model.blocks) as activations:
            if name == "two rows":
                twice = assemble(
                    *(x.repeat(2, 1) for x in (sequences.head_ids, sequences.tail_ids))
                )
                copied = copy.deepcopy(cache)
                kv_cache.stack_cache(copied, 1)
                logits = forward_passes.run_tail(model.model, twice, copied)
            elif name == "no cache":
                logits = model.model(input_ids=sequences.ids, use_cache=False).logits
                logits = logits[:, -len(columns) :]
            else:
                copied = copy.deepcopy(cache)
                steps = [slice(column, column + 1) for column in columns]
                logits = torch.cat(
                    [forward_passes.run_tail(model.model, sequences, copied, at) for at in steps], 1
                )
        return logits, activations

    return {name: Outcome.of(*run(name), count) for name in names}


def errors(outcome: Outcome, target: Outcome) -> Arrays:
    """The measures of :mod:`icl_patch.metrics` of each token, and each block's relative error."""
    logits, reference = outcome.logits, target.logits
    off = (outcome.blocks - target.blocks).norm(dim=-1) / target.blocks.norm(dim=-1)
    return {
        "match": metrics.same_argmax(logits, reference).numpy(),
        "identical": metrics.bit_identical(logits, reference).numpy(),
        "linf": metrics.linf(logits, reference).float().numpy(),
        "tvd": metrics.total_variation(logits, reference).float().numpy(),
        "blocks": off.numpy(),
    }


def _margin(logits: Tensor) -> np.ndarray:
    """How far the most likely token is ahead, relative to the largest logit: (T,)."""
    top = logits.float().topk(2, -1).values
    return ((top[:, 0] - top[:, 1]) / logits.float().abs().amax(-1)).numpy()


def conditions(computation: Computation) -> Arrays:
    """What the patch says of itself: the changes' sizes (L, T) by module; where a block is not
    controllable, or does not take up this context, (L, T); elements that exact missed, (L, T).
    """
    patch, found = computation.patch, {}
    assert patch.report is not None
    for name, size in patch.norms().items():
        found[f"norm/{name}"] = size[:, 0].float().numpy()
    none = torch.zeros_like(patch.kept_mask)
    for key, side in (("input", "input"), ("output", "output")):
        rows = [
            torch.stack([none, *(v.always for v in block if v.side == side)]).any(0)[0]
            for block in computation.violations
        ]
        found[f"not {key}-controllable"] = torch.stack(rows).numpy()
    refused = [
        torch.stack([none, *(v.rows for v in block)]).any(0)[0] for block in computation.violations
    ]
    found["not taken up"] = torch.stack(refused).numpy()
    found["misses"] = patch.report.misses[:, 0].int().numpy()
    return found
