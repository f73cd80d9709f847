"""Recording a decode step: one token a row, both streams, nothing that waits for the device."""

from typing import ClassVar

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.patched_module import like_rows_of, rows_of
from icl_patch.layers.rms_norm import PatchedRMSNorm
from icl_patch.models.block_spec import Writer
from icl_patch.recording.attached_block import AttachedBlock
from icl_patch.recording.two_stream_recorder import TwoStreamRecorder


class DecodeRecorder(TwoStreamRecorder):
    """A two-stream recorder of one token a row; its diagnostics are resolved when they are used.

    Args:
        block, update: as for :class:`BlockRecorder`.
        patch_index: (2M,) int64, the patch of each row: -1 for the M rows with the context, then
            0, 1, …
        receives_norm_input: whether the norm before the MLP calls :meth:`on_norm_pair`, in place
            of a hook on the residual stream.
        for_inductor: whether the operations between the products are torch's own, each on both
            streams at once, so that a compiler can fuse them.
    """

    observes_block: ClassVar[bool] = False

    def __init__(
        self,
        block: AttachedBlock,
        update: str,
        patch_index: Tensor,
        *,
        receives_norm_input: bool = False,
        for_inductor: bool = False,
    ) -> None:
        super().__init__(block, update, valid=None)
        self.patch_index, self._rows = patch_index.to(block.device), len(patch_index) // 2
        self.receives_norm_input, self.for_inductor = receives_norm_input, for_inductor

    @property
    def shape(self) -> tuple[int, int]:
        """(B, 1)."""
        return self._rows, 1

    @property
    def rows(self) -> int:
        """M = B."""
        return self._rows

    def unflat(self, x: Tensor) -> Tensor:
        """Rows (B, ...) as (B, 1, ...)."""
        return x.unsqueeze(1)

    def on_residual(self, x: Tensor) -> None:
        """Take one term of the residual stream before the MLP."""
        if len(self.spec.residual) > 1:
            super().on_residual(x)
            return
        dtype = torch.promote_types(x.dtype, torch.float32)
        x_ctx, x = self.split(x)
        self.delta = x_ctx.to(dtype) - x.to(dtype)

    def on_norm_pair(self, pair: ops.NormPair) -> None:
        """Take delta and the direction of z from the norm before the MLP."""
        self.delta = self.unflat(pair.delta)
        self.set_direction(pair.z_pair, pair.direction)

    def read_direction(self, z: Tensor) -> ops.Direction:
        """Of the rows without the context, (M, K)."""
        if not self.for_inductor:
            return super().read_direction(z)
        v, inverse, coeff = ops.read_direction(rows_of(z), for_inductor=True)
        assert coeff is not None
        return ops.Direction(v[self.rows :], inverse[self.rows :], coeff[self.rows :])

    def keep_pair(self, name: str, layer: PatchedLinear, pair: Tensor, u: Tensor) -> None:
        """Keep a reader's factors, and both streams' outputs (2B, N)."""
        self.keep_factors(name, layer, u)
        self.diagnostics.reader_pair(pair, u)

    def down(self, layer: PatchedLinear, h: Tensor) -> Tensor:
        """The output matrix's output; a weight writer's in one product, which reads W once."""
        linear = layer.linear_map(h)
        if self.spec.writer is not Writer.WEIGHT or self.spec.mixer or linear is None:
            return super().down(layer, h)
        rows, target = rows_of(h), self.writer_target()
        v, inverse, _ = self.read_direction(rows)
        v = self.unflat(v)  # of rank 1, a patch for each row
        self.keep(layer, u=target, v=v)
        condition = f"the input h of {self.spec.down} is 0"
        self.diagnostics.refuse_at_zero(condition, self.unflat(inverse), target)
        weight, bias = linear
        output = ops.patched_linear(
            rows,
            weight,
            target,
            v,
            bias,
            index=self.patch_index,
            path=ops.product_path(rows, self.rows),
        )
        return like_rows_of(h, output)

    def _add_stable(
        self,
        layer: PatchedLinear,
        h: Tensor,
        y: Tensor,
        direction: ops.Direction,
        dtype: torch.dtype,
    ) -> Tensor:
        if not self.for_inductor:
            return super()._add_stable(layer, h, y, direction, dtype)
        u = self.kept(layer, "u")
        assert direction.coeff is not None and u is not None
        return (y + self.unflat(direction.coeff) * u).to(dtype)

    def _apply_new_scale(self, layer: PatchedRMSNorm, x: Tensor, new_scale: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return super()._apply_new_scale(layer, x, new_scale)
        if self.for_inductor:
            scale = layer.scale.to(new_scale.dtype).expand_as(new_scale)
            return layer.apply_scale(x, torch.cat([scale, new_scale]))
        x_ctx, x_own = self.split(x)
        patched = layer.in_one_launch(x_own, new_scale)
        return self.join(layer.in_one_launch(x_ctx), patched, x)
