"""Positions: the first one of a model, and rotary frequencies that depend on how long a call is.

LongRoPE rotates all tokens of a call by its long factors if the last position of the call is beyond
a length, and by its short factors otherwise. A context, a prefix and kept tokens run in several
calls, and queries rotated by one set of factors do not fit keys rotated by the other. So every call
here takes the factors of one call over the whole sequence.
"""

import sys
from functools import cache as memoize
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from icl_patch.models.forward_override import Forward, ForwardOverrides
from icl_patch.models.module_search import modules_holding

_FROM_PADDING = "create_position_ids_from_input_ids"
NO_LIMIT = 2**62  # more tokens than there can be


@memoize
def _counts_from_padding(source: str) -> bool:
    """Whether a Python module of transformers has embeddings that count from the padding id."""
    return any(hasattr(named, _FROM_PADDING) for named in vars(sys.modules[source]).values())


def padding_id(model: PreTrainedModel) -> int:
    """The padding id in RoBERTa and its relatives, which has no position; -1 in other models."""
    if _counts_from_padding(type(model).__module__):
        for module in model.modules():
            if hasattr(type(module), _FROM_PADDING):
                return int(getattr(module, "padding_idx"))  # noqa: B009 (nn.Module hides its type)
    return -1


def first_position(model: PreTrainedModel) -> int:
    """The position of the first token: 0, or the padding id + 1 in RoBERTa and its relatives."""
    return padding_id(model) + 1


def _rope_types(rotary: Any) -> dict[str | None, str]:
    """The ``rope_type`` of a rotary embedding by type of layer; by None if all layers share it."""
    found = rotary.rope_type
    return found if isinstance(found, dict) else {None: found}


def _rotaries(model: nn.Module, kind: str) -> list[Any]:
    """The rotary embeddings that have this ``rope_type`` for some type of layer at least."""
    rotaries = modules_holding(model, ("rope_type",))
    return [rotary for rotary in rotaries if kind in _rope_types(rotary).values()]


def switch_lengths(model: nn.Module) -> frozenset[int]:
    """The numbers of tokens beyond which LongRoPE takes its long factors; none without LongRoPE."""
    lengths = set()
    for rotary in _rotaries(model, "longrope"):
        for layer_type, rope_type in _rope_types(rotary).items():
            if rope_type == "longrope":
                parameters = rotary.config.rope_parameters
                of_type = parameters if layer_type is None else parameters[layer_type]
                lengths.add(int(of_type["original_max_position_embeddings"]))
    return frozenset(lengths)


def check_one_side(model: nn.Module, lengths: Tensor, new: int = 0) -> None:
    """Raises ValueError if LongRoPE would rotate a row of a batch otherwise than the row alone:
    the longest row decides for all.

    lengths: (B,) int64, the tokens of each row. new: how many more of each row may be run.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    for switch in switch_lengths(model):
        if shortest < longest and shortest <= switch < longest + new:
            more = f" and {new} new ones before the last" if new else ""
            raise ValueError(
                f"expected rows of at most {switch} tokens each, or of more each, because LongRoPE"
                " changes its factors there for the whole batch, got rows of"
                f" {shortest} to {longest} tokens{more}: run rows of one length, or each by itself"
            )


def steady_length(model: nn.Module) -> int:
    """The most tokens for which the frequencies of dynamic NTK do not depend on the calls before.

    One fewer than ``original_max_seq_len``: a call of that many tokens keeps the frequencies of a
    longer call before it. Without dynamic NTK there is no limit.
    """
    lengths = [int(rotary.original_max_seq_len) - 1 for rotary in _rotaries(model, "dynamic")]
    return min(lengths, default=NO_LIMIT)


def rotated_as_one_call(model: nn.Module, tokens: Tensor | int) -> ForwardOverrides:
    """A context within which LongRoPE takes the factors of one call over ``tokens`` tokens.

    Args:
        model: any model; without LongRoPE nothing changes.
        tokens: the number of tokens of the longest row, () int64 if a tensor. A call within this
            context may be given a part of them.
    """
    rotaries = _rotaries(model, "longrope")
    return ForwardOverrides((x, partial(_with_last, x.forward, tokens)) for x in rotaries)


def rotated_by_row(model: nn.Module, lengths: Tensor) -> ForwardOverrides:
    """A context within which LongRoPE takes the factors of each row alone.

    Args:
        model: any model; without LongRoPE nothing changes.
        lengths: (B,) int64, the number of tokens of each row up to the end of a call.
    """
    rotaries = _rotaries(model, "longrope")
    return ForwardOverrides((x, partial(_row_by_row, x.forward, lengths)) for x in rotaries)


def _row_by_row(
    forward: Forward, lengths: Tensor, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """``forward`` of a rotary embedding, called for each row; padding gets no later position than
    the row's tokens.
    """
    positions = position_ids.minimum(lengths.unsqueeze(1) - 1)
    rows = [forward(x, row.unsqueeze(0), *args, **kwargs) for row in positions]
    return tree_map(lambda *parts: torch.cat(parts), *rows)


def _with_last(
    forward: Forward,
    tokens: Tensor | int,
    x: Tensor,
    position_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``forward`` of a rotary embedding that also sees the last position of a call over ``tokens``
    tokens, and drops its output.
    """
    last = torch.as_tensor(tokens, dtype=position_ids.dtype, device=position_ids.device) - 1
    column = last.expand(*position_ids.shape[:-1], 1)
    rotations = forward(x, torch.cat([position_ids, column], -1), *args, **kwargs)
    return tree_map(lambda rotation: rotation[..., :-1, :], rotations)
