"""Passes of a model over rows of ids: from some block on, and to the logits of some tokens."""

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.device_hooks import input_device
from icl_patch.models.forward_override import Forward, Overrides
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
        self.tuples: list[bool] = [False] * len(self.layers)  # whether a block returns a tuple
        with (
            torch.no_grad(),
            self._overrides({i: self._noting(i) for i in range(len(self.layers))}),
        ):
            self._call(torch.zeros(1, 1, dtype=torch.int64, device=input_device(model)))

    def kind(self, length: int) -> int:
        """Equal for lengths of rows that may share a batch: LongRoPE goes by its longest row."""
        return sum(length > switch for switch in self._switches)

    def below(self, ids: Tensor, block: int) -> Tensor:
        """The hidden states (B, T, d) that the block before one gives, of ids (B, T)."""
        return self._behind(ids, block - 1, {})

    def final(self, ids: Tensor, block: int = 0, below: Tensor | None = None) -> Tensor:
        """The hidden states (B, T, d) behind the last block, of ids (B, T); from the hidden states
        ``below`` before ``block``, if they are known.
        """
        given = {} if below is None else self._giving(block, below)
        return self._behind(ids, len(self.layers) - 1, given)

    def _behind(self, ids: Tensor, block: int, forwards: dict[int, Forward]) -> Tensor:
        """What a block's own forward returns: hooks on the block see it when it is given back."""
        found: list[Tensor] = []
        forward = self.layers[block].forward

        def stop(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            found.append(out[0] if isinstance(out, tuple) else out)
            raise _Stopped

        with self._overrides(forwards | {block: stop}), suppress(_Stopped):
            self._call(ids)
        return found[0].to(ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, V) fp32, from hidden states (n, d) of single tokens behind the last block."""
        ids = torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
        with self._overrides(self._giving(len(self.layers), hidden.unsqueeze(1))):
            return self._call(ids)[:, 0].float()

    def _giving(self, block: int, hidden: Tensor) -> dict[int, Forward]:
        """The forwards of the blocks before one, which hand on these hidden states."""

        def give(*_args: Any, returns_tuple: bool, **_kwargs: Any) -> Any:
            return (hidden,) if returns_tuple else hidden

        return {i: partial(give, returns_tuple=self.tuples[i]) for i in range(block)}

    def _noting(self, number: int) -> Forward:
        forward = self.layers[number].forward

        def note(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            self.tuples[number] = isinstance(out, tuple)
            hidden = out[0] if isinstance(out, tuple) else out
            if not isinstance(hidden, Tensor) or hidden.dim() != 3:
                raise UnsupportedModelError(
                    "expected blocks that give hidden states (B, T, d) for a static patch, got"
                    f" {type(self.layers[number]).__name__}, which gives others"
                )
            return out

        return note

    def _overrides(self, forwards: dict[int, Forward]) -> Overrides:
        return Overrides((self.layers[i], forward) for i, forward in forwards.items())

    def _call(self, ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits
