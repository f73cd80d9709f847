"""Recording a patch: the factors of every block, computed from what passes through it.

A pass installs its hooks and modes on entry and takes them away on exit, whatever happens in
between.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.experts import PatchedScaledExperts
from icl_patch.layers.linear import PatchedLinear, add_bias_change
from icl_patch.layers.rms_norm import PatchedRMSNorm
from icl_patch.layers.router import PatchedRouter
from icl_patch.models.block_spec import Writer
from icl_patch.recording import updates
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations
from icl_patch.recording.diagnostics import BlockDiagnostics
from icl_patch.recording.expert_recorder import record_experts, record_scaled_experts


@dataclass(frozen=True)
class _Open:
    """An exact writer's loop, to be closed at the block's end: ``base + factor · gain`` was handed
    over in fp64.
    """

    base: Tensor
    gain: Tensor
    factor: Tensor
    holder: Any  # the module that holds the factor, and under what name
    name: str
    padding: Tensor | float  # the factor of columns that are no tokens


class BlockRecorder:
    """Computes one block's factors from what passes through it, and applies them on the way.

    The context stream's values come from the batch's first half (two streams in one pass) or, when
    ``tape`` is given, from an earlier pass of the untouched model over the same tokens.

    Args:
        block: the block.
        update: "direct", "stable" or "exact"; exact needs a tape.
        valid: (B, T) bool, the columns that are kept tokens.
        tape: the block's values with the context, or None.
        patches: (2M,) int64, in place of ``valid`` and ``tape`` in a decode step, where every row
            of the reduced stream gets a patch: -1 for the M rows of the context stream, then 0, 1,
            … The notes are worked out when someone asks, and the block's output is not kept.
        told: whether the norm before the MLP is going to say what it reads (:meth:`take`).
        for_inductor: whether what lies between the products is to be in torch's own operations,
            each of both streams at once, so that a compiler can fuse them; in a decode step.
    """

    def __init__(
        self,
        block: AttachedBlock,
        update: str,
        valid: Tensor | None = None,
        activations: BlockActivations | None = None,
        patches: Tensor | None = None,
        receives_norm_input: bool = False,
        for_inductor: bool = False,
    ) -> None:
        assert update != "exact" or activations is not None
        assert (valid is None) == (patches is not None) and not (
            activations is not None and valid is None
        )
        self.patches, self.receives_norm_input, self.for_inductor = (
            patches,
            receives_norm_input,
            for_inductor,
        )
        self.block, self.spec, self.update, self.valid, self.activations = (
            block,
            block.spec,
            update,
            valid,
            activations,
        )
        self.exact = update == "exact"
        self.seen = BlockActivations()
        self.diagnostics = BlockDiagnostics(block.block.path, valid)
        self._hidden: list[tuple[Tensor | None, Tensor]] = []
        self.delta: Tensor | None = None
        self.direction: tuple[Tensor, ops.Direction] | None = None
        self._flat: ops.Direction | None = None  # the same for rows (M, K)
        self._stable_scale: Tensor | None = None
        self._inner_scale: Tensor | None = None
        self._beside: Tensor | None = None
        self._open: _Open | None = None

    # -- the two streams

    def split(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Both streams of a module's rows, in any shape: each (B, T, ·)."""
        x = x.reshape(-1, self.shape[1], x.shape[-1])
        if self.activations is not None:
            return None, x
        batch = x.shape[0] // 2
        return x[:batch], x[batch:]

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        if self.valid is not None:
            return self.valid.shape[0], self.valid.shape[1]
        assert self.patches is not None
        return len(self.patches) // 2, 1

    @property
    def rows(self) -> int:
        """B · T."""
        return self.shape[0] * self.shape[1]

    @staticmethod
    def join(x_ctx: Tensor | None, x: Tensor, like: Tensor) -> Tensor:
        """Both streams in the leading dimensions that the module's input had."""
        joined = x if x_ctx is None else torch.cat([x_ctx.to(x.dtype), x])
        return joined.reshape(*like.shape[:-1], x.shape[-1])

    def zero_padding(self, x: Tensor) -> Tensor:
        """Factors (B, T, ...) with 0 in the columns that are no tokens."""
        return self.unless_padding(x, 0)

    def unless_padding(self, x: Tensor, otherwise: Tensor | float) -> Tensor:
        """x (B, T, ...) with something else in the columns that are no tokens."""
        if self.valid is None:
            return x
        return torch.where(
            self.valid.reshape(*self.valid.shape, *[1] * (x.dim() - 2)), x, otherwise
        )

    def open_loop(
        self, base: Tensor, gain: Tensor, holder: Any, name: str, padding: Tensor | float = 0.0
    ) -> None:
        """Hand over ``base + factor · gain`` in fp64 for :meth:`on_end` to choose the factor, which
        is ``holder``'s attribute ``name``.
        """
        self._open = _Open(
            base.double(), gain.double(), getattr(holder, name), holder, name, padding
        )

    # -- what is called as the block runs, in this order

    def on_start(self, _shape: Any) -> None:
        self._hidden.clear()
        self.delta = None

    def on_residual(self, x: Tensor) -> None:
        dtype = torch.promote_types(x.dtype, torch.float32)
        x_ctx, x = self.split(x)
        if self.valid is None and len(self.spec.residual) == 1:
            assert x_ctx is not None
            self.delta = x_ctx.to(dtype) - x.to(dtype)
            return
        self._hidden.append(
            (None if x_ctx is None else x_ctx.to(dtype, copy=True), x.to(dtype, copy=True))
        )
        if len(self._hidden) < len(self.spec.residual):
            return
        hidden = reduce(torch.add, [part for _, part in self._hidden])
        hidden_ctx = (
            self.activations.hidden
            if self.activations is not None
            else reduce(torch.add, [part for part, _ in self._hidden if part is not None])
        )
        assert hidden_ctx is not None
        self.seen = BlockActivations(hidden_ctx)
        self.delta = self.zero_padding(hidden_ctx - hidden)

    def wanted(self) -> Tensor:
        """What the writer has to add: ``delta / branch``."""
        if self.delta is None:
            raise UnsupportedModelError(
                f"{self.block.block.path}: its MLP ends before its residual stream is known"
            )
        if self.spec.residual_multiplier == 0:
            self.diagnostics.refuse(
                "the factor of the block's branch is 0",
                (self.delta != 0).any(-1),
                torch.ones_like(self.delta[..., 0], dtype=torch.bool),
            )
            return torch.zeros_like(self.delta)
        return (
            self.delta
            if self.spec.residual_multiplier == 1
            else self.delta / self.spec.residual_multiplier
        )

    def take(self, pair: ops.NormPair) -> None:
        """What the norm before the MLP has found of both streams, in a decode step."""
        self.delta = self.unflat(pair.delta)
        self._set_direction(pair.z_pair, pair.direction)

    def reader(self, name: str, layer: PatchedLinear, z: Tensor) -> Tensor:
        linear = layer.linear_map(z)
        if self.activations is not None or linear is None:
            return self._read(name, layer, z, *layer.plain(z, self.rows))
        rows = z.reshape(-1, z.shape[-1])
        direction = self.direction_of(rows)
        out, flat, _ = ops.record_linear(rows, *linear, direction=self._flat)
        u = self.unflat(flat)
        if self.patches is not None:
            layer.u, layer.v = u, direction.v
            self.diagnostics.refuse_at_zero(
                f"the input z of {name} is 0", direction.inverse_norm2, u, "input"
            )
            self.diagnostics.reader_pair(out, flat)
        else:
            y_ctx, patched = self.split(out)
            assert y_ctx is not None
            self._keep(name, layer, y_ctx, patched, u)
        return out.reshape(*z.shape[:-1], out.shape[-1])

    def router(self, name: str, layer: PatchedRouter, z: Tensor, *others: Any) -> Any:
        return layer.with_logits(
            z,
            lambda logits: self._read(name, layer, z, logits, logits.dtype).reshape(logits.shape),
            *others,
        )

    def _read(
        self, name: str, layer: PatchedLinear, z: Tensor, out: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """A reader's output in ``dtype`` with its change, which is computed here from what it is
        without: ``out``.
        """
        y_ctx, y = self.split(out)
        reference = y_ctx if self.activations is None else self.activations.readers[name]
        assert reference is not None
        u = self.zero_padding(updates.reader_update(reference, y))
        patched = _add(y, self.split(z)[1], u, self.direction_of(z).v, dtype)
        self._keep(name, layer, reference.to(dtype), patched, u)
        return self.join(y_ctx, patched, out)

    def _keep(
        self, name: str, layer: PatchedLinear, reference: Tensor, patched: Tensor, u: Tensor
    ) -> None:
        """A reader's factors, its output with the context, and how far the patched one is from
        it.
        """
        assert self.direction is not None
        self.seen.readers[name] = reference
        layer.u, layer.v = self.zero_padding(u), self.direction[1].v
        self.diagnostics.refuse_at_zero(
            f"the input z of {name} is 0", self.direction[1].inverse_norm2, layer.u, "input"
        )
        self.diagnostics.reader(patched, reference, u)

    def direction_of(self, z: Tensor) -> ops.Direction:
        """The direction of the reduced rows of the readers' common input, computed once a block: v
        (B, T, K).
        """
        if self.direction is None or not _same_place(self.direction[0], z):
            self._set_direction(z, self._read_direction(z))
        assert self.direction is not None
        return self.direction[1]

    def _read_direction(self, z: Tensor) -> ops.Direction:
        """:func:`icl_patch.ops.read_direction` of the reduced rows of what a module reads, as rows
        (M, K).
        """
        rows = z.reshape(-1, z.shape[-1])
        if self.for_inductor:
            v, inverse, coeff = ops.read_direction(rows, for_inductor=True)
            assert coeff is not None
            return ops.Direction(v[self.rows :], inverse[self.rows :], coeff[self.rows :])
        return ops.read_direction(rows if self.activations is not None else rows[self.rows :])

    def _set_direction(self, z: Tensor, flat: ops.Direction) -> None:
        v, inverse = self.zero_padding(self.unflat(flat.v)), self.unflat(flat.inverse_norm2)
        self.direction, self._flat = (
            (z, ops.Direction(v, inverse)),
            flat._replace(v=v.reshape(flat.v.shape)),
        )

    def unflat(self, x: Tensor) -> Tensor:
        """Rows (M, ...) as (B, T, ...)."""
        return x.reshape(*self.shape, *x.shape[1:])

    def down(self, layer: PatchedLinear, h: Tensor) -> Tensor:
        if self.spec.writer is Writer.SCALE and self.update == "direct":
            plain: Tensor = layer.base_layer(h)
            return plain
        linear = layer.linear_map(h)
        if (
            self.patches is not None
            and self.spec.writer is Writer.WEIGHT
            and not self.spec.mixer
            and linear is not None
        ):
            return self._write(layer, h, *linear)
        plain, dtype = layer.plain(h, self.rows)
        y_ctx, y = self.split(plain)
        if self.spec.writer is Writer.SCALE:
            return self.join(y_ctx, self._stable_down(layer, h, y, dtype), plain)
        wanted = self.wanted()
        if self.spec.mixer:
            reference = self.activations.written if self.activations is not None else y_ctx
            assert reference is not None
            self.seen.written = reference.to(dtype)
            wanted = wanted + self.zero_padding(updates.reader_update(reference, y))
        if self.exact:
            dtype = torch.float64
        if self.spec.writer is Writer.BIAS:
            layer.bias_change = wanted.double() if self.exact else wanted
            patched = add_bias_change(y, layer.bias_change, dtype)
            if self.exact:
                self.open_loop(y, torch.ones_like(wanted[..., :1]), layer, "bias_change")
        else:
            _, h_own = self.split(h)
            v, inverse, _ = ops.read_direction(h_own, dtype if self.exact else None)
            self.diagnostics.refuse_at_zero(
                f"the input h of {self.spec.down} is 0", inverse, wanted
            )
            layer.u, layer.v = wanted.to(v.dtype), self.zero_padding(v)
            patched = _add(y, h_own, layer.u, layer.v, dtype)
            if self.exact:
                self.open_loop(y, (h_own.double() * layer.v).sum(-1, keepdim=True), layer, "u")
        return self.join(y_ctx, patched, plain)

    def _write(
        self, layer: PatchedLinear, h: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """A weight writer's output for both streams, of which the reduced rows have a patch,
        reading W once.
        """
        rows, wanted = h.reshape(-1, h.shape[-1]), self.wanted()
        v, inverse, _ = self._read_direction(rows)
        layer.u, layer.v = wanted, self.unflat(v)
        self.diagnostics.refuse_at_zero(
            f"the input h of {self.spec.down} is 0", self.unflat(inverse), wanted
        )
        u, v = wanted.reshape(self.rows, 1, -1), v.unsqueeze(1)
        out = ops.patched_linear(
            rows, weight, u, v, bias, index=self.patches, path=ops.product_path(rows, self.rows)
        )
        return out.reshape(*h.shape[:-1], out.shape[-1])

    def _stable_down(
        self, layer: PatchedLinear, h: Tensor, y: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """The output matrix's share of a stable update, for what it reads and what it makes of the
        reduced rows, y (B, T, N).
        """
        direction = self._read_direction(h)
        u, v = self.zero_padding(self._invert_norm(y)), self.zero_padding(self.unflat(direction.v))
        self.diagnostics.refuse_at_zero(
            f"the input h of {self.spec.down} is 0", self.unflat(direction.inverse_norm2), u
        )
        _, h = self.split(h)
        if self.for_inductor:
            assert direction.coeff is not None
            layer.u, layer.v = u, v
            return (y + self.unflat(direction.coeff) * u).to(dtype)
        patched = _add(y, h, u, v, dtype)
        if self.exact:
            u = self.zero_padding(updates.off_zero(u, patched, y))
            patched = _add(y, h, u, v, dtype)
        layer.u, layer.v = u, v
        return patched

    def _invert_norm(self, hidden_down: Tensor) -> Tensor:
        """The stable update of the block's norm on ``hidden_down`` (B, T, d): what is to be added
        to that.
        """
        norm = self.block.post_norm
        assert norm is not None
        u, self._stable_scale = self._inverted(self.wanted(), norm, hidden_down)
        return u

    def _inverted(self, delta: Tensor, norm: PatchedRMSNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        """:func:`icl_patch.recording.updates.stable_scale` on (B, T, d): u and m'; the worse status
        is noted.
        """
        flat = [part.reshape(-1, part.shape[-1]) for part in (delta, x)]
        stable = updates.stable_scale(flat[0], norm.scale, flat[1], norm.eps)
        self.diagnostics.inversion(stable.status.reshape(self.shape))
        return stable.u.reshape(x.shape), stable.new_scale.reshape(x.shape)

    def on_beside(self, _module: Any, _args: Any, out: Tensor) -> None:
        """Keep what is added to the experts' norm before the block's norm reads it."""
        self._beside = self.split(out)[1].clone()

    def invert_norms(self, written: Tensor) -> Tensor:
        """What the experts have to add to their output (B, T, d): the stable update of the block's
        norm, by that of the experts' norm.

        The block's norm reads ``beside + m₂ ⊙ Norm(o)``. It asks for a change u of that sum, which
        is a delta for the norm inside.
        """
        inner = self.block.inner_norm
        assert inner is not None and self._beside is not None
        added = inner.apply_scale(written, inner.scale)
        u, self._inner_scale = self._inverted(
            self._invert_norm(self._beside + added), inner, written
        )
        return u

    def inner_norm(self, layer: PatchedRMSNorm, x: Tensor) -> Tensor:
        x_ctx, x_own = self.split(x)
        if self.update == "direct":
            made = layer.base_layer(x_own)
        else:
            assert self._inner_scale is not None and self._beside is not None
            new_scale = self._inner_scale.to(torch.promote_types(x.dtype, torch.float32))
            made = layer.apply_scale(x_own, new_scale)
            # through an exact 0 of the sum no scale of the block's norm can reach: any small number
            # will do instead
            cancelled = (self._beside + made == 0) & self.exact
            new_scale = torch.where(
                cancelled, new_scale * (1 + max(2.0**-12, 2 * torch.finfo(x.dtype).eps)), new_scale
            )
            layer.new_scale = self.unless_padding(new_scale, layer.scale.to(new_scale.dtype))
            made = layer.apply_scale(x_own, layer.new_scale)
        return self.join(None if x_ctx is None else layer.base_layer(x_ctx), made, x)

    def norm(self, layer: PatchedRMSNorm, x: Tensor) -> Tensor:
        x_ctx, x_own = self.split(x)
        if self.update == "direct":
            wanted, normalized = self.wanted(), layer.normalize(x_own)
            new_scale = updates.direct_scale(wanted, normalized, layer.scale)
            dead = normalized == 0
            self.diagnostics.refuse(
                f"the input of {self.spec.post_norm} is 0 where delta is not",
                (dead & (wanted != 0)).any(-1),
                dead.any(-1),
            )
        else:
            assert self._stable_scale is not None
            # as the norm computes
            new_scale = self._stable_scale if self.exact else self._stable_scale.float()
        layer.new_scale = (
            new_scale
            if self.valid is None
            else self.unless_padding(new_scale, layer.scale.to(new_scale.dtype))
        )
        if self.exact:
            normalized = layer.normalize(x_own)
            self.open_loop(
                torch.zeros_like(normalized), normalized, layer, "new_scale", layer.scale.double()
            )
        if self.patches is not None and x.dtype != torch.float64:
            assert x_ctx is not None
            if self.for_inductor:
                scales = torch.cat(
                    [
                        layer.scale.to(layer.new_scale.dtype).expand_as(layer.new_scale),
                        layer.new_scale,
                    ]
                )
                return layer.apply_scale(x, scales)
            return self.join(
                layer.in_one_launch(x_ctx), layer.in_one_launch(x_own, layer.new_scale), x
            )
        made = layer.apply_scale(x_own, layer.new_scale)
        return self.join(None if x_ctx is None else layer.base_layer(x_ctx), made, x)

    def on_end(self, total: Tensor) -> Tensor | None:
        """Note the context's output; close an exact writer's loop, and round."""
        if self.activations is None:
            self.seen.output = self.split(total)[0]
            return None
        assert self.activations.output is not None
        self.seen.output = self.activations.output
        if self._open is None:
            return None
        if total.dtype != torch.float64:
            raise UnsupportedModelError(
                f"{self.block.block.path} rounds what {self.spec.writer.value} writes before it"
                " ends"
            )
        written = self.spec.residual_multiplier * (
            self._open.base + self._open.factor * self._open.gain
        )
        rest = self.split(total)[1] - written
        closed = updates.close(
            self.activations.output,
            rest,
            self._open.base,
            self._open.gain,
            self._open.factor,
            self.spec.residual_multiplier,
        )
        factor = self.unless_padding(closed.factor, self._open.padding)
        setattr(self._open.holder, self._open.name, factor)
        self.diagnostics.closing(closed.misses, closed.correction)
        # padding goes on as it will in the replay: which rows an expert gets decides how its
        # products round
        unpatched = updates.round_sum(self.split(total)[1], written, closed.output.dtype)
        return self.unless_padding(closed.output, unpatched).reshape(total.shape)

    def install(self, stack: ExitStack) -> None:
        """Set the block's modules to record, and its hooks."""
        block = self.block
        stack.callback(block.off)
        block.recorder = self
        for name, reader in block.readers.items():
            record = self.router if isinstance(reader, PatchedRouter) else self.reader
            reader.record(
                lambda layer, *given, name=name, record=record: record(name, layer, *given)
            )
        if block.experts is not None:
            record_these: Any = (
                record_scaled_experts
                if isinstance(block.experts, PatchedScaledExperts)
                else record_experts
            )
            block.experts.record(lambda layer, *given: record_these(self, layer, *given))
        if block.down is not None:
            block.down.record(self.down)
        if block.post_norm is not None:
            block.post_norm.record(self.norm)
        if block.inner_norm is not None and self.spec.parallel_norm is not None:
            block.inner_norm.record(self.inner_norm)
            beside = block.module.get_submodule(self.spec.parallel_norm)
            stack.callback(beside.register_forward_hook(self.on_beside).remove)
        if self.valid is not None:
            block.on_start(stack, self.on_start)
            block.on_end(stack, self.on_end, first=True)
        if not self.receives_norm_input:
            block.on_residual(stack, self.on_residual)


@contextmanager
def recording(recorders: Sequence[BlockRecorder]) -> Iterator[None]:
    """Within this context the blocks compute their factors; read them with
    :meth:`AttachedBlock.factors` before it ends.
    """
    with ExitStack() as stack:
        for recorder in recorders:
            recorder.install(stack)
        yield


def _same_place(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one layout are the same numbers; fake ones, which have no address,
    too.
    """
    return (
        x.storage_offset() == y.storage_offset()
        and x.untyped_storage()._cdata == y.untyped_storage()._cdata
    )


def _add(y: Tensor, z: Tensor, u: Tensor, v: Tensor, out_dtype: torch.dtype) -> Tensor:
    """:func:`icl_patch.ops.add_low_rank` on (B, T, ·)."""
    flat = [x.reshape(-1, x.shape[-1]) for x in (y, z, u, v)]
    return ops.add_low_rank(*flat, out_dtype=out_dtype).reshape(y.shape)
