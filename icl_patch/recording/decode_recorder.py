"""Recording a decode step: one token a row, both streams, nothing that waits for the device.

**Exact.** In the model's own arithmetic an exact step takes two passes, because a product rounds a
row differently in a batch of 2B rows than in one of B. In the batch-invariant arithmetic
(:mod:`icl_patch.invariance.arithmetic`) it rounds alike. The context stream runs through the block
with all its roundings. The reduced stream stops at the writer; the factor is chosen so that the
rounded sum of the reduced stream equals the context stream's. So both streams leave a block with
the same bits, and only one of them continues.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.layers.device_hooks import weight_of
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.patched_module import like_rows_of, rows_of
from icl_patch.layers.rms_norm import PatchedRMSNorm
from icl_patch.models.block_spec import Writer
from icl_patch.models.trace import first_tensor
from icl_patch.recording import block_math
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations
from icl_patch.recording.block_recorder import Arguments, BlockRecorder
from icl_patch.recording.diagnostics import BlockDiagnostics, Note


@dataclass(eq=False)
class WriterToStart:
    """A writer that gets its factors later: a stable one at the norm that reads its output, an
    exact one after the pass. Then it is a
    :class:`~icl_patch.recording.block_recorder.WriterToClose`.

    Attributes:
        layer, h, y: the output matrix, and its input (2B, 1, K) and plain output (2B, 1, d) of both
            streams.
        dtype: of its output.
        norm: the norm that reads the output, of a scale writer.
    """

    layer: PatchedLinear
    h: Tensor
    y: Tensor
    dtype: torch.dtype
    norm: PatchedRMSNorm | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """Writers with equal forms can get their factors in one call."""
        shapes = self.h.shape, self.y.shape, self.h.dtype, self.y.dtype, self.dtype
        norm = self.norm
        return (*shapes, *(() if norm is None else (norm.eps, norm.cast_first, norm.scale_offset)))


class DecodeRecorder(BlockRecorder):
    """Compares the rows with the context, [:B], with the rows without it, [B:], module by module;
    its notes become diagnostics when they are used.

    Args:
        block, update: as for :class:`BlockRecorder`.
        patch_index: (2M,) int64, the patch of each row: -1 for the M rows with the context, then
            0, 1, …
        receives_norm_input: whether the norm before the MLP calls ``on_norm_pair``, in place of
            a hook on the residual stream.
    """

    def __init__(
        self,
        block: AttachedBlock,
        update: str,
        patch_index: Tensor,
        *,
        receives_norm_input: bool = False,
    ) -> None:
        super().__init__(block, update, None, BlockActivations())
        self.notes: list[Note] = []
        self.patch_index, self.shape = patch_index.to(block.device), (len(patch_index) // 2, 1)
        self.receives_norm_input = receives_norm_input

    to_start: WriterToStart | None = None

    def hook(self, stack: ExitStack) -> None:
        """See the residual stream: through the norm before the MLP, if it gives both streams."""
        if self.receives_norm_input:
            self.block.on_norm_pair = self.on_norm_pair
        else:
            self.block.hook_residual(stack, self.on_residual)

    def on_norm_pair(self, pair: ops.NormPair, _x: Tensor) -> None:
        """Take delta and the direction of z from the norm before the MLP."""
        self.delta = self.unflat(pair.delta)
        self.set_direction(pair.z_pair, pair.direction)

    def note(
        self, method: Callable[[BlockDiagnostics, *Arguments], None], *arguments: *Arguments
    ) -> None:
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
        self.keep_pair(name, layer, pair, self.unflat(u))
        return like_rows_of(z, pair)

    def keep_pair(self, name: str, layer: PatchedLinear, pair: Tensor, u: Tensor) -> None:
        """Keep a reader's factors, and both streams' outputs (2B, N)."""
        self.keep_factors(name, layer, u)
        self.note(BlockDiagnostics.reader_pair, pair, u)

    def start_later(self, layer: PatchedLinear, h: Tensor) -> Tensor:
        """The plain output of an output matrix, whose factors are computed later."""
        plain, dtype = layer.unpatched_output(h, self.rows)
        h, y = (x.reshape(-1, 1, x.shape[-1]) for x in (h, plain))
        self.to_start = WriterToStart(layer, h, y, dtype)
        return plain

    def keep_stable(
        self,
        norm: PatchedRMSNorm,
        u: Tensor,
        v: Tensor,
        inverse: Tensor,
        status: Tensor,
        new_scale: Tensor,
    ) -> None:
        """Keep the factors (B, 1, ·) of a scale writer and its matrix."""
        assert self.to_start is not None
        self.note(BlockDiagnostics.inversion, status)
        self.refuse_zero(inverse, u)
        self.keep(self.to_start.layer, u=u, v=v)
        self.keep(norm, new_scale=new_scale)


class InexactDecodeRecorder(DecodeRecorder):
    """The recorder of a step of the direct or stable update."""

    def down(self, layer: PatchedLinear, h: Tensor) -> Tensor:
        """The output matrix's output; a weight writer's in one product, which reads W once. The
        plain output where :meth:`norm` computes all that is behind it.
        """
        if self._ends_in_norm(layer, h):
            return self.start_later(layer, h)
        linear = layer.linear_map(h)
        if self.spec.writer is not Writer.WEIGHT or self.spec.mixer or linear is None:
            return super().down(layer, h)
        rows, target = rows_of(h), self.writer_target()
        v, inverse, _ = self.read_direction(rows)
        # of rank 1, a patch for each row
        known = ops.Direction(self.unflat(v), self.unflat(inverse))
        u, (v, inverse, _) = block_math.weight_update(target, rows[self.rows :], direction=known)
        self.keep(layer, u=u, v=v)
        self.refuse_zero(inverse, u)
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
        if (down := self.to_start) is None:
            return super().norm(layer, x)
        found = ops.record_norm(
            rows_of(down.y),
            rows_of(down.h)[self.rows :],
            rows_of(self.writer_target()),
            weight_of(layer.base_layer),
            layer.eps,
            out_dtype=down.dtype,
            scale_offset=layer.scale_offset,
            cast_first=layer.cast_first,
        )
        parts = found.u, *found.direction[:2], found.status, found.new_scale
        self.keep_stable(layer, *map(self.unflat, parts))
        return like_rows_of(x, found.y_pair)


class ExactDecodeRecorder(DecodeRecorder):
    """The recorder of an exact step: :func:`close_blocks` chooses the factor after the pass.

    Args:
        writer_first: whether a parallel block adds its writer's output to one of its other terms
            before it adds these to each other.
        arguments, options: those of :class:`DecodeRecorder`.
    """

    _beside: Tensor | None = None  # (B, 1, d), what a mixture adds to its writer's output
    total: Tensor | None = None  # (2B, 1, d), the block's sum of both streams
    # (B, 1, d), all that the block adds to its writer's output, if it is not the reduced sum
    residual: Tensor | None = None

    def __init__(self, *arguments: Any, writer_first: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._writer_first = writer_first and self.spec.parallel

    def hook(self, stack: ExitStack) -> None:
        """See the residual stream, the block's sum, and a mixture's further terms."""
        if self.spec.ends_in_its_sum:  # the block's forward reports it
            self.block.on_sum = self.on_end
        else:
            self.block.hook_end(stack, self.on_inner_sum, first=True)
        if self.block.mixture is not None:
            self.block.hook(stack, self.block.mixture.register_forward_hook, self.on_mixture)
        super().hook(stack)

    def on_norm_pair(self, pair: ops.NormPair, x: Tensor) -> None:
        """Take the residual stream too: a copy, because some models add to the tensor itself."""
        super().on_norm_pair(pair, x)
        x_ctx, x = self.split(x)
        self.context.hidden = x_ctx.to(pair.delta.dtype, copy=True)
        if self.block.mixture is not None:
            self._residuals = [(self.context.hidden, x.to(pair.delta.dtype, copy=True))]

    def keep_pair(self, name: str, layer: PatchedLinear, pair: Tensor, u: Tensor) -> None:
        """Keep a reader's factors, and its output with the context, which a miss needs."""
        super().keep_pair(name, layer, pair, u)
        self.context.readers[name] = self.unflat(pair[: self.rows])

    def down(self, layer: PatchedLinear, h: Tensor) -> Tensor:
        """The output matrix's output with the context, and 0 for the rows without it, unless a norm
        reads it.
        """
        spec = self.spec
        starts_later = spec.writer is Writer.WEIGHT and not spec.mixer
        if spec.writer is Writer.SCALE and spec.addend is None:
            starts_later = layer.group is None
        if not starts_later or self.delta is None:
            return super().down(layer, h)
        plain = self.start_later(layer, h)  # of alike blocks at once
        assert self.to_start is not None
        y_ctx, y = (part.to(self.to_start.dtype) for part in self.split(plain))
        return self.join(y_ctx, torch.zeros_like(y), plain)

    def norm(self, layer: PatchedRMSNorm, x: Tensor) -> Tensor:
        """The scale writer's output with the context, and 0 for the rows without it."""
        if self.to_start is None:
            return super().norm(layer, x)
        self.to_start.norm = layer
        return self._with_context_alone(layer, x)

    def written(self, _layer: PatchedLinear, _h: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        """0: the factor is chosen after the pass."""
        return torch.zeros_like(y, dtype=dtype)

    def on_mixture(self, _module: Any, _args: Any, output: Any) -> None:
        """Keep a mixture's further terms for the rows without the context. If its writer is routed,
        they come from shared experts, else from routed ones.
        """
        found = first_tensor(output)
        assert found is not None
        self._beside = self.split(found)[1]

    def _apply_new_scale(self, layer: PatchedRMSNorm, x: Tensor, _new_scale: Tensor) -> Tensor:
        return self._with_context_alone(layer, x)

    def _with_context_alone(self, layer: PatchedRMSNorm, x: Tensor) -> Tensor:
        """The norm's output with the context, and 0 for the rows without it."""
        with_context = layer.base_layer(self.split(x)[0])
        return self.join(with_context, torch.zeros_like(with_context), x)

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
        if beside is not None or self._writer_first:
            # the model has rounded the sum of these terms; their replay adds them in fp64
            self.residual = reduce(torch.add, [part.double() for _, part in self._residuals])
        if self.residual is not None and beside is not None:
            self.residual = self.residual + self.spec.residual_multiplier * beside.double()


def close_blocks(recorders: Sequence[ExactDecodeRecorder]) -> Tensor:
    """Choose the exact factor of every block, alike blocks at once.

    Returns:
        The elements that each block misses, (L, B).
    """
    misses: list[Tensor] = []
    _start_together([recorder for recorder in recorders if recorder.to_start is not None])
    for _, group in groupby(recorders, _form):
        alike = list(group)
        residuals, closed = _closed(alike)
        for recorder, residual, part in zip(alike, residuals, closed, strict=True):
            recorder.keep_closed(part.factor, part.misses, residual)
            misses.append(part.misses.squeeze(1))
    return torch.stack(misses)


def _start_together(recorders: Sequence[ExactDecodeRecorder]) -> None:
    """Keep the factors that exact weight and scale writers start from, of alike blocks at once."""
    for _, group in groupby(recorders, lambda x: x.to_start and x.to_start.form):
        alike = list(group)
        writers = [recorder.to_start for recorder in alike if recorder.to_start is not None]
        both = zip(*((x.h, x.y) for x in writers), strict=True)
        h, y = (torch.stack(parts)[:, alike[0].rows :] for parts in both)
        target = torch.stack([recorder.writer_target() for recorder in alike])
        norms = [x.norm for x in writers if x.norm is not None]
        if norms:
            _start_scales(alike, norms, h, y, target)
            continue
        u, (v, inverse, _) = block_math.weight_update(target, h, torch.float64)
        parts = (y.double(), u, v, inverse, block_math.weight_gain(h, v))
        for recorder, writer, *factors in zip(alike, writers, *parts, strict=True):
            recorder.keep_written(writer.layer, *factors)


def _start_scales(
    recorders: Sequence[ExactDecodeRecorder],
    norms: Sequence[PatchedRMSNorm],
    h: Tensor,
    y: Tensor,
    target: Tensor,
) -> None:
    """Keep the stable update that exact scale writers start from.

    h (L, B, 1, K), y and target (L, B, 1, d): the input and plain output of every block's output
    matrix, and the change of its norm's output.
    """
    first, scales = norms[0], torch.stack([norm.scale for norm in norms])
    scale = scales[:, None, None].expand(y.shape)
    u, new_scale, status = block_math.stable_scale(target, scale, y, first.eps)
    v, inverse, _ = block_math.read_direction(h)
    assert recorders[0].to_start is not None
    dtype = recorders[0].to_start.dtype
    u = block_math.move_off_zero(u, v, y, h, dtype)
    gain = first.normalize(block_math.add_rank_one(y, h, u, v, dtype))
    parts = (u, v, inverse, status, new_scale)
    for recorder, norm, own, *factors in zip(recorders, norms, gain, *parts, strict=True):
        recorder.keep_stable(norm, *factors)
        recorder.postpone(torch.zeros_like(own), own, norm, "new_scale")


def _form(recorder: ExactDecodeRecorder) -> tuple[Any, ...]:
    """Equal for blocks that can be closed in one call."""
    writer = recorder.to_close
    assert writer is not None and recorder.total is not None
    shapes = (writer.base.shape, writer.gain.shape, recorder.total.shape)
    dtypes = recorder.total.dtype, recorder.residual is None
    return (*shapes, *dtypes, recorder.spec.residual_multiplier)


def _closed(alike: Sequence[ExactDecodeRecorder]) -> tuple[Tensor, list[block_math.Closed]]:
    """The residuals (L, B, 1, d) of blocks of one form, and
    :func:`icl_patch.recording.block_math.close` of these blocks.
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
    return residual, [block_math.Closed(*part) for part in zip(*closed, strict=True)]
