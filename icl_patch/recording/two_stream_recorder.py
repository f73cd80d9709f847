"""Recording with both streams in one batch: rows [:B] with the context, rows [B:] without it."""

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.patched_module import like_rows_of, rows_of
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations
from icl_patch.recording.block_recorder import BlockRecorder, same_place


class TwoStreamRecorder(BlockRecorder):
    """Compares the rows with the context with the rows without it, module by module."""

    def __init__(self, block: AttachedBlock, update: str, valid: Tensor | None) -> None:
        super().__init__(block, update, valid, BlockActivations())
        # of readers that were recorded with one before them: the input, y and u
        self._recorded: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both streams, (B, T, ·) each."""
        x = x.reshape(-1, self.shape[1], x.shape[-1])
        batch = x.shape[0] // 2
        return x[:batch], x[batch:]

    def context_output(self, _name: str, output: Tensor | None) -> Tensor:
        """That of the rows with the context."""
        assert output is not None
        return output

    def context_written(self, output: Tensor | None, dtype: torch.dtype) -> Tensor:
        """That of the rows with the context."""
        assert output is not None
        self.context.written = output.to(dtype)
        return output

    def reader(self, name: str, layer: PatchedLinear, z: Tensor) -> Tensor:
        """Both streams' outputs in one product, which reads W once."""
        linear = layer.linear_map(z)
        if linear is None:
            return super().reader(name, layer, z)
        rows = rows_of(z)
        self.direction_of(rows)
        known = self._recorded.pop(name, None)
        if known is None or not same_place(known[0], z):
            known = self._record_from(name, linear, z, rows)
        _, output, u = known
        self.keep_pair(name, layer, output, self.unflat(u))
        return like_rows_of(z, output)

    def keep_pair(self, name: str, layer: PatchedLinear, pair: Tensor, u: Tensor) -> None:
        """:meth:`keep_reader` for both streams' outputs, rows (2M, N)."""
        y_ctx, patched = self.split(pair)
        self.keep_reader(name, layer, y_ctx, patched, u)

    def _record_from(
        self, name: str, linear: tuple[Tensor, Tensor | None], z: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """z, and y and u of reader ``name``; ``rows`` is z as rows. In Triton's kernels other
        readers of z that come after it are recorded with it, and kept until they are called.
        """
        direction, apart = self._flat_direction, self.spec.separately_normed
        assert direction is not None
        if not ops.has_triton(z.device.type):
            return (z, *ops.record_linear(rows, *linear, direction=direction)[:2])
        maps = {name: linear}
        names = list(self.block.readers)
        for other in names[names.index(name) + 1 :]:
            layer = self.block.readers[other]
            further = layer.linear_map(z)
            if type(layer) is PatchedLinear and further and not {name, other} & {*apart}:
                maps[other] = further
        recorded = ops.record_linears(rows, list(maps.values()), direction=direction)
        self._recorded = {of: (z, *got) for of, got in zip(maps, recorded, strict=True)}
        return self._recorded.pop(name)

    def keep_reader(
        self, name: str, layer: PatchedLinear, reference: Tensor, patched: Tensor, u: Tensor
    ) -> None:
        """Keep a reader's factors, and its output with the context."""
        self.context.readers[name] = reference
        super().keep_reader(name, layer, reference, patched, u)

    def read_direction(self, z: Tensor) -> ops.Direction:
        """Of the rows without the context, (M, K)."""
        return ops.read_direction(rows_of(z)[self.rows :])

    def on_end(self, total: Tensor) -> None:
        """Keep the block's output with the context."""
        self.context.output = self.split(total)[0]
