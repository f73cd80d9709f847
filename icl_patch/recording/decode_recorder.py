"""Recording a decode step: one token a row, both streams, nothing that waits for the device.

**Exact.** In the model's own arithmetic an exact step takes two passes, because a product rounds a
row differently in a batch of 2B rows than in one of B. In the batch-invariant arithmetic
(:mod:`icl_patch.invariance.arithmetic`) it rounds alike. The context stream runs through the block
with all its roundings. The reduced stream stops at the writer; the factor is chosen so that the
rounded sum of the reduced stream equals the context stream's. So both streams leave a block with
the same bits. With a shared cache only one of them continues.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.layers.device_hooks import weight_of
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.patched_module import like_rows_of, rows_of
from icl_patch.layers.rms_norm import PatchedRMSNorm
from icl_patch.models.block_spec import Writer
from icl_patch.recording import block_math
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations
from icl_patch.recording.block_recorder import BlockRecorder
from icl_patch.recording.diagnostics import BlockDiagnostics, Note


class UnwrittenOutput(NamedTuple):
    """The output of an output matrix whose update is computed later.

    Attributes:
        layer, h: the matrix, and its input (2B, 1, K) of both streams.
        plain: its output (2B, 1, d) without the update, which is to be rounded to ``dtype``.
        norm: the norm that reads the output, of an exact scale writer.
    """

    layer: PatchedLinear
    h: Tensor
    plain: Tensor
    dtype: torch.dtype
    norm: PatchedRMSNorm | None = None


class DecodeRecorder(BlockRecorder):
    """Compares the rows with the context, [:B], with the rows without it, [B:], module by module;
    its notes become diagnostics when they are used.

    Args:
        block, update: as for :class:`BlockRecorder`.
        patch_index: (2M,) int64, the patch of each row: -1 for the M rows with the context, then
            0, 1, …
        receives_norm_input: whether the norm before the MLP calls ``on_norm_pair``, in place of
            a hook on the residual stream.
        writer_first: whether a parallel block adds its writer's output to one of its other terms
            before it adds these to each other.
    """

    def __init__(
        self,
        block: AttachedBlock,
        update: str,
        patch_index: Tensor,
        *,
        receives_norm_input: bool,
        writer_first: bool,
    ) -> None:
        super().__init__(block, update, None, BlockActivations())
        self.notes: list[Note] = []
        self.patch_index, self.shape = patch_index.to(block.device), (len(patch_index) // 2, 1)
        self.receives_norm_input = receives_norm_input
        self.writer_first = writer_first and self.spec.parallel
        self.unwritten: UnwrittenOutput | None = None

    def hook(self, stack: ExitStack) -> None:
        """See the residual stream: through the norm before the MLP, if it gives both streams."""
        if self.receives_norm_input:
            self.block.on_norm_pair = self.on_norm_pair
        else:
            self.block.hook_residual(stack, self.on_residual)

    def on_norm_pair(self, pair: ops.NormPair, x: Tensor) -> None:
        """Take delta and the direction of z from the norm before the MLP; in an exact step also a
        copy of its input, because some models add to the tensor itself.
        """
        self.delta = self.unflat(pair.delta)
        self.set_direction(pair.z_pair, pair.direction)
        if self.exact:
            self._residuals = [x.to(pair.delta.dtype, copy=True)]
            self.context.hidden, _ = self.split(self._residuals[0])

    def note(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method of the block's diagnostics later."""
        self.notes.append(Note(method, arguments))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both streams, (B, 1, ·) each."""
        x = x.reshape(-1, 1, x.shape[-1])
        return x[: self.rows], x[self.rows :]

    def reader(self, name: str, layer: PatchedLinear, z: Tensor) -> Tensor:
        """Both streams' outputs in one product, which reads W once."""
        linear = layer.linear_map(z)
        if linear is None:
            return super().reader(name, layer, z)
        rows = rows_of(z)
        self.direction_of(rows)
        pair, u, _ = ops.record_linear(rows, *linear, direction=self.row_direction)
        u = self.unflat(u)
        self.keep_factors(name, layer, u)
        self.note(BlockDiagnostics.reader_pair, pair, u)
        if self.exact:
            self.context.readers[name] = self.unflat(pair[: self.rows])  # which a miss needs
        return like_rows_of(z, pair)

    def write_later(self, layer: PatchedLinear, h: Tensor) -> Tensor:
        """The plain output of an output matrix whose update is computed later."""
        plain, dtype = layer.unpatched_output(h, self.rows)
        h, output = (x.reshape(-1, 1, x.shape[-1]) for x in (h, plain))
        self.unwritten = UnwrittenOutput(layer, h, output, dtype)
        return plain


class InexactDecodeRecorder(DecodeRecorder):
    """The recorder of a step of the direct or stable update."""

    def down(self, layer: PatchedLinear, h: Tensor) -> Tensor:
        """The output matrix's output; a weight writer's in one product, which reads W once. The
        plain output where :meth:`norm` computes all that is behind it.
        """
        if self._ends_in_norm(layer, h):
            return self.write_later(layer, h)
        linear = layer.linear_map(h)
        if self.spec.writer is not Writer.WEIGHT or self.spec.mixer or linear is None:
            return super().down(layer, h)
        rows = rows_of(h)
        v, inverse, _ = self.read_direction(rows)
        # of rank 1, a patch for each row
        v, inverse = self.unflat(v), self.unflat(inverse)
        u = self.writer_target().to(v.dtype)
        self.keep_down(layer, u, v, inverse)
        weight, bias = linear
        output = ops.patched_linear(
            rows,
            weight,
            u,
            v,
            bias,
            index=self.patch_index,
            path=ops.product_path(rows, self.rows),
        )
        return like_rows_of(h, output)

    def _ends_in_norm(self, layer: PatchedLinear, h: Tensor) -> bool:
        """Whether the norm of a stable update reads the output of ``layer`` and nothing else, in
        dtypes that :func:`icl_patch.ops.record_norm` computes in one launch.
        """
        norm = self.block.post_norm
        if norm is None or self.update != "stable" or self.spec.addend or layer.group is not None:
            return False
        return torch.float64 not in (h.dtype, weight_of(norm.base_layer).dtype)

    def norm(self, layer: PatchedRMSNorm, x: Tensor) -> Tensor:
        """Both streams' outputs, with the matrix and the scale of the update."""
        if self.unwritten is None:
            return super().norm(layer, x)
        down, h, plain, dtype, _ = self.unwritten
        found = ops.record_norm(
            rows_of(plain),
            rows_of(h)[self.rows :],
            rows_of(self.writer_target()),
            weight_of(layer.base_layer),
            layer.eps,
            out_dtype=dtype,
            scale_offset=layer.scale_offset,
            cast_first=layer.cast_first,
        )
        u, v, inverse, new_scale, status = map(
            self.unflat, (found.u, *found.direction[:2], found.new_scale, found.status)
        )
        self.note(BlockDiagnostics.largest, "status", status)
        self.keep_down(down, u, v, inverse)
        self.keep(layer, new_scale=new_scale)
        return like_rows_of(x, found.y_pair)


class ExactDecodeRecorder(DecodeRecorder):
    """The recorder of an exact step: :func:`close_blocks` chooses the factor after the pass."""

    _beside: Tensor | None = None  # (B, 1, d), what a mixture adds to its writer's output
    total: Tensor | None = None  # (2B, 1, d), the block's sum of both streams
    # (B, 1, d), all that the block adds to its writer's output, if it is not the reduced sum
    residual: Tensor | None = None

    def hook(self, stack: ExitStack) -> None:
        """See the residual stream, the block's sum, and a mixture's further terms."""
        if self.spec.ends_in_its_sum:  # the block's forward reports it
            self.block.on_sum = self.on_end
        else:
            self.block.hook_end(stack, self.on_inner_sum, first=True)
        if self.block.mixture is not None:
            self.block.hook_output(stack, self.block.mixture, self.on_mixture)
        super().hook(stack)

    def down(self, layer: PatchedLinear, h: Tensor) -> Tensor:
        """The output matrix's output with the context, and 0 for the rows without it, unless a norm
        reads it.
        """
        spec = self.spec
        weight = spec.writer is Writer.WEIGHT and not spec.mixer
        scale = spec.writer is Writer.SCALE and spec.addend is None
        if not (weight or scale) or self.delta is None:
            return super().down(layer, h)
        plain = self.write_later(layer, h)  # of alike blocks at once, at the end
        assert self.unwritten is not None
        y_ctx, y = (part.to(self.unwritten.dtype) for part in self.split(plain))
        return self.join(y_ctx, torch.zeros_like(y), plain)

    def norm(self, layer: PatchedRMSNorm, x: Tensor) -> Tensor:
        """The scale writer's output with the context, and 0 for the rows without it."""
        if self.unwritten is None:
            self.choose_scale(layer, x)
        else:
            self.unwritten = self.unwritten._replace(norm=layer)
        with_context = layer.base_layer(self.split(x)[0])
        return self.join(with_context, torch.zeros_like(with_context), x)

    def on_mixture(self, output: Tensor) -> None:
        """Keep a mixture's further terms for the rows without the context. If its writer is routed,
        they come from shared experts, else from routed ones.
        """
        self._beside = self.split(output)[1]

    def on_inner_sum(self, total: Tensor) -> Tensor:
        """:meth:`on_end`. Both streams go on from the context's sum, which the factors that are
        chosen later will give to the reduced rows.
        """
        self.on_end(total)
        context, _ = self.split(total)
        return torch.cat([context, context]).reshape(total.shape)

    def on_end(self, total: Tensor) -> None:
        """Take the block's sum of both streams: the target, and the residual."""
        self.total = total.reshape(-1, 1, total.shape[-1])
        self.context.output, _ = self.split(total)
        beside = self._beside if self.spec.writer is not Writer.SCALE else None
        if beside is not None or self.writer_first:
            # the model has rounded the sum of these terms; their replay adds them in fp64
            parts = [self.split(part)[1].double() for part in self._residuals]
            self.residual = reduce(torch.add, parts)
        if self.residual is not None and beside is not None:
            self.residual = self.residual + self.spec.residual_multiplier * beside.double()


def close_blocks(recorders: Sequence[ExactDecodeRecorder]) -> Tensor:
    """Choose the exact factor of every block, alike blocks at once.

    Returns:
        The elements that each block misses, (L, B).
    """
    alike: dict[Any, list[ExactDecodeRecorder]] = defaultdict(list)
    for recorder in recorders:
        alike[_form(recorder)].append(recorder)
    misses: dict[ExactDecodeRecorder, Tensor] = {}
    for group in alike.values():
        writers = [recorder.unwritten for recorder in group if recorder.unwritten is not None]
        if writers:
            _start(group, writers)
        misses |= dict(zip(group, _close(group), strict=True))
    return torch.stack([misses[recorder] for recorder in recorders])


def _form(recorder: ExactDecodeRecorder) -> tuple[Any, ...]:
    """Equal for blocks that can be closed in one call."""
    start, end, total = recorder.unwritten, recorder.to_close, recorder.total
    assert total is not None
    norm = None if start is None else start.norm
    settings = None if norm is None else (norm.eps, norm.cast_first, norm.scale_offset)
    if start is not None:
        parts, dtype = (start.h, start.plain, total), start.dtype
    else:
        assert end is not None
        parts, dtype = (end.base, end.gain, total), None
    kinds = [(x.shape, x.dtype, x.device) for x in parts]
    sums = recorder.residual is None, recorder.spec.residual_multiplier
    return (dtype, *kinds, settings, *sums)


def _start(recorders: Sequence[ExactDecodeRecorder], writers: Sequence[UnwrittenOutput]) -> None:
    """Keep the factors that exact writers start from, of alike blocks: of weight writers those of
    the direct update, of scale writers those of the stable one.
    """
    rows = recorders[0].rows
    h, y = (torch.stack(x)[:, rows:] for x in zip(*((x.h, x.plain) for x in writers), strict=True))
    target = torch.stack([recorder.writer_target() for recorder in recorders])
    norms = [x.norm for x in writers if x.norm is not None]
    if not norms:
        u, (v, inverse, _) = block_math.weight_update(target, h, torch.float64)
        gains = block_math.weight_gain(h, v)
        for recorder, writer, base, gain, *factors in zip(
            recorders, writers, y.double(), gains, u, v, inverse, strict=True
        ):
            recorder.keep_down(writer.layer, *factors)
            recorder.postpone(base, gain, writer.layer, "u")
        return
    first, scales, dtype = norms[0], torch.stack([norm.scale for norm in norms]), writers[0].dtype
    scales = scales[:, None, None].expand(y.shape)
    u, scales, status = block_math.stable_scale(target, scales, y, first.eps)
    v, inverse, _ = block_math.read_direction(h)
    u = block_math.move_off_zero(u, v, y, h, dtype)
    gains = first.normalize(block_math.add_rank_one(y, h, u, v, dtype))
    for recorder, writer, norm, state, new_scale, gain, *factors in zip(
        recorders, writers, norms, status, scales, gains, u, v, inverse, strict=True
    ):
        recorder.note(BlockDiagnostics.largest, "status", state)
        recorder.keep_down(writer.layer, *factors)
        recorder.keep(norm, new_scale=new_scale)
        recorder.postpone(torch.zeros_like(gain), gain, norm, "new_scale")


def _close(alike: Sequence[ExactDecodeRecorder]) -> Tensor:
    """Choose the exact factors of blocks of one form. Returns the elements that each misses, (L,
    B).
    """

    def stacked(parts: Iterable[Tensor | None]) -> Tensor:
        return torch.stack([part for part in parts if part is not None])

    writers = [recorder.to_close for recorder in alike if recorder.to_close is not None]
    target, residual = stacked(recorder.total for recorder in alike).chunk(2, 1)
    if alike[0].residual is not None:
        residual = stacked(recorder.residual for recorder in alike)
    closed = block_math.close(
        target=target,
        residual=residual,
        base=stacked(part.base for part in writers),
        gain=stacked(part.gain for part in writers),
        started_from=stacked(part.factor for part in writers),
        branch=alike[0].spec.residual_multiplier,
    )
    for recorder, *parts in zip(alike, closed.factor, closed.misses, residual, strict=True):
        recorder.keep_closed(*parts)
    return closed.misses.squeeze(-1)
