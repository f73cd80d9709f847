"""Both streams of one token over a cache of B rows: only the rows that differ are doubled.

The patch makes a block's output the same in both streams, so both enter the next block with the
same hidden state, queries, keys and values. They differ only after the attention has read the
cache. There the model's attention runs unchanged for the context rows; the reduced rows, which
attend to the current token alone, get this token's value. From the attention's output projection
to the block's end there are 2B rows, (2, B, 1, ·). Then only the context rows enter the next block.
The last block returns both, unless the update is exact.

:class:`SharedCacheStreams` traces the modules that it has to change. Whether that is enough is
checked by a replay, see :class:`icl_patch.generation.plans.StepPlans`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
)
from icl_patch.layers.device_hooks import has_accelerate_hooks
from icl_patch.models.block_detection import is_matrix
from icl_patch.models.forward_override import (
    Forward,
    is_plain_linear,
    linear_forward,
    overridable,
)
from icl_patch.models.pipeline import is_last
from icl_patch.models.trace import trace
from icl_patch.models.trial_tokens import trial_tokens
from icl_patch.recording.attached_block import AttachedBlock


class SharedCacheStreams:
    """How a model's blocks run both streams over one cache.

    Args:
        model: the attached model. blocks: its blocks.
        exact: whether the head gets the context stream alone, (B, 1, d), because both have the same
            bits; else both, (2B, 1, d).

    Attributes:
        rows: how many rows a step has for one of the cache.
        forwards: the forwards that modules have in a step.

    Raises:
        UnsupportedModelError: a block's form, or the way its attention is called, does not allow
            it.
    """

    rows = 1

    def __init__(
        self, model: PreTrainedModel, blocks: Sequence[AttachedBlock], *, exact: bool
    ) -> None:
        if has_accelerate_hooks(model):
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
                        f"mode='shared_cache' does not cover {block.path}: {reason}"
                    )
        # of the model, which some rank has
        last = blocks[-1] if is_last(model) and not exact else None
        self._model = model
        self._both: Tensor | None = None  # (2B, 1, H, D), the attention of both streams
        self._slot: Tensor | None = None
        projections = _output_projections(model, blocks)
        outputs = [(module, self._doubled(module)) for module in projections]
        mixtures = [
            (block.mixture, _in_a_batch(block.mixture.forward))
            for block in blocks
            if block.mixture is not None
        ]
        ends = [(block.module, ending(block, lambda total: total[0])) for block in blocks]
        if last is not None:
            ends[-1] = last.module, ending(last, lambda total: total.flatten(0, 1))
        self.forwards: dict[nn.Module, Forward] = dict([*outputs, *mixtures, *ends])

    @contextmanager
    def active(self, step_inputs: StepInputs) -> Iterator[None]:
        """Within this context, and with :attr:`forwards`, a pass over one token a row gives both
        streams' logits, or those of the context stream.
        """
        self._slot = step_inputs.slot
        try:
            with attending(self._attend):
                yield
        finally:
            self._both = self._slot = None

    def _attend(self, call: AttentionCall) -> Tensor:
        """The attention of the rows with the context; that of both streams is kept."""
        slot = self._slot
        if slot is None:  # the newest token is the last one, also in a full window
            slot = torch.full((1,), call.value.shape[2] - 1, device=call.value.device)
        self._both = call.output(slot)
        return self._both[: len(call.query)]

    def _doubled(self, module: nn.Module) -> Forward:
        """An output projection's forward: (B, 1, ·) of the context rows -> (2, B, 1, d) of both
        streams. Its input must be the first half of the attention of both streams, untouched: the
        product is taken of the whole.
        """
        original = linear_forward(module) if is_plain_linear(module) else module.forward

        def forward(x: Tensor) -> Tensor:
            both, self._both = self._both, None
            if both is None or x.data_ptr() != both.data_ptr():
                raise other_attention(self._model)
            return original(both.reshape(2, *x.shape))

        return forward


def _in_a_batch(original: Forward) -> Forward:
    """A forward that takes (batch, tokens, d), given both streams: (2, B, 1, d) as (2B, 1, d)."""

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = original(x.flatten(0, -3), *args, **kwargs)
        return (
            (out[0].reshape(x.shape), *out[1:]) if isinstance(out, tuple) else out.reshape(x.shape)
        )

    return forward


def _cure(model: PreTrainedModel) -> str:
    """What gives a model transformers' attention, if it has another implementation."""
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if implementation == SDPA:
        return ", as its class has attention code of its own"
    if not model._supports_sdpa:
        return f", as its class knows {implementation!r} only"
    return f", as it has {implementation!r}: call model.set_attn_implementation({SDPA!r})"


def _output_projections(model: PreTrainedModel, blocks: Sequence[AttachedBlock]) -> list[nn.Module]:
    """The matrix of every block that reads the attention's output, found in a pass over two tokens.

    Raises:
        UnsupportedModelError: a block has no such matrix.
    """
    outputs: dict[int, Tensor] = {}  # by their address

    def on_attention(call: AttentionCall) -> Tensor:
        output = call.output()
        outputs[output.data_ptr()] = output
        return output

    ids = trial_tokens(model, 2, seed=1, starts=[0])
    with attending(on_attention):
        traces = trace(model, {block.path: block.module for block in blocks}, ids)
    if len(outputs) != len(blocks):
        raise UnsupportedModelError(
            f"mode='shared_cache' does not cover {type(model).__name__}: its {len(blocks)} blocks"
            f" call {len(outputs)} attentions of transformers' {SDPA!r}, not one each{_cure(model)}"
        )
    projections = []
    for block, address in zip(blocks, outputs, strict=True):
        path = block.path
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
