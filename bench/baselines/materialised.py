"""Decode steps with every ``W + ΔW`` built: Algorithm 1 with a cache and without one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from transformers import PreTrainedModel

from icl_patch.bench.decode_steps import Step
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.parameter_changes import parameter_changes


@contextmanager
def materialised(model: nn.Module, patch: ContextPatch) -> Iterator[None]:
    """Within this context every changed parameter holds ``W + u vᵀ``, ``b + Δb`` or ``m + Δm`` of
    the first row's first token.
    """
    originals: list[tuple[nn.Parameter, Tensor]] = []
    try:
        with record_function("part: building"):
            for block, layer in zip(patch.blocks, patch.layers, strict=True):
                for change in parameter_changes(block.spec, layer):
                    parameter = model.get_parameter(
                        f"{block.path}.{change.name}.{change.parameter}"
                    )
                    base, u = parameter.data, change.u[0, 0].to(parameter.dtype)
                    originals.append((parameter, base))
                    if change.v is None:
                        parameter.data = base + u
                    else:
                        v = change.v[0, 0].to(parameter.dtype)
                        parameter.data = (
                            torch.addr(base, v, u) if change.transposed else torch.addr(base, u, v)
                        )
        yield
    finally:
        for parameter, data in reversed(originals):
            parameter.data = data


def bare_step(model: PreTrainedModel, patch: ContextPatch) -> Tensor:
    """The kept tokens alone, without context, cache or change: (B, V)."""
    run: Any = model
    logits: Tensor = run(patch.kept_ids, position_ids=patch.position_ids, use_cache=False).logits[
        :, -1
    ]
    return logits


def _by_row(model: PreTrainedModel, patch: ContextPatch) -> Tensor:
    """Every row's token with its own materialised weights, one row after the other."""
    rows = []
    for row in range(len(patch.kept_ids)):
        one = patch.select(rows=slice(row, row + 1))
        with materialised(model, one):
            rows.append(bare_step(model, one))
    return torch.cat(rows)


def naive_step(model: PreTrainedModel, patch: ContextPatch, context_step: Step) -> Step:
    """A context step, every matrix materialised, a reduced step; the update is not computed."""

    def step() -> Tensor:
        context_step()
        return _by_row(model, patch)

    return Step(step, cache=context_step.cache)


def uncached_step(model: PreTrainedModel, ids: Tensor, patch: ContextPatch) -> Step:
    """The same without a cache: the whole context runs again."""
    run: Any = model

    def step() -> Tensor:
        run(ids, use_cache=False, logits_to_keep=1)
        return _by_row(model, patch)

    return Step(step)
