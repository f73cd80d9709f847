"""Recording an exact decode step in one pass of both streams.

In the model's own arithmetic an exact step takes two passes, because a product rounds a row
differently in a batch of 2B rows than in one of B. In the batch-invariant arithmetic
(:mod:`icl_patch.invariance.arithmetic`) it rounds alike. The context stream runs through the block
with all its roundings. The reduced stream stops at the writer; the factor is chosen so that the
rounded sum of the reduced stream equals the context stream's. So both streams leave a block with
the same bits, and only one of them continues.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.rms_norm import PatchedRMSNorm
from icl_patch.models.block_spec import Writer
from icl_patch.models.trace import first_tensor
from icl_patch.recording import updates
from icl_patch.recording.block_recorder import BlockRecorder
from icl_patch.recording.decode_recorder import DecodeRecorder


class ExactDecodeRecorder(DecodeRecorder):
    """A decode step's recorder; :func:`close_loops` chooses the writer's factor after the pass."""

    _beside: Tensor | None = None  # (B, 1, d), what a mixture adds to its writer's output
    residual: Tensor | None = None  # (B, 1, d), all that the block adds to its writer's output
    # of a weight writer: the module, its input h (B, 1, K) and output (B, 1, d), and both streams'
    # residual stream before the MLP (2B, 1, d)
    waiting: tuple[PatchedLinear, Tensor, Tensor, Tensor] | None = None
    _stream: Tensor | None = None

    def hook(self, stack: ExitStack) -> None:
        """See the block's sum too, and what a mixture adds beside its writer."""
        if self.spec.final_norm is None:  # the block's forward returns the context stream alone
            self.block.on_sum = self.on_end
        else:
            self.block.on_end(stack, self.on_end, first=True)
        if self.block.mixture is not None:
            self.block.hook(stack, self.block.mixture.register_forward_hook, self.on_mixture)
        super().hook(stack)

    @property
    def _waits(self) -> bool:
        """Whether nothing in the pass depends on delta, so that alike blocks can be written at once
        when it has ended.
        """
        spec = self.spec
        alone = len(spec.residual) == 1 and self.block.mixture is None
        return spec.writer is Writer.WEIGHT and not spec.mixer and alone

    def on_residual(self, x: Tensor) -> None:
        """Take one term of the residual stream before the MLP."""
        if self._waits:
            self._stream = x.clone()  # some models add to the tensor itself
        else:
            BlockRecorder.on_residual(self, x)

    def keep_pair(self, name: str, layer: PatchedLinear, pair: Tensor, u: Tensor) -> None:
        """Keep a reader's factors, and its output with the context, which a miss needs."""
        super().keep_pair(name, layer, pair, u)
        self.context.readers[name] = self.unflat(pair[: self.rows])

    def keep_reader(
        self, name: str, layer: PatchedLinear, reference: Tensor, patched: Tensor, u: Tensor
    ) -> None:
        """The same for a reader that is no plain product."""
        super().keep_reader(name, layer, reference, patched, u)
        self.context.readers[name] = reference

    def context_written(self, output: Tensor | None, dtype: torch.dtype) -> Tensor:
        """That of the rows with the context, which a miss needs."""
        written = super().context_written(output, dtype)
        self.context.written = written.to(dtype)
        return written

    def down(self, layer: PatchedLinear, h: Tensor) -> Tensor:
        """The output matrix's output with the context, and 0 for the rows without it, unless a norm
        reads it.
        """
        if not self._waits or self._stream is None:
            return BlockRecorder.down(self, layer, h)
        plain, dtype = layer.plain(h, self.rows)
        y_ctx, y = self.split(plain)
        self.waiting = layer, self.split(h)[1], y, self._stream
        return self.join(y_ctx, torch.zeros_like(y, dtype=dtype), plain)

    def keep_stream(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """Keep the residual stream with the context and delta, (B, 1, d) fp32 or wider; returns the
        writer's target.
        """
        self.context.hidden, self.delta = hidden, delta
        return self.writer_target()

    def written(self, _layer: PatchedLinear, _h: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        """0: the factor is chosen after the pass."""
        return torch.zeros_like(y, dtype=dtype)

    def join_experts(self, x_ctx: Tensor | None, x: Tensor, like: Tensor) -> Tensor:
        """The experts' output with the context, and 0 for the rows without it if the experts are
        the writer.
        """
        assert x_ctx is not None
        writes = self.spec.writer is Writer.EXPERTS
        return self.join(x_ctx, torch.zeros_like(x_ctx) if writes else x, like)

    def on_mixture(self, _module: Any, _args: Any, output: Any) -> None:
        """Keep what a mixture gives the rows without the context beside its writer: shared experts,
        or routed ones beside a shared writer.
        """
        found = first_tensor(output)
        assert found is not None
        self._beside = self.split(found)[1]

    def _apply_new_scale(self, layer: PatchedRMSNorm, x: Tensor, new_scale: Tensor) -> Tensor:
        """The norm's output with the context, and 0 for the rows without it."""
        with_context = layer.base_layer(self.split(x)[0])
        return self.join(with_context, torch.zeros_like(with_context), x)

    def on_end(self, total: Tensor) -> None:
        """Take the block's sum of both streams: the target, and the residual."""
        self.context.output, self.residual = self.split(total)
        if self._beside is not None and self.spec.writer is not Writer.SCALE:
            # two terms, whose sum the model has rounded; their replay adds them in fp64
            hidden = sum(part.double() for _, part in self._residuals)
            self.residual = hidden + self.spec.residual_multiplier * self._beside.double()


def close_loops(recorders: Sequence[DecodeRecorder]) -> Tensor | None:
    """Choose the exact factor of every block, alike blocks at once.

    Returns:
        The elements that each block misses, (L, B); None for updates other than exact.
    """
    misses: list[Tensor] = []
    exact = [recorder for recorder in recorders if isinstance(recorder, ExactDecodeRecorder)]
    if not exact:
        return None
    _write_together([recorder for recorder in exact if recorder.waiting is not None])
    for _, group in groupby(exact, _form):
        alike = list(group)
        closed = _closed(alike)
        for recorder, part in zip(alike, closed, strict=True):
            recorder.close_loop(part.factor, part.misses, part.correction)
            misses.append(part.misses.squeeze(1))
    return torch.stack(misses)


def _write_together(recorders: Sequence[ExactDecodeRecorder]) -> None:
    """Keep the factors that weight writers start from, those of alike blocks at once."""

    def form(recorder: ExactDecodeRecorder) -> list[Any]:
        return [(x.shape, x.dtype) for x in (recorder.waiting or ())[1:]]

    for _, group in groupby(recorders, form):
        alike = list(group)
        layers, *tensors = zip(*(recorder.waiting or () for recorder in alike), strict=True)
        h, y, streams = map(torch.stack, tensors)
        wide = streams.to(torch.promote_types(streams.dtype, torch.float32))
        hidden, own = wide.reshape(len(alike), 2, -1, *h.shape[2:-1], wide.shape[-1]).unbind(1)
        both = zip(alike, hidden, hidden - own, strict=True)
        target = torch.stack([recorder.keep_stream(*x) for recorder, *x in both])
        v, inverse, _ = ops.read_direction(h, torch.float64)
        gain = (h.double() * v).sum(-1, keepdim=True)
        parts = (y.double(), target.double(), v, inverse, gain)
        for recorder, layer, *factors in zip(alike, layers, *parts, strict=True):
            recorder.keep_written(layer, *factors)


def _form(recorder: ExactDecodeRecorder) -> tuple[Any, ...]:
    """Equal for blocks that can be closed in one call."""
    loop = recorder.loop
    assert loop is not None and recorder.residual is not None
    shapes = (loop.base.shape, loop.gain.shape, recorder.residual.shape, recorder.residual.dtype)
    return (*shapes, recorder.spec.residual_multiplier)


def _closed(alike: Sequence[ExactDecodeRecorder]) -> list[updates.Closed]:
    """:func:`icl_patch.recording.updates.close` of blocks of one form."""

    def stacked(parts: Iterable[Tensor | None]) -> Tensor:
        return torch.stack([part for part in parts if part is not None])

    loops = [recorder.loop for recorder in alike if recorder.loop is not None]
    closed = updates.close(
        target=stacked(recorder.context.output for recorder in alike),
        residual=stacked(recorder.residual for recorder in alike),
        base=stacked(loop.base for loop in loops),
        gain=stacked(loop.gain for loop in loops),
        started_from=stacked(loop.factor for loop in loops),
        branch=alike[0].spec.residual_multiplier,
    )
    parts = (closed.factor, closed.output, closed.misses, closed.correction)
    return [updates.Closed(*part) for part in zip(*parts, strict=True)]
