"""Both streams of one token as 2B rows over a cache of B rows: that of the rows with the context.

The cache takes the keys and values of the rows with the context. A reduced row attends to the
current token alone, and needs none but its own value.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.generation.step_inputs import StepInputs
from icl_patch.generation.streams import (
    SDPA,
    AttentionCall,
    attending,
    ending,
    other_attention,
    own_value,
)
from icl_patch.models import kv_cache
from icl_patch.models.attention_mask import Visibility, restricted_attention
from icl_patch.models.forward import call as run_model
from icl_patch.models.forward_override import Forward
from icl_patch.models.trial_tokens import trial_tokens
from icl_patch.recording.attached_block import AttachedBlock


class TwoStreams:
    """How a model runs both streams as rows of one batch, (2B, 1, ·), those with the context first.

    An attention of transformers' table runs on the rows with the context. Other attention code gets
    a copy of the cache for the reduced rows, and the mask hides the context from them.

    Args:
        model: the attached model. blocks: its blocks.
        exact: whether both streams get a block's sum of the rows with the context, because the
            factors that give it to the reduced rows are chosen after the pass.

    Raises:
        UnsupportedModelError: ``exact``, and the model has other attention code.

    Attributes:
        rows: how many rows a step has for one of the cache.
        forwards: the forwards that modules have in a step.
    """

    rows = 2

    def __init__(
        self, model: PreTrainedModel, blocks: Sequence[AttachedBlock], *, exact: bool
    ) -> None:
        self._model, self._in_table = model, _reads_its_cache(model)
        if exact and not self._in_table:
            raise UnsupportedModelError(
                f"mode='two_stream' does not cover exact steps of {type(model).__name__}: its"
                f" attention is none of transformers' {SDPA!r} on what the cache holds"
            )
        # of the reduced rows, by the values that the cache hands out, which they keep alive
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._read: set[int] = set()  # of the values handed out
        self.forwards: dict[nn.Module, Forward] = {}
        if exact:
            self.forwards = {
                block.module: ending(block, lambda total: total[: len(total) // 2].repeat(2, 1, 1))
                for block in blocks
                if block.spec.ends_in_its_sum
            }

    @contextmanager
    def active(self, step_inputs: StepInputs) -> Iterator[None]:
        """Within this context, and with :attr:`forwards`, a pass over one token in 2B rows gives
        both streams' logits.
        """
        names, update = vars(step_inputs.cache), step_inputs.cache.update
        try:
            names["update"] = partial(self._update, update, step_inputs.slot)
            with (
                attending(self._attend)
                if self._in_table
                else restricted_attention(self._model, _context_hidden(step_inputs.mask))
            ):
                yield
            if self._read != self._own.keys():
                raise other_attention(self._model)
        finally:
            names.pop("update", None)
            self._own.clear()
            self._read.clear()

    def _update(
        self,
        update: Callable[..., Any],
        slot: Tensor | None,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """The cache's ``update`` with the first half of the rows."""
        batch = len(key) // 2
        keys, values = update(key[:batch], value[:batch], *args, **kwargs)
        if self._in_table:
            self._own[id(values)] = values, value[batch:]
            return keys, values
        return _twice(keys, key[batch:], slot), _twice(values, value[batch:], slot)

    def _attend(self, call: AttentionCall) -> Tensor:
        """The attention of the rows with the context, and the reduced rows' own values."""
        key, value, mask = call.key, call.value, call.mask
        if id(value) not in self._own:
            raise other_attention(self._model)
        self._read.add(id(value))
        _, own = self._own[id(value)]
        context, reduced = call.query.split(len(own))
        y = call.run(context, key, value, mask if mask is None else mask[: len(context)])
        return torch.cat([y, own_value(reduced, own).reshape(y.shape).to(y.dtype)])


def _context_hidden(mask: Tensor) -> Visibility:
    """The context is hidden from the second half of the rows of a mask."""
    context = torch.ones_like(mask, dtype=torch.bool)
    context[len(context) // 2 :] = False
    return Visibility(context)


def _reads_its_cache(model: PreTrainedModel) -> bool:
    """Whether the model's attentions are those of transformers' table, read what the cache hands
    out, as it is, and give a lone token its own value; found in a pass over one token.
    """
    cache, alone = kv_cache.new_cache(model), list[bool]()
    update, handed, read = cache.update, dict[int, Tensor](), set[int]()

    def observed(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(*args, **kwargs)
        handed[id(values)] = values
        return keys, values

    def attend(call: AttentionCall) -> Tensor:
        y = call.output()
        read.add(id(call.value))
        alone.append(torch.equal(y, own_value(call.query, call.value).reshape(y.shape)))
        return y

    vars(cache)["update"] = observed
    token = trial_tokens(model, 1, seed=1, starts=[0])  # no padding, whose value may be 0
    with attending(attend):
        run_model(model, token, torch.ones_like(token), torch.zeros_like(token), cache)
    return all(alone) and read == handed.keys()


def _twice(held: Tensor, own: Tensor, slot: Tensor | None) -> Tensor:
    """What a cache holds, (B, ..., S, ·), for both streams, the reduced rows with their own current
    token (B, ..., 1, ·).
    """
    rows = torch.cat([held, held])
    place = torch.tensor([held.shape[-2] - 1], device=held.device) if slot is None else slot
    rows[len(held) :].index_copy_(-2, place, own.to(held.dtype))  # autocast may give it another one
    return rows
