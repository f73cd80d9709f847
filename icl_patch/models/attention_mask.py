"""Restricting attention: a condition that is added to the model's own mask rule.

All classes of transformers look up their mask function in one table, by the name of their attention
implementation. While a restriction is in force, the table's entry adds the condition; the attention
code of the model's class stays as it is. Classes that derive alibi's positions from the mask get
their positions in the same way.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from icl_patch.errors import UnsupportedModelError
from icl_patch.models.table_override import TableOverride, file_override, overridden

MaskRule = Callable[..., Tensor]  # of (batch, head, query, key): whether the query sees the key

_IMPLEMENTATIONS = ("sdpa", "eager")


@dataclass(frozen=True)
class Visibility:
    """The restriction of attention in one pass, on top of the model's own rule and padding.

    Attributes:
        visible: (rows, S) bool over all key slots of the cache after the pass.
        slots: (rows, S) int64, the slot that each key has in the whole sequence: sliding windows
            and chunks count in slots. None if the cache holds the whole sequence.
        positions: (rows, S) int64, the keys' positions, for alibi. None if they follow from the
            mask.
        windows: the sizes of windows or chunks in the masks that the model builds during the pass;
            None for a mask without one.
    """

    visible: Tensor
    slots: Tensor | None = None
    positions: Tensor | None = None
    windows: set[int | None] = field(default_factory=set, compare=False)

    def restrict(self, rule: MaskRule) -> MaskRule:
        """The model's mask rule with the condition anded on; a token always sees itself."""

        def restricted(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            allowed = self.visible[batch, key] | (query == key)
            if self.slots is not None:
                query, key = self.slots[batch, query], self.slots[batch, key]
            return rule(batch, head, query, key) & allowed

        return restricted


_visibility: ContextVar[Visibility | None] = ContextVar("icl_patch_visibility", default=None)

_hides_padding: ContextVar[bool] = ContextVar("icl_patch_hides_padding", default=False)


def _restricted_mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    current, rule = _visibility.get(), kwargs["mask_function"]
    if current is not None:
        current.windows.add(kwargs.get("local_size"))
        rule = current.restrict(rule)
        kwargs["allow_is_causal_skip"] = False
    is_token = kwargs.get("attention_mask") if _hides_padding.get() else None
    # masks of encoders, and of attention to them, are left as they are
    causal = "allow_is_bidirectional_skip" not in kwargs
    if (
        is_token is not None
        and causal
        and is_token.shape[1] >= kwargs["q_offset"] + kwargs["q_length"]
    ):
        rule = _of_tokens(rule, is_token)
    return original(*args, **kwargs | {"mask_function": rule})


def _of_tokens(rule: MaskRule, is_token: Tensor) -> MaskRule:
    """The mask rule where a query of the padding sees no key: is_token (B, S) bool."""
    return lambda batch, head, query, key: rule(batch, head, query, key) & is_token[batch, query]


def _padded(pad: Callable[..., Tensor], ids: Tensor, *args: Any) -> Tensor:
    """``pad(block_sequence_ids (B, S), mask, length, offset)``, extended to all slots of the rule.
    The tokens of a replay are text, so their slots belong to no block (-1).
    """
    ids, current = pad(ids, *args), _visibility.get()
    if current is None or current.slots is None:
        return ids
    return F.pad(ids, (0, max(0, int(current.slots.max()) + 1 - ids.shape[1])), value=-1)


def _repositioned_alibi(
    build_alibi: Callable[..., Tensor], mask: Tensor, num_heads: int, dtype: torch.dtype
) -> Tensor:
    """``build_alibi(mask (B, S), heads, dtype) -> (B·heads, 1, S)`` with the keys' positions in
    place of those derived from the mask.
    """
    current = _visibility.get()
    if current is None or current.positions is None:
        return build_alibi(mask, num_heads, dtype)
    positions = current.positions.masked_fill(~mask.bool(), 0)
    every = mask.new_ones(len(mask), int(positions.max()) + 1)
    chosen = positions.repeat_interleave(num_heads, 0).unsqueeze(1)
    return build_alibi(every, num_heads, dtype).gather(2, chosen)


_masks = (
    *(
        TableOverride(ALL_MASK_ATTENTION_FUNCTIONS, name, _restricted_mask)
        for name in _IMPLEMENTATIONS
    ),
    TableOverride(vars(masking_utils), "maybe_pad_block_sequence_ids", _padded),
)


def check_attention(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError if masks cannot be restricted in the model's attention
    implementation.
    """
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation not in _IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"expected attention implementation {' or '.join(map(repr, _IMPLEMENTATIONS))}, whose"
            f" masks can be restricted; {type(model).__name__} has {implementation!r}: call"
            " model.set_attn_implementation('sdpa') first"
        )


def restricted_attention(
    model: PreTrainedModel, visibility: Visibility
) -> AbstractContextManager[None]:
    """A context within which ``visibility`` restricts the model's own attention."""
    check_attention(model)
    alibi = file_override(model, "build_alibi_tensor", _repositioned_alibi)
    return overridden((*_masks, *alibi), _visibility, visibility)


def padding_sees_nothing() -> AbstractContextManager[None]:
    """A context within which queries of the padding see no key, where masks come from transformers'
    table: behind a row's tokens they would see these.
    """
    return overridden(_masks, _hides_padding, True)
