"""Recording with both streams in one batch: rows [:B] with the context, rows [B:] without it."""

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.layers.linear import PatchedLinear
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations
from icl_patch.recording.block_recorder import BlockRecorder


class TwoStreamRecorder(BlockRecorder):
    """Compares the rows with the context with the rows without it, module by module."""

    def __init__(self, block: AttachedBlock, update: str, valid: Tensor | None) -> None:
        super().__init__(block, update, valid, BlockActivations())

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
        rows = z.reshape(-1, z.shape[-1])
        self.direction_of(rows)
        output, u, _ = ops.record_linear(rows, *linear, direction=self._flat_direction)
        y_ctx, patched = self.split(output)
        self.keep_reader(name, layer, y_ctx, patched, self.unflat(u))
        return output.reshape(*z.shape[:-1], output.shape[-1])

    def keep_reader(
        self, name: str, layer: PatchedLinear, reference: Tensor, patched: Tensor, u: Tensor
    ) -> None:
        """Keep a reader's factors, and its output with the context."""
        self.context.readers[name] = reference
        super().keep_reader(name, layer, reference, patched, u)

    def read_direction(self, z: Tensor) -> ops.Direction:
        """Of the rows without the context, (M, K)."""
        return ops.read_direction(z.reshape(-1, z.shape[-1])[self.rows :])

    def on_end(self, total: Tensor) -> None:
        """Keep the block's output with the context."""
        self.context.output = self.split(total)[0]
