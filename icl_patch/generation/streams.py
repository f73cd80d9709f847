"""What both layouts of a step of one pass share: the interposed attention, a lone token's value,
and the end of a block.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from icl_patch.errors import UnsupportedModelError
from icl_patch.invariance.functions import one_token_attention
from icl_patch.models.forward_override import Forward
from icl_patch.models.table_override import TableOverride, overridden
from icl_patch.recording.attached_block import AttachedBlock

SDPA = "sdpa"
_FURTHER = ("position_bias", "softcap", "cache", "s_aux")  # inputs of an attention beyond the usual


class AttentionCall(NamedTuple):
    """A call of one of the model's attentions.

    run: the attention of these inputs or others, (B, T, H, D); in our kernel for one token a row
        where it serves it. With the column ``slot`` of the token, (1,), it gives (2B, 1, H, D):
        behind the B rows their tokens' own values.
    """

    run: Callable[..., Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None

    def output(self, slot: Tensor | None = None) -> Tensor:
        """The output of this call, (B, T, H, D). With a slot it is (2B, 1, H, D): behind the B rows
        stands each token's own value, the output of a token that attends to itself alone.
        """
        return self.run(*self[1:], slot)


Attend = Callable[[AttentionCall], Tensor]
_attend: ContextVar[Attend | None] = ContextVar("icl_patch_attend", default=None)


def _interposed(
    original: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Any:
    kwargs |= {"dropout": dropout, "scaling": scaling}
    if (attend := _attend.get()) is None:
        return original(module, query, key, value, attention_mask, **kwargs)
    usual = original is sdpa_attention_forward and not any(
        kwargs.get(name) is not None for name in _FURTHER
    )

    def run(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, slot: Tensor | None = None
    ) -> Tensor:
        if usual:
            y = one_token_attention(query, key, value, mask, dropout, scaling, slot)
            if y is not None:
                return y.transpose(1, 2)
        output: Tensor
        output, _ = original(module, query, key, value, mask, **kwargs)
        if slot is None:
            return output
        own = own_value(query, value.index_select(2, slot))
        return torch.cat([output, own.reshape(output.shape).to(output.dtype)])

    return attend(AttentionCall(run, query, key, value, attention_mask)), None


_override = TableOverride(ALL_ATTENTION_FUNCTIONS, SDPA, _interposed)


def attending(attend: Attend) -> AbstractContextManager[None]:
    """A context within which ``attend`` gives the output of each of the model's attentions."""
    return overridden((_override,), _attend, attend)


def other_attention(model: nn.Module) -> UnsupportedModelError:
    """The error of a step whose attention was another one in the trial."""
    return UnsupportedModelError(
        f"expected {type(model).__name__} with the attention that it had before the first step, it"
        " has another one: generate again"
    )


def own_value(query: Tensor, value: Tensor) -> Tensor:
    """What a token (B, ·) that attends to itself alone gets, (B, G, H/G, D), from its query (B, H,
    1, ·) and value (B, G, 1, D): the value, because the softmax of one number is 1.
    """
    return value.expand(-1, -1, query.shape[1] // value.shape[1], -1)


def ending(block: AttachedBlock, hand_on: Callable[[Tensor], Tensor]) -> Forward:
    """A block's forward that reports its sum and hands on ``hand_on(sum)``."""
    original = block.module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        total = out[0] if isinstance(out, tuple) else out
        if block.on_sum is not None:
            block.on_sum(total)
        total = hand_on(total)
        return (total, *out[1:]) if isinstance(out, tuple) else total

    return forward
