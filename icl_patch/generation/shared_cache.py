"""Both streams of one token over a cache of B rows: only the rows that differ are doubled.

The patch makes a block's output the same in both streams, so both enter the next block with the
same hidden state, queries, keys and values. They differ only after the attention has read the
cache. There the model's attention runs unchanged for the context rows; the reduced rows, which
attend to the current token alone, get this token's value. From the attention's output projection
to the block's end there are 2B rows, (2, B, 1, ·). Then only the context rows enter the next block;
the last block returns both.

:class:`SharedCacheStreams` traces the modules that it has to change. Whether that is enough is
checked by a replay, see :class:`icl_patch.generation.plans.StepPlans`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from icl_patch.errors import UnsupportedModelError
from icl_patch.invariance.functions import one_token_attention
from icl_patch.layers.device_hooks import input_device, is_aligned
from icl_patch.models.attention_mask import TableOverride
from icl_patch.models.block_detection import is_matrix
from icl_patch.models.forward_override import (
    Forward,
    is_plain_linear,
    linear_forward,
    overridable,
)
from icl_patch.models.language_model import vocabulary
from icl_patch.models.pipeline import is_last
from icl_patch.models.trace import trace
from icl_patch.recording.attached_block import AttachedBlock

_IMPLEMENTATION = "sdpa"
_FURTHER = ("position_bias", "softcap", "cache", "s_aux")  # inputs of an attention beyond the usual

# Called with (output, query, value) of every attention of the model.
_attend: ContextVar[Callable[[Tensor, Tensor, Tensor], None] | None] = ContextVar(
    "icl_patch_attend", default=None
)


def _interposed(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> Any:
        attend, y = _attend.get(), None
        if attend is not None and not any(kwargs.get(name) is not None for name in _FURTHER):
            y = one_token_attention(query, key, value, attention_mask, dropout, scaling)
        if y is None:
            output = original(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        else:
            output = (y.transpose(1, 2), None)
        if attend is not None:
            attend(output[0], query, value)
        return output

    return attention


_override = TableOverride(ALL_ATTENTION_FUNCTIONS, _IMPLEMENTATION, _interposed)


@contextmanager
def attending(attend: Callable[..., Any]) -> Iterator[None]:
    """Within this context attention of one token a row runs in our kernel, where it serves it, and
    ``attend`` gets each attention's (output, query, value).
    """
    token = _attend.set(attend)
    try:
        with _override():
            yield
    finally:
        _attend.reset(token)


class SharedCacheStreams:
    """How a model's blocks run both streams over one cache.

    Args:
        model: the attached model. blocks: its blocks.
        context_only: whether the head gets the context stream alone, (B, 1, d), because both have
            the same bits; else both, (2B, 1, d).

    Attributes:
        forwards: modules, each with the forward that it has in a step.

    Raises:
        UnsupportedModelError: a block's form, or the way its attention is called, does not allow
            it.
    """

    def __init__(
        self, model: PreTrainedModel, blocks: Sequence[AttachedBlock], *, context_only: bool
    ) -> None:
        if is_aligned(model):
            raise UnsupportedModelError(
                f"mode='shared_cache' does not cover {type(model).__name__} with accelerate's"
                " hooks, which move tensors between devices"
            )
        for block in blocks:
            spec = block.spec
            reasons = {
                "its MLP stands beside the attention": spec.parallel,
                "its context layer keeps a state, which no query can be folded into": spec.mixer,
                "it goes on from its sum, in shapes of its own": spec.continues_after_sum,
            }
            for reason, holds in reasons.items():
                if holds:
                    raise UnsupportedModelError(
                        f"mode='shared_cache' does not cover {block.block.path}: {reason}"
                    )
        # of the model, which some rank has
        self._last = blocks[-1] if is_last(model) and not context_only else None
        self._reduced: Tensor | None = None
        self._slot: Tensor | None = None
        projections = _output_projections(model, blocks)
        outputs = [(module, self._doubled(module)) for module in projections]
        mixtures = [
            (block.mixture, _in_a_batch(block.mixture.forward))
            for block in blocks
            if block.mixture is not None
        ]
        ends = [(block.module, self._ending(block)) for block in blocks]
        self.forwards = [*outputs, *mixtures, *ends]

    @contextmanager
    def active(self, slot: Tensor | None) -> Iterator[None]:
        """Within this context, and with :attr:`forwards`, a pass over one token a row gives both
        streams' logits, or those of the context stream.

        slot: (1,) int64, the column of the token in a fixed cache; None for a dynamic one, where
            it is the last.
        """
        self._slot = slot
        try:
            with attending(self._alone):
                yield
        finally:
            self._reduced = self._slot = None

    def _alone(self, _output: Tensor, query: Tensor, value: Tensor) -> None:
        """Keep the attention's output for the reduced rows.

        A token that attends to itself alone gets its own value, because the softmax of one number
        is 1.
        """
        slot = self._slot
        if slot is None:  # the newest token is the last one, also in a full window
            newest = value[:, :, -1:]
        else:
            newest = value.index_select(2, slot.clamp(max=value.shape[2] - 1))
        # (B, groups, heads of each, ·), in the order of the output's elements
        self._reduced = newest.expand(-1, -1, query.shape[1] // value.shape[1], -1)

    def _doubled(self, module: nn.Module) -> Forward:
        """An output projection's forward: (B, 1, ·) of the context rows -> (2, B, 1, d) of both
        streams.
        """
        original = linear_forward(module) if is_plain_linear(module) else module.forward

        def forward(x: Tensor) -> Tensor:
            assert self._reduced is not None
            reduced, self._reduced = self._reduced.reshape(x.shape), None
            return original(torch.stack([x, reduced]))

        return forward

    def _ending(self, block: AttachedBlock) -> Forward:
        """A block's forward that returns the context stream (B, 1, d), or both streams (2B, 1, d)
        for the last block.
        """
        original = block.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            total = out[0] if isinstance(out, tuple) else out
            if block.on_sum is not None:
                block.on_sum(total)
            total = total.flatten(0, 1) if block is self._last else total[0]
            return (total, *out[1:]) if isinstance(out, tuple) else total

        return forward


def _in_a_batch(original: Forward) -> Forward:
    """A forward that takes (batch, tokens, d), given both streams: (2, B, 1, d) as (2B, 1, d)."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = original(x.flatten(0, -3), *args, **kwargs)
        return (
            (out[0].reshape(x.shape), *out[1:]) if isinstance(out, tuple) else out.reshape(x.shape)
        )

    return forward


def _output_projections(model: PreTrainedModel, blocks: Sequence[AttachedBlock]) -> list[nn.Module]:
    """The matrix of every block that reads the attention's output, found in a pass over two tokens.

    Raises:
        UnsupportedModelError: a block has no such matrix.
    """
    outputs: dict[int, Tensor] = {}  # by their address

    def on_attention(output: Tensor, *_: Any) -> None:
        outputs[output.data_ptr()] = output

    ids = torch.arange(2, device=input_device(model)).unsqueeze(0) % vocabulary(model)
    with attending(on_attention):
        traces = trace(model, {block.block.path: block.module for block in blocks}, ids)
    if len(outputs) != len(blocks):
        raise UnsupportedModelError(
            f"mode='shared_cache' does not cover {type(model).__name__}: its {len(blocks)} blocks"
            f" call {len(outputs)} attentions of transformers' {_IMPLEMENTATION!r}, not one each"
        )
    projections = []
    for block, address in zip(blocks, outputs, strict=True):
        path = block.block.path
        readers = [
            call.module
            for call in traces[path].calls
            if is_matrix(call.module) and call.given.address == address
        ]
        if not readers or not overridable(readers[-1]):
            raise UnsupportedModelError(
                f"mode='shared_cache' does not cover {path}: it does something to the attention's"
                " output before a matrix reads it, or experts read it (JetMoE)"
            )
        projections.append(readers[-1])
    return projections
