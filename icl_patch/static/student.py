"""Passes of a model over rows of ids: to its last block, and from there to some tokens' logits."""

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.device_hooks import input_device
from icl_patch.models.forward_override import Forward, ForwardOverrides
from icl_patch.models.language_model import layers_of
from icl_patch.models.positions import switch_lengths


class _Stopped(Exception):
    """Ends a pass at a block: nothing behind it is needed."""


class Student:
    """The passes of a fit over one model, the model's own code in all of them.

    Rows of ids are padded on the right: causal blocks do not see the padding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._switches = switch_lengths(model)
        self.layers: list[nn.Module] = list(layers_of(model).values())
        self._tuples: list[bool] = []  # whether each block returns a tuple
        noting = ((layer, partial(self._note, layer, layer.forward)) for layer in self.layers)
        with torch.no_grad(), ForwardOverrides(noting):
            self._call(torch.zeros(1, 1, dtype=torch.int64, device=input_device(model)))

    def _note(self, layer: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        self._tuples.append(isinstance(out, tuple))
        hidden = _first(out)
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            raise UnsupportedModelError(
                "expected blocks that give hidden states (B, T, d) for a static patch, got"
                f" {type(layer).__name__}, which gives others"
            )
        return out

    def kind(self, length: int) -> int:
        """Equal for lengths of rows that may share a batch: LongRoPE goes by its longest row."""
        return sum(length > switch for switch in self._switches)

    def final(self, ids: Tensor) -> Tensor:
        """The hidden states (B, T, d) behind the last block, of ids (B, T).

        They are what its own forward returns: hooks on the block see it when it is given back.
        """
        found: list[Tensor] = []
        forward = self.layers[-1].forward

        def stop(*args: Any, **kwargs: Any) -> Any:
            found.append(_first(forward(*args, **kwargs)))
            raise _Stopped

        with ForwardOverrides([(self.layers[-1], stop)]), suppress(_Stopped):
            self._call(ids)
        return found[0].to(ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, V) fp32, from hidden states (n, d) of single tokens behind the last block."""
        ids = torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
        rows = hidden.unsqueeze(1)

        def give(returns_tuple: bool, *_args: Any, **_kwargs: Any) -> Any:
            return (rows,) if returns_tuple else rows

        gives = (partial(give, returns_tuple) for returns_tuple in self._tuples)
        with ForwardOverrides(zip(self.layers, gives, strict=True)):
            return self._call(ids)[:, 0].float()

    def _call(self, ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits


def _first(out: Any) -> Any:
    """The hidden states that a block returns, alone or first in a tuple."""
    return out[0] if isinstance(out, tuple) else out
