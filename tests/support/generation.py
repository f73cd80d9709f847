"""A context in a cache, ready for its decode steps; and a model's own steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from icl_patch import ContextPatcher
from icl_patch.generation.decode_mode import DecodeMode
from icl_patch.generation.decoding import DecodeState, start_decoding
from icl_patch.generation.sampling_loop import GenerationStep
from icl_patch.models.forward import cache_name
from icl_patch.recording import block_math


def mostly_stress(cases: Iterable[tuple], chosen: Iterable[tuple]) -> list[Any]:
    """The cases as pytest's parameters; all but the chosen ones run with the stress tests."""
    chosen, marks = list(chosen), [pytest.mark.stress]
    return [pytest.param(*case, marks=[] if case in chosen else marks) for case in cases]


def prefilled(
    patcher: ContextPatcher,
    ids: Tensor,
    mask: Tensor,
    capacity: int,
    mode: DecodeMode,
    **arguments: Any,
) -> DecodeState:
    """The state of a generation, of a shared cache too."""
    plan = patcher.plans.for_mode(mode)
    return start_decoding(patcher.attached_model, plan, ids, mask, capacity, **arguments)


@torch.no_grad()
def own_steps(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    count: int,
    chosen: Sequence[Tensor] | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Tensor]:
    """Logits (B, V) of the model's own decode steps from the last token on, over a cache of the
    others: of the chosen tokens (B,), or greedily. The steps run within ``around()``, the prompt
    outside.
    """
    cache, positions = DynamicCache(config=model.config), (mask.long().cumsum(1) - 1).clamp(min=0)
    before = {"attention_mask": mask[:, :-1].long(), "position_ids": positions[:, :-1]}
    model(ids[:, :-1], **{cache_name(model): cache}, **before)
    token, given = ids[:, -1:], {cache_name(model): cache, "position_ids": positions[:, -1:]}
    with around():
        for step in range(count):
            logits = model(token, attention_mask=mask.long(), **given).logits[:, -1]
            yield logits
            token = (logits.argmax(-1) if chosen is None else chosen[step]).unsqueeze(1)
            given["position_ids"] = given["position_ids"] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)


def tokens_of(steps: Iterable[GenerationStep]) -> Tensor:
    """The tokens (B, T) of a generation."""
    return torch.stack([step.token_ids for step in steps], 1)


def generated_logits(
    model: Any, ids: Tensor, mask: Tensor | None = None, **arguments: Any
) -> tuple[Tensor, ...]:
    """The model's own (B, V), of each new token."""
    if mask is not None:
        arguments["attention_mask"] = mask.long()
    wanted = {"output_logits": True, "return_dict_in_generate": True}
    return model.generate(ids, **arguments, **wanted).logits


def spoil_closing(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """From now on one pass chooses a factor of this block that is off, and counts the miss."""
    own = block_math.close

    def spoilt(*args: Any, **kwargs: Any) -> block_math.Closed:
        closed = own(*args, **kwargs)
        if closed.factor.dim() == 4:  # of all blocks at once
            closed.factor[block, 0, 0, 5] += 1.0
            closed.misses[block, 0, 0] += 1
        return closed

    monkeypatch.setattr(block_math, "close", spoilt)
