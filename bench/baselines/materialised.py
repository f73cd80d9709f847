"""A decode step with every ``W + ΔW`` built, as in Algorithm 1 of Goldwaser et al. (2025)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.bench.decode_steps import Step
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.parameter_changes import parameter_changes


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Put every parameter's tensor back at the end of this context."""
    originals = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data


@contextmanager
def materialised(
    model: nn.Module, patch: ContextPatch, row: int = 0, token: int = 0
) -> Iterator[None]:
    """Within this context every changed parameter holds ``W + u vᵀ``, ``b + Δb`` or ``m + Δm``."""
    with restored(model):
        for block, layer in zip(patch.blocks, patch.layers, strict=True):
            for change in parameter_changes(block.spec, layer):
                name = f"{block.path}.{change.name}.{change.parameter}"
                parameter = model.get_parameter(name)
                base, u = parameter.data, change.u[row, token].to(parameter.dtype)
                if change.v is None:
                    parameter.data = base + u
                else:
                    v = change.v[row, token].to(parameter.dtype)
                    factors = (v, u) if change.transposed else (u, v)
                    parameter.data = torch.addr(base, *factors)
        yield


def bare_step(model: PreTrainedModel, patch: ContextPatch) -> Tensor:
    """The kept tokens alone, without context, cache or change: (B, V)."""
    run: Any = model
    logits: Tensor = run(patch.kept_ids, position_ids=patch.position_ids, use_cache=False).logits
    return logits[:, -1]


def naive_step(model: PreTrainedModel, patch: ContextPatch, context_step: Step) -> Step:
    """A context step, every matrix built row by row, a reduced step; the update is not computed."""

    def step() -> Tensor:
        context_step()
        rows = []
        for row in range(len(patch.kept_ids)):
            with materialised(model, patch, row):
                rows.append(bare_step(model, patch.select(rows=slice(row, row + 1))))
        return torch.cat(rows)

    return Step(step, cache=context_step.cache)
