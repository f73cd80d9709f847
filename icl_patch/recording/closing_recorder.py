"""Recording in the shapes of the replay: the rows without the context alone, after a pass of the
unmodified model has left the activations with the context.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from icl_patch.errors import UnsupportedModelError
from icl_patch.recording import updates
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations
from icl_patch.recording.block_recorder import BlockRecorder
from icl_patch.recording.diagnostics import BlockDiagnostics


class ClosingRecorder(BlockRecorder):
    """Compares with the activations with the context; chooses an exact update's factor at the end.

    Args:
        block, update: as for :class:`BlockRecorder`.
        valid: (B, T) bool, the columns that hold kept tokens.
        context: the block's activations with the context, of the same tokens.
    """

    def __init__(
        self, block: AttachedBlock, update: str, valid: Tensor, context: BlockActivations
    ) -> None:
        super().__init__(block, update, valid, context)
        self.diagnostics = BlockDiagnostics.of(block.block.path, valid.to(block.device))

    def note(self, name: str, *arguments: Any) -> None:
        """Call a method of the block's diagnostics."""
        getattr(self.diagnostics, name)(*arguments)

    def hook(self, stack: ExitStack) -> None:
        """See the block's residual stream and its end."""
        self.block.on_end(stack, self.on_end, first=True)
        if self.exact:
            self.block.keep_unrounded(stack)
        super().hook(stack)

    def split(self, x: Tensor) -> tuple[None, Tensor]:
        """The rows without the context, (B, T, ·)."""
        return None, x.reshape(-1, self.shape[1], x.shape[-1])

    def on_end(self, total: Tensor) -> Tensor | None:
        """Choose an exact writer's factor so that the rounded sum is the context's output."""
        target, loop, total = self.context.output, self.loop, total.as_subclass(Tensor)
        assert target is not None
        if loop is None:
            return None
        if total.dtype != torch.float64:
            writer = self.spec.writer.value
            raise UnsupportedModelError(
                f"{self.block.block.path} rounds the output of its {writer} writer before its end"
            )
        multiplier, (_, total_own) = self.spec.residual_multiplier, self.split(total)
        written = multiplier * (loop.base + loop.factor * loop.gain)
        closed = updates.close(
            target, total_own - written, loop.base, loop.gain, loop.factor, multiplier
        )
        factor = self.fill_padding(closed.factor, loop.padding)
        self.close_loop(factor, closed.misses, closed.correction)
        # Padding continues as in the replay: the rows that an expert gets decide how its products
        # round.
        unpatched = updates.round_sum(total_own, written, closed.output.dtype)
        return self.fill_padding(closed.output, unpatched).reshape(total.shape)
