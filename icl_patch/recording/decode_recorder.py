"""Recording a decode step: one token a row, both streams, nothing that waits for the device."""

from contextlib import ExitStack

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.layers.linear import PatchedLinear
from icl_patch.layers.patched_module import like_rows_of, rows_of
from icl_patch.layers.rms_norm import PatchedRMSNorm
from icl_patch.models.block_spec import Writer
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations
from icl_patch.recording.block_recorder import BlockRecorder, same_place


class DecodeRecorder(BlockRecorder):
    """Compares the rows with the context, [:B], with the rows without it, [B:], module by module;
    its diagnostics are resolved when they are used.

    Args:
        block, update: as for :class:`BlockRecorder`.
        patch_index: (2M,) int64, the patch of each row: -1 for the M rows with the context, then
            0, 1, …
        receives_norm_input: whether the norm before the MLP calls :meth:`on_norm_pair`, in place
            of a hook on the residual stream.
        for_inductor: whether the operations between the products are torch's own, each on both
            streams at once, so that a compiler can fuse them.
    """

    def __init__(
        self,
        block: AttachedBlock,
        update: str,
        patch_index: Tensor,
        *,
        receives_norm_input: bool = False,
        for_inductor: bool = False,
    ) -> None:
        super().__init__(block, update, None, BlockActivations())
        # of readers that were recorded with one before them: the input, y and u
        self._recorded: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self.patch_index, self._rows = patch_index.to(block.device), len(patch_index) // 2
        self.receives_norm_input, self.for_inductor = receives_norm_input, for_inductor

    def hook(self, stack: ExitStack) -> None:
        """See the residual stream: through the norm before the MLP, if it gives both streams."""
        if self.receives_norm_input:
            self.block.on_norm_pair = self.on_norm_pair
        else:
            super().hook(stack)

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

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both streams, (B, 1, ·) each."""
        x = x.reshape(-1, 1, x.shape[-1])
        return x[: self._rows], x[self._rows :]

    def context_output(self, _name: str, output: Tensor | None) -> Tensor:
        """That of the rows with the context."""
        assert output is not None
        return output

    def context_written(self, output: Tensor | None, _dtype: torch.dtype) -> Tensor:
        """That of the rows with the context."""
        assert output is not None
        return output

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
            return ops.read_direction(rows_of(z)[self.rows :])
        v, inverse, coeff = ops.read_direction(rows_of(z), for_inductor=True)
        assert coeff is not None
        return ops.Direction(v[self.rows :], inverse[self.rows :], coeff[self.rows :])

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
