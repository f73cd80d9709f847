"""Restricting attention: a condition that is added to the model's own mask rule.

All classes of transformers look up their mask function in one table, by the name of their attention
implementation. While a restriction is in force, the table's entry adds the condition; the attention
code of the model's class stays as it is. Classes that derive alibi's positions from the mask get
their positions in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from icl_patch.errors import UnsupportedModelError
from icl_patch.models.table_override import TableOverride, file_override

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

    def restrict(self, rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The model's mask rule with the condition anded on; a token always sees itself."""

        def restricted(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            allowed = self.visible[batch, key] | (query == key)
            if self.slots is None:
                return rule(batch, head, query, key) & allowed
            return rule(batch, head, self.slots[batch, query], self.slots[batch, key]) & allowed

        return restricted


@dataclass(frozen=True)
class OneToken(Visibility):
    """Rows ``[:batch]`` see everything, rows ``[batch:]`` only the current token; ``visible`` is
    ignored.
    """

    batch: int = 0

    def restrict(self, rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The model's mask rule for the context rows; a reduced row's token sees itself."""

        def restricted(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return rule(batch, head, query, key) & ((batch < self.batch) | (query == key))

        return restricted


_visibility: ContextVar[Visibility | None] = ContextVar("icl_patch_visibility", default=None)


_hides_padding: ContextVar[bool] = ContextVar("icl_patch_hides_padding", default=False)


def _of_tokens(rule: Callable[..., Tensor], is_token: Tensor) -> Callable[..., Tensor]:
    """The mask rule where a query of the padding sees no key: is_token (B, S) bool."""

    def of_tokens(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rule(batch, head, query, key) & is_token[batch, query]

    return of_tokens


def _restricting(mask_function: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        current = _visibility.get()
        if current is not None:
            current.windows.add(kwargs.get("local_size"))
            kwargs |= {
                "mask_function": current.restrict(kwargs["mask_function"]),
                "allow_is_causal_skip": False,
            }
        is_token = kwargs.get("attention_mask") if _hides_padding.get() else None
        # masks of encoders, and of attention to them, are left as they are
        causal = "allow_is_bidirectional_skip" not in kwargs
        if (
            is_token is not None
            and causal
            and is_token.shape[1] >= kwargs["q_offset"] + kwargs["q_length"]
        ):
            kwargs["mask_function"] = _of_tokens(kwargs["mask_function"], is_token)
        return mask_function(*args, **kwargs)

    return mask


def _padding(pad: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``pad(block_sequence_ids (B, S), mask, length, offset)``, extended to all slots of the rule.
    The tokens of a replay are text, so their slots belong to no block (-1).
    """

    def padded(ids: Tensor, *args: Any) -> Tensor:
        ids, current = pad(ids, *args), _visibility.get()
        if current is None or current.slots is None:
            return ids
        return F.pad(ids, (0, max(0, int(current.slots.max()) + 1 - ids.shape[1])), value=-1)

    return padded


def _repositioning(build_alibi: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``build_alibi(mask (B, S), heads, dtype) -> (B·heads, 1, S)`` with the keys' positions in
    place of those derived from the mask.
    """

    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        current = _visibility.get()
        if current is None or current.positions is None:
            return build_alibi(mask, num_heads, dtype)
        positions = current.positions.masked_fill(~mask.bool(), 0)
        every = mask.new_ones(len(mask), int(positions.max()) + 1)
        chosen = positions.repeat_interleave(num_heads, 0).unsqueeze(1)
        return build_alibi(every, num_heads, dtype).gather(2, chosen)

    return build


_table = ALL_MASK_ATTENTION_FUNCTIONS
_masks = [TableOverride(_table, name, _restricting) for name in _IMPLEMENTATIONS]
_PAD = "maybe_pad_block_sequence_ids"
if hasattr(masking_utils, _PAD):
    _masks.append(TableOverride(vars(masking_utils), _PAD, _padding))


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


@contextmanager
def restricted_attention(model: PreTrainedModel, visibility: Visibility) -> Iterator[None]:
    """Within this context ``visibility`` restricts the model's own attention."""
    check_attention(model)
    token = _visibility.set(visibility)
    try:
        with ExitStack() as stack:
            alibi = file_override(model, "build_alibi_tensor", _repositioning)
            for override in (*_masks, *alibi):
                stack.enter_context(override())
            yield
    finally:
        _visibility.reset(token)


@contextmanager
def padding_sees_nothing() -> Iterator[None]:
    """Within this context queries of the padding see no key, where masks come from transformers'
    table: behind a row's tokens they would see these.
    """
    token = _hides_padding.set(True)
    try:
        with ExitStack() as stack:
            for override in _masks:
                stack.enter_context(override())
            yield
    finally:
        _hides_padding.reset(token)
