"""Decode steps and replays with every ``W + ΔW`` built: Algorithm 1 of Goldwaser et al. (2025)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from icl_patch.bench.decode_steps import Step
from icl_patch.evaluation.algorithm1 import recorded, updating
from icl_patch.models.block_spec import Block
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


@torch.no_grad()
def algorithm_1_logits(
    model: PreTrainedModel, blocks: Sequence[Block], context_ids: Tensor, kept_ids: Tensor
) -> Tensor:
    """The logits (1, T, V) of kept_ids (1, T) without context_ids (1, C): every weight is changed
    for every token.
    """
    run: Any = model
    cache = DynamicCache(config=model.config)
    run(input_ids=context_ids, past_key_values=cache, logits_to_keep=1)
    with recorded(model, blocks) as targets:
        run(input_ids=kept_ids, past_key_values=cache, logits_to_keep=1)
    positions = torch.arange(kept_ids.shape[1], device=kept_ids.device) + context_ids.shape[1]
    return _by_token(
        model, kept_ids, positions, lambda token: updating(model, blocks, targets, token)
    )


@torch.no_grad()
def applied_logits(model: PreTrainedModel, patch: ContextPatch) -> Tensor:
    """The logits (1, T, V) of a patch's first row, its changed weights built."""
    return _by_token(
        model,
        patch.kept_ids[:1],
        patch.position_ids[0],
        lambda token: materialised(model, patch, 0, token),
    )


def _by_token(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    changed: Callable[[int], AbstractContextManager[None]],
) -> Tensor:
    """Token by token over a cache of their own, each in its context of changed weights."""
    run: Any = model
    cache, logits = DynamicCache(config=model.config), []
    for token in range(ids.shape[1]):
        place = slice(token, token + 1)
        with restored(model), changed(token):
            output = run(ids[:, place], position_ids=positions[None, place], past_key_values=cache)
            logits.append(output.logits)
    return torch.cat(logits, 1)
