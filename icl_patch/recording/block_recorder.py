"""BlockRecorder: computes one block's factors from the activations that pass through the block.

A pass lets the block's patched modules record; each module then hands its input to the
recorder, which computes and keeps the module's factors and returns the patched output. In a closing
pass the rows without the context run alone, in the shapes of the replay, against activations that
an earlier pass of the unmodified model left. A decode step runs the rows with the context in the
same batch (:class:`~icl_patch.recording.decode_recorder.DecodeRecorder`).

Shapes: B rows, T tokens, d residual width; M = B·T rows of a matrix product.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.device_hooks import weight_of
from icl_patch.layers.linear import PatchedLinear, add_bias_change
from icl_patch.layers.patched_module import PatchedModule
from icl_patch.layers.rms_norm import PatchedRMSNorm
from icl_patch.layers.router import PatchedRouter
from icl_patch.models.block_spec import Writer
from icl_patch.recording import block_math
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations, Factors
from icl_patch.recording.diagnostics import BlockDiagnostics
from icl_patch.recording.memory import same_place


class WriterToClose(NamedTuple):
    """An exact writer that is still to be closed: its fp64 output is ``base + factor · gain``, with
    the factor that it starts from.
    """

    base: Tensor
    gain: Tensor
    factor: Tensor
    layer: PatchedModule  # has the factor, under this name
    name: str


class BlockRecorder:
    """Computes one block's factors and applies them to the rows without the context.

    It chooses an exact update's factor at the block's end.

    Args:
        block: the block.
        update: ``"direct"``, ``"stable"`` or ``"exact"``.
        valid: (B, T) bool, the columns that hold kept tokens. None in a decode step, where every
            row has one.
        context: the block's activations with the context: given, or collected during the pass.
    """

    diagnostics: BlockDiagnostics

    def __init__(
        self, block: AttachedBlock, update: str, valid: Tensor | None, context: BlockActivations
    ) -> None:
        self.block, self.spec, self.update = block, block.spec, update
        self.valid: Tensor | None = None
        if valid is not None:
            self.valid, self.shape = valid.to(block.device), (len(valid), valid.shape[1])  # (B, T)
            self.diagnostics = BlockDiagnostics.of(block.path, self.valid)
        self.context = context
        self.exact = update == "exact"
        self.to_close: WriterToClose | None = None  # of an exact writer
        self.delta: Tensor | None = None  # (B, T, d) hidden_ctx - hidden
        self._read_input: Tensor | None = None  # z, which has these directions
        self.direction: ops.Direction | None = None  # (B, T, K)
        self.row_direction: ops.Direction | None = None  # (M, K)
        self._residuals: list[Tensor] = []  # the terms of the residual stream, of all rows
        self._stable_scale: Tensor | None = None
        self._inner_scale: Tensor | None = None
        self.addend: Tensor | None = None  # the other term of the sum that the block's norm reads
        self._factors: dict[tuple[PatchedModule, str], Tensor] = {}

    def hook(self, stack: ExitStack) -> None:
        """See the block's residual stream and its end, until ``stack`` is closed."""
        self.block.hook_end(stack, self.on_end, first=True)
        if self.exact:
            self.block.keep_unrounded(stack)
        self.block.hook_residual(stack, self.on_residual)

    def note(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method of the block's diagnostics."""
        method(self.diagnostics, *arguments)

    def refuse(self, condition: str, gain: Tensor, change: Tensor, side: str = "output") -> None:
        """Call :meth:`BlockDiagnostics.refuse` of the block's diagnostics."""
        self.note(BlockDiagnostics.refuse, condition, gain, change, side)

    # -- factors

    def keep(self, layer: PatchedModule, **factors: Tensor | None) -> None:
        """Keep factors of a module under the names of its attributes that apply them."""
        for name, factor in factors.items():
            if factor is not None:
                self._factors[layer, name] = factor

    @property
    def factors(self) -> Factors:
        """The block's factors by name, (rows, columns, ...)."""
        kept, places = self._factors, self.block.factor_places
        return {name: kept[layer, part] for name, layer, part in places if (layer, part) in kept}

    # -- the two streams

    def split(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Both streams of a module's rows of any shape, each (B, T, ·); None for a stream that is
        not in the batch.
        """
        return None, x.reshape(-1, self.shape[1], x.shape[-1])

    @property
    def rows(self) -> int:
        """M = B · T."""
        return self.shape[0] * self.shape[1]

    @staticmethod
    def join(x_ctx: Tensor | None, x: Tensor, like: Tensor) -> Tensor:
        """Both streams in the leading dimensions of the module's input ``like``."""
        joined = x if x_ctx is None else torch.cat([x_ctx.to(x.dtype), x])
        return joined.reshape(*like.shape[:-1], x.shape[-1])

    def unflat(self, x: Tensor) -> Tensor:
        """Rows (M, ...) as (B, T, ...)."""
        return x.reshape(*self.shape, *x.shape[1:])

    def fill_padding(self, x: Tensor, value: Tensor | float = 0) -> Tensor:
        """x (B, T, ...) with ``value`` in the columns of padding."""
        if self.valid is None:
            return x
        return torch.where(self.valid.reshape(*self.valid.shape, *[1] * (x.dim() - 2)), x, value)

    # -- the residual stream

    def on_residual(self, x: Tensor) -> None:
        """Take one term of the residual stream before the MLP."""
        self._residuals.append(x.to(torch.promote_types(x.dtype, torch.float32), copy=True))
        if len(self._residuals) < len(self.spec.residual):
            return
        hidden_ctx, hidden = self.split(reduce(torch.add, self._residuals))
        if hidden_ctx is not None:
            self.context.hidden = hidden_ctx
        assert self.context.hidden is not None
        self.delta = self.fill_padding(block_math.context_change(self.context.hidden, hidden))

    def writer_target(self) -> Tensor:
        """The change of the writer's output, (B, T, d)."""
        if self.delta is None:
            raise UnsupportedModelError(
                f"{self.block.path}: its MLP ends before its residual stream is known"
            )
        if self.spec.residual_multiplier == 0:
            zero = torch.zeros_like(self.delta)
            self.refuse("the factor of the block's branch is 0", zero, self.delta)
            return zero
        factor, multiplier = self.spec.residual_factor, self.spec.residual_multiplier
        name = self.spec.residual_weight
        weight = None if name is None else weight_of(self.block.module, name)
        return block_math.writer_target(self.delta, factor, multiplier, weight)

    # -- readers

    def reader(self, name: str, layer: PatchedLinear, z: Tensor) -> Tensor:
        """A reader's output, with ``u = W z_ctx - W z`` and ``v = z / ‖z‖²``."""
        return self._record_reader(name, layer, z, *layer.unpatched_output(z, self.rows))

    def router(self, name: str, layer: PatchedRouter, z: Tensor, *others: Any) -> Any:
        """A router's outputs, with its logits changed as a reader's output is."""
        return layer.with_logits(
            z, lambda logits: self._record_reader(name, layer, z, logits, logits.dtype), *others
        )

    def _record_reader(
        self, name: str, layer: PatchedLinear, z: Tensor, output: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """A reader's patched output in ``dtype``, from its unpatched ``output``."""
        y_ctx, y = self.split(output)
        reference = self.context.readers[name] if y_ctx is None else y_ctx
        u = self.fill_padding(block_math.reader_update(reference, y))
        v = self.direction_of(z).v
        patched = block_math.add_rank_one(y, self.split(z)[1], u, v, dtype)
        self.keep_factors(name, layer, u)
        reference = reference.to(dtype)
        if y_ctx is not None and self.exact:
            self.context.readers[name] = reference  # which a miss needs
        self.note(BlockDiagnostics.reader, patched, reference, u)
        return self.join(y_ctx, patched, output)

    def keep_factors(self, name: str, layer: PatchedLinear, u: Tensor) -> None:
        """Keep a reader's factors: u (B, T, N), 0 in columns of padding, and the direction."""
        assert self.direction is not None
        v, inverse, _ = self.direction
        self.keep(layer, u=u, v=v)
        self.refuse(f"the input z of {name} is 0", inverse, u, "input")

    def direction_of(self, z: Tensor) -> ops.Direction:
        """The direction v (B, T, K) of the reduced rows of z, computed once a block."""
        if self._read_input is None or not same_place(self._read_input, z):
            self.set_direction(z, self.read_direction(z))
        assert self.direction is not None
        return self.direction

    def read_direction(self, z: Tensor) -> ops.Direction:
        """The direction of the reduced rows of z, as rows (M, K)."""
        return block_math.read_direction(self.split(z)[1].reshape(-1, z.shape[-1]))

    def set_direction(self, z: Tensor, flat: ops.Direction) -> None:
        """Keep the direction ``flat`` (M, K) of the input z that the readers share."""
        v, inverse = self.fill_padding(self.unflat(flat.v)), self.unflat(flat.inverse_norm2)
        self._read_input, self.direction, self.row_direction = z, ops.Direction(v, inverse), flat

    # -- the writer

    def down(self, layer: PatchedLinear, h: Tensor) -> Tensor:
        """The output matrix's output, with its share of the update."""
        if self.spec.writer is Writer.SCALE and self.update == "direct":
            plain: Tensor = layer.base_layer(h)
            return plain
        plain, dtype = layer.unpatched_output(h, self.rows)
        (y_ctx, y), (_, h) = self.split(plain), self.split(h)
        if self.spec.writer is Writer.SCALE:
            return self.join(y_ctx, self._stable_down(layer, h, y, dtype), plain)
        target, exact = self.writer_target(), torch.float64 if self.exact else None
        if self.spec.mixer:
            if y_ctx is not None:
                self.context.written = y_ctx.to(dtype)
            reference = self.context.written if y_ctx is None else y_ctx
            assert reference is not None
            target = target + self.fill_padding(block_math.reader_update(reference, y))
        if self.spec.writer is Writer.BIAS:
            u, v, name = block_math.bias_update(target, exact), None, "bias_change"
            self.keep(layer, bias_change=u)
        else:
            (u, v), name = self._keep_rank_one(layer, h, target, exact), "u"
        if exact:
            gain = torch.ones_like(u[..., :1]) if v is None else block_math.weight_gain(h, v)
            self.postpone(y, gain, layer, name)
        if exact and y_ctx is not None:  # the factor is chosen after the pass
            own = torch.zeros_like(y, dtype=dtype)
        elif v is None:
            own = add_bias_change(y, u, exact or dtype)
        else:
            own = add_to_writer(layer, y, h, u, v, exact or dtype)
        return self.join(y_ctx, own, plain)

    def _keep_rank_one(
        self, layer: PatchedLinear, h: Tensor, change: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keep and return u and v, (B, T, d) and (B, T, K), that change the output by ``change``.

        Where each rank has a part of h, v is h itself: the norm takes all parts, which come
        together when the patch is assembled
        (:func:`icl_patch.recording.patch_assembly.layers_of_all`).
        """
        u, (v, inverse, _) = block_math.weight_update(change, h, dtype)
        v = self.fill_padding(v if layer.group is None else h.to(v.dtype))
        self.keep_down(layer, u, v, inverse)
        return u, v

    def keep_down(self, layer: PatchedLinear, u: Tensor, v: Tensor, inverse: Tensor) -> None:
        """Keep the change of the output matrix. Note tokens with h = 0, for which every matrix
        gives 0: there ``inverse``, 1/‖h‖², is 0.
        """
        weight = self.spec.writer is Writer.WEIGHT
        cure = ": give it a bias of zeros before attaching, which is changed then" if weight else ""
        self.refuse(f"the input h of {self.spec.down} is 0{cure}", inverse, u)
        self.keep(layer, u=u, v=v)

    def _stable_down(
        self, layer: PatchedLinear, h: Tensor, y: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """The output matrix's share of a stable update: ``y + u (v·h)``, y (B, T, N)."""
        u, v = self._keep_rank_one(layer, h, self.fill_padding(self._invert_norm(y)))
        if self.exact:
            u = self.fill_padding(block_math.move_off_zero(u, v, y, h, dtype, self.addend))
            self.keep(layer, u=u)
        return add_to_writer(layer, y, h, u, v, dtype)

    def _invert_norm(self, hidden_down: Tensor) -> Tensor:
        """The change ``h_target - h_down`` (B, T, d) that the stable update asks of the norm's
        input, which is ``h_down`` and the addend, if there is one. The norm's scale m' is kept.
        """
        norm = self.block.post_norm
        assert norm is not None
        if self.addend is not None:
            hidden_down = hidden_down + self.addend
        u, self._stable_scale = self._inverted(self.writer_target(), norm, hidden_down)
        return u

    def _inverted(self, delta: Tensor, norm: PatchedRMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """The stable update u and m' (B, T, d) of a norm's input x. The worse status is noted."""
        u, new_scale, status = block_math.stable_scale(delta, norm.scale, x, norm.eps)
        self.note(BlockDiagnostics.largest, "status", status)
        return u, new_scale

    def norm(self, layer: PatchedRMSNorm, x: Tensor) -> Tensor:
        """The scale writer's output ``m' ⊙ Norm(x)``, with the scale of the update."""
        return self._apply_new_scale(layer, x, self.choose_scale(layer, x))

    def choose_scale(self, layer: PatchedRMSNorm, x: Tensor) -> Tensor:
        """Choose and keep the scale writer's m' (B, T, d)."""
        _, x_reduced = self.split(x)
        if self.update == "direct":
            target, normalized = self.writer_target(), layer.normalize(x_reduced)
            condition = f"the input of {self.spec.post_norm} is 0 where delta is not"
            self.refuse(condition, normalized, target)
            new_scale = block_math.direct_scale(target, normalized, layer.scale)
        else:
            assert self._stable_scale is not None
            # in fp32, as the norm computes; in fp64 where the exact factor starts from it
            new_scale = self._stable_scale if self.exact else self._stable_scale.float()
        new_scale = self._keep_scale(layer, new_scale)
        if self.exact:
            gain = layer.normalize(x_reduced)
            self.postpone(torch.zeros_like(gain), gain, layer, "new_scale")
        return new_scale

    def _keep_scale(self, layer: PatchedRMSNorm, new_scale: Tensor) -> Tensor:
        """Keep and return m' (B, T, d), with the norm's own scale in the columns of padding."""
        if self.valid is not None:
            new_scale = self.fill_padding(new_scale, layer.scale.to(new_scale.dtype))
        self.keep(layer, new_scale=new_scale)
        return new_scale

    def _apply_new_scale(self, layer: PatchedRMSNorm, x: Tensor, new_scale: Tensor) -> Tensor:
        """``m ⊙ Norm(x)`` for the rows with the context, ``m' ⊙ Norm(x)`` for the others."""
        x_ctx, x_reduced = self.split(x)
        with_context = None if x_ctx is None else layer.apply_scale(x_ctx, layer.scale)
        return self.join(with_context, layer.apply_scale(x_reduced, new_scale), x)

    # -- norms that read a sum

    def on_addend(self, output: Tensor) -> None:
        """Keep the term that is added to the writer's before the block's norm reads the sum."""
        self.addend = self.split(output)[1].clone()

    def invert_norms(self, written: Tensor) -> Tensor:
        """The change of the experts' output (B, T, d) that the stable update asks for.

        With an inner norm these are two nested updates. The block's norm reads ``addend + m₂ ⊙
        Norm(o)``. Its inversion asks for a change u of that sum, and u is the delta of the inner
        norm; the inversion of that one asks for a change of o.
        """
        inner = self.block.inner_norm
        hidden = written if inner is None else inner.apply_scale(written, inner.scale)
        u = self._invert_norm(hidden)
        if inner is not None:
            u, self._inner_scale = self._inverted(u, inner, written)
        return u

    def inner_norm(self, layer: PatchedRMSNorm, x: Tensor) -> Tensor:
        """The output of the experts' norm, with its share of the stable update."""
        if self.update == "direct":
            own: Tensor = layer.base_layer(x)
            return own
        assert self._inner_scale is not None and self.addend is not None
        new_scale = self._inner_scale.to(torch.promote_types(x.dtype, torch.float32))
        if self.exact:
            patched = layer.apply_scale(self.split(x)[1], new_scale)
            new_scale = block_math.scale_off_zero(new_scale, patched, self.addend)
        new_scale = self._keep_scale(layer, new_scale)
        return self._apply_new_scale(layer, x, new_scale)

    # -- the block's sum

    def postpone(self, base: Tensor, gain: Tensor, layer: PatchedModule, name: str) -> None:
        """Keep an exact writer's output ``base + factor · gain`` until its factor ``name`` of
        ``layer`` is chosen.
        """
        factor = self._factors[layer, name]
        self.to_close = WriterToClose(base.double(), gain.double(), factor, layer, name)

    def on_end(self, total: Tensor) -> Tensor | None:
        """Choose an exact writer's factor so that the rounded sum is the context's output."""
        target, writer, total = self.context.output, self.to_close, total.as_subclass(Tensor)
        assert target is not None
        if writer is None:
            return None
        if total.dtype != torch.float64:
            kind = self.spec.writer.value
            raise UnsupportedModelError(
                f"{self.block.path} rounds the output of its {kind} writer before its end"
            )
        multiplier, (_, total_own) = self.spec.residual_multiplier, self.split(total)
        base, gain, factor, *_ = writer
        written = block_math.written(base, gain, factor, multiplier)
        residual = total_own - written
        closed = block_math.close(target, residual, base, gain, factor, multiplier)
        self.keep_closed(self.fill_padding(closed.factor, factor), closed.misses, residual)
        # Padding continues as in the replay: the rows that an expert gets decide how its products
        # round.
        unpatched = block_math.round_sum(total_own, written, closed.output.dtype)
        return self.fill_padding(closed.output, unpatched).reshape(total.shape)

    def keep_closed(self, factor: Tensor, misses: Tensor, residual: Tensor) -> None:
        """Keep the factor that was chosen for a residual, with the elements that it misses."""
        assert self.to_close is not None
        base, gain, started_from, layer, name = self.to_close
        self.keep(layer, **{name: factor})
        branch = self.spec.residual_multiplier
        self.note(
            BlockDiagnostics.closing, misses, factor, residual, base, gain, started_from, branch
        )


def add_to_writer(
    layer: PatchedLinear, y: Tensor, h: Tensor, u: Tensor, v: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """``y + u (v·h)`` of a writer; each rank may have a part of its input. ``v = h / ‖h‖²``."""
    if layer.group is None:
        return block_math.add_rank_one(y, h, u, v, out_dtype)
    # v·h is 1, and its sum over the ranks would be one more message in every block
    return add_bias_change(y, u, out_dtype)
