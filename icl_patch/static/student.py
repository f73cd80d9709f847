"""Passes of a model over rows of ids: to its hidden states, and from these to the logits of some
tokens.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.models.forward_override import ForwardOverrides
from icl_patch.models.positions import switch_lengths


class _Stopped(Exception):
    """Ends a pass at the head: its logits of all tokens are not needed."""


class Student:
    """The passes of a fit over one model. All of them run the model's own code.

    Rows of ids are padded on the right: causal blocks do not see the padding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._switches = switch_lengths(model)
        decoder = model.get_decoder()  # BERT's relatives call a part of their head so
        self._decoder = decoder if isinstance(decoder, PreTrainedModel) else model.base_model
        self._output: Any = None  # the class of the decoder's output

    def kind(self, length: int) -> int:
        """Equal for lengths of rows that may share a batch: LongRoPE depends on the longest row."""
        return sum(length > switch for switch in self._switches)

    def final(self, ids: Tensor) -> Tensor:
        """The hidden states (B, T, d) that the head reads, for ids (B, T)."""
        found: list[Any] = []
        forward = self._decoder.forward

        def stop(*args: Any, **kwargs: Any) -> Any:
            found.append(forward(*args, **kwargs))
            raise _Stopped

        with ForwardOverrides([(self._decoder, stop)]), suppress(_Stopped):
            self._call(ids)
        hidden = getattr(found[0], "last_hidden_state", None)
        if not isinstance(hidden, Tensor):
            raise UnsupportedModelError(
                "expected a decoder that returns its last_hidden_state for a static patch, got"
                f" {type(self._decoder).__name__}, which returns {type(found[0]).__name__}"
            )
        self._output = type(found[0])
        return hidden.to(ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, V) fp32, from hidden states (n, d) of single tokens that :meth:`final` gave."""
        ids = torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
        given = self._output(last_hidden_state=hidden.unsqueeze(1))
        with ForwardOverrides([(self._decoder, lambda *_args, **_kwargs: given)]):
            return self._call(ids)[:, 0].float()

    def _call(self, ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits
