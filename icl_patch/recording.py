"""What happens inside the blocks during a pass: observing the untouched model, recording a patch, replaying one.

A pass installs its hooks and modes on entry and takes them away on exit, whatever happens in between.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from icl_patch import ops, updates
from icl_patch.errors import ControllabilityError
from icl_patch.families import Block, Writer
from icl_patch.modules import PatchedLinear, PatchedModule, PatchedRMSNorm, restore, swap

Factors = dict[str, Tensor]  # of one block by name, see icl_patch.patch.factor_names


@dataclass
class BlockTape:
    """What one block did to B x T tokens: residual stream before the MLP, readers' outputs, block output (all the model's dtype)."""

    hidden: Tensor
    readers: dict[str, Tensor] = field(default_factory=dict)
    output: Tensor | None = None


class AttachedBlock:
    """A block whose readers and writer have been swapped for patched modules."""

    def __init__(self, model: nn.Module, block: Block) -> None:
        family = block.family
        self.block, self.family = block, family
        self._model = model
        self._swapped: list[str] = []
        try:
            self.readers = {name: self._swap(name, PatchedLinear) for name in family.readers}
            self.down = self._swap(family.down, PatchedLinear)
            self.post_norm = None if family.post_norm is None else self._swap(family.post_norm, self._wrap_norm)
        except BaseException:
            self.detach()
            raise

    def _wrap_norm(self, base: nn.Module) -> PatchedRMSNorm:
        return PatchedRMSNorm(base, scale_offset=self.family.scale_offset, cast_first=self.family.cast_first)

    def _swap(self, name: str, wrap: Any) -> Any:
        patched = swap(self._model, self.block.path_of(name), wrap)
        self._swapped.append(name)
        return patched

    def detach(self) -> None:
        """Put the base modules back."""
        while self._swapped:
            restore(self._model, self.block.path_of(self._swapped.pop()))

    @property
    def patched(self) -> list[PatchedModule]:
        """All patched modules of the block."""
        norm = [] if self.post_norm is None else [self.post_norm]
        return [*self.readers.values(), self.down, *norm]

    @property
    def writer(self) -> PatchedModule:
        """The module whose output the block adds to its residual stream."""
        return self.down if self.post_norm is None else self.post_norm

    @property
    def pre_mlp(self) -> nn.Module:
        """The module whose input is the residual stream before the MLP."""
        return self.block.module.get_submodule(self.family.pre_mlp)

    def off(self) -> None:
        for module in self.patched:
            module.off()

    def factors(self) -> Factors:
        """The factors the modules hold, by name, as (rows, columns, width)."""
        found: Factors = {f"{name}.u": reader.u for name, reader in self.readers.items() if reader.u is not None}
        found["readers.v"] = next(iter(self.readers.values())).v
        if self.down.u is not None and self.down.v is not None:
            found |= {f"{self.family.down}.u": self.down.u, f"{self.family.down}.v": self.down.v}
        if self.post_norm is not None and self.post_norm.new_scale is not None:
            found[f"{self.family.post_norm}.new_scale"] = self.post_norm.new_scale
        return found

    def replay(self, factors: Factors) -> None:
        """Set every module to apply its factors, (B, T, ·)."""
        new_scale = factors.get(f"{self.family.post_norm}.new_scale")
        # flat: one row a token, also in a batch of one, where (1, T, N) would be a shared patch of rank T
        factors = {name: factor.flatten(0, -2) if factor.dim() == 3 else factor for name, factor in factors.items()}
        for name, reader in self.readers.items():
            reader.set_patch(factors[f"{name}.u"], factors["readers.v"])
        down = self.family.down
        if f"{down}.u" in factors:
            u = factors[f"{down}.u"]
            ends_block = self.post_norm is None
            out_dtype = torch.float64 if ends_block and u.dtype == torch.float64 else None
            self.down.set_patch(u, factors[f"{down}.v"], out_dtype=out_dtype)
        if self.post_norm is not None and new_scale is not None:
            self.post_norm.set_patch(new_scale)


def _output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@contextmanager
def observe(blocks: Sequence[AttachedBlock], columns: Tensor | None = None) -> Iterator[list[BlockTape]]:
    """Within this context, note what the blocks do to the given columns of the batch; their arithmetic is left alone."""
    tapes: list[BlockTape] = []

    def keep(x: Tensor) -> Tensor:
        return x.clone() if columns is None else x[:, columns]

    with ExitStack() as hooks:
        for block in blocks:
            _observe_block(block, tapes, keep, hooks)
        yield tapes


def _observe_block(block: AttachedBlock, tapes: list[BlockTape], keep: Any, hooks: ExitStack) -> None:
    def on_residual(_module: nn.Module, args: tuple[Any, ...]) -> None:
        tapes.append(BlockTape(keep(args[0])))

    def on_reader(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, out: Tensor) -> None:
            tapes[-1].readers[name] = keep(out)

        return hook

    def on_block(_module: nn.Module, _args: Any, out: Any) -> None:
        tapes[-1].output = keep(_output(out))

    handles: list[RemovableHandle] = [block.pre_mlp.register_forward_pre_hook(on_residual)]
    handles += [reader.register_forward_hook(on_reader(name)) for name, reader in block.readers.items()]
    handles.append(block.block.module.register_forward_hook(on_block))
    for handle in handles:
        hooks.callback(handle.remove)


def _round_block(block: AttachedBlock, dtype: torch.dtype, hooks: ExitStack) -> None:
    """Round the block's output to the model's dtype where an exact writer left it in fp64."""
    residual: list[Tensor] = []

    def on_residual(_module: nn.Module, args: tuple[Any, ...]) -> None:
        residual[:] = [args[0]]

    def on_block(_module: nn.Module, _args: Any, out: Any) -> Any:
        total = _output(out)
        if total.dtype == dtype:
            return None
        rounded = updates.round_sum(total, residual.pop(), dtype)
        return (rounded, *out[1:]) if isinstance(out, tuple) else rounded

    hooks.callback(block.pre_mlp.register_forward_pre_hook(on_residual).remove)
    hooks.callback(block.block.module.register_forward_hook(on_block, prepend=True).remove)


@contextmanager
def replaying(blocks: Sequence[AttachedBlock], layers: Sequence[Factors], dtype: torch.dtype) -> Iterator[None]:
    """Within this context the blocks apply the given factors."""
    with ExitStack() as stack:
        for block, factors in zip(blocks, layers, strict=True):
            stack.callback(block.off)
            block.replay(factors)
            _round_block(block, dtype, stack)
        yield


class BlockRecorder:
    """Computes one block's factors from what passes through it, and applies them on the way.

    The context stream's values come from the batch's first half (two streams in one pass) or, when ``tape`` is given, from an earlier
    pass of the untouched model over the same tokens.

    Args:
        block: the block.
        update: "direct", "stable" or "exact"; exact needs a tape.
        valid: (B, T) bool, the columns that are kept tokens.
        tape: the block's values with the context, or None.
    """

    def __init__(self, block: AttachedBlock, update: str, valid: Tensor, tape: BlockTape | None) -> None:
        assert update != "exact" or tape is not None
        self.block, self.update, self.valid, self.tape = block, update, valid, tape
        self.seen: BlockTape | None = None
        self.uncontrollable: dict[str, Tensor] = {}
        self.status = torch.zeros_like(valid, dtype=torch.int8)
        self.misses = torch.zeros_like(valid, dtype=torch.int64)
        self.correction = torch.zeros(valid.shape, dtype=torch.float64, device=valid.device)
        self.reader_error = torch.zeros(valid.shape, device=valid.device)
        self._direction: tuple[Tensor, Tensor, Tensor] | None = None
        self._stable_scale: Tensor | None = None

    # -- the two streams

    def _split(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        if self.tape is not None:
            return None, x
        batch = x.shape[0] // 2
        return x[:batch], x[batch:]

    @staticmethod
    def _join(x_ctx: Tensor | None, x: Tensor) -> Tensor:
        return x if x_ctx is None else torch.cat([x_ctx, x])

    def _refuse(self, condition: str, rows: Tensor) -> None:
        self.uncontrollable[condition] = rows & self.valid

    def _zero_padding(self, x: Tensor) -> Tensor:
        return torch.where(self.valid.unsqueeze(-1), x, 0)

    # -- what is called as the block runs, in this order

    def on_residual(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        hidden_ctx, self.hidden = self._split(args[0])
        if self.tape is not None:
            hidden_ctx = self.tape.hidden
        assert hidden_ctx is not None
        self.seen = BlockTape(hidden_ctx)
        dtype = torch.promote_types(self.hidden.dtype, torch.float32)
        self.delta = self._zero_padding(hidden_ctx.to(dtype) - self.hidden.to(dtype))

    def reader(self, name: str, layer: PatchedLinear, z: Tensor) -> Tensor:
        y_ctx, y = self._split(layer.base_layer(z))
        reference = y_ctx if self.tape is None else self.tape.readers[name]
        assert reference is not None and self.seen is not None
        self.seen.readers[name] = reference
        _, z = self._split(z)
        u = self._zero_padding(updates.reader_update(reference, y))
        v, norm2 = self._direction_of(z)
        self._refuse(f"the input z of {name} is 0", (norm2 == 0) & (u != 0).any(-1))
        layer.u, layer.v = u, v
        patched = _add(y, z, u, v)
        size = reference.abs().amax(-1).clamp(min=torch.finfo(reference.dtype).tiny)
        error = (patched.float() - reference.float()).abs().amax(-1) / size.float()
        self.reader_error = torch.where(self.valid, torch.maximum(self.reader_error, error), 0.0)
        return self._join(y_ctx, patched)

    def _direction_of(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``v`` of the readers' common input, computed once a block."""
        if self._direction is None or self._direction[0].data_ptr() != z.data_ptr():
            v, norm2 = ops.read_direction(z)
            self._direction = (z, self._zero_padding(v), norm2)
        return self._direction[1:]

    def down(self, layer: PatchedLinear, h: Tensor) -> Tensor:
        y_ctx, y = self._split(layer.base_layer(h))
        _, h = self._split(h)
        if self.block.family.writer is Writer.SCALE and self.update == "direct":
            return self._join(y_ctx, y)
        exact_writer = self.block.family.writer is Writer.WEIGHT and self.update == "exact"
        v, norm2 = ops.read_direction(h, torch.float64 if exact_writer else None)
        u = self._invert_norm(y) if self.block.family.writer is Writer.SCALE else self.delta
        if exact_writer:
            gain = (h.double() * v).sum(-1, keepdim=True)
            u = self._close(y, gain, u)
        u, v = self._zero_padding(u), self._zero_padding(v)
        self._refuse(f"the input h of {self.block.family.down} is 0", (norm2 == 0) & (u != 0).any(-1))
        patched = _add(y, h, u, v, torch.float64 if exact_writer else None)
        if self.block.family.writer is Writer.SCALE and self.update == "exact":
            u = self._zero_padding(updates.off_zero(u, patched, y))
            patched = _add(y, h, u, v)
        layer.u, layer.v = u, v
        return self._join(y_ctx, patched)

    def _invert_norm(self, hidden_down: Tensor) -> Tensor:
        norm = self.block.post_norm
        assert norm is not None
        rows = hidden_down.shape[-1]
        stable = updates.stable_scale(self.delta.reshape(-1, rows), norm.scale, hidden_down.reshape(-1, rows), norm.eps)
        self.status = torch.where(self.valid, stable.status.reshape(self.valid.shape), self.status)
        self._stable_scale = stable.new_scale.reshape(hidden_down.shape)
        return stable.u.reshape(hidden_down.shape)

    def norm(self, layer: PatchedRMSNorm, x: Tensor) -> Tensor:
        x_ctx, x = self._split(x)
        normalized = layer.normalize(x)
        if self.update == "direct":
            new_scale = updates.direct_scale(self.delta, normalized, layer.scale)
            self._refuse(
                f"the input of {self.block.family.post_norm} is 0 where delta is not", ((normalized == 0) & (self.delta != 0)).any(-1)
            )
        else:
            assert self._stable_scale is not None
            new_scale = self._stable_scale.to(normalized.dtype)
        if self.update == "exact":
            new_scale = self._close(torch.zeros_like(x), normalized, self._stable_scale)
        layer.new_scale = torch.where(self.valid.unsqueeze(-1), new_scale, layer.scale.to(new_scale.dtype))
        return self._join(None if x_ctx is None else layer.base_layer(x_ctx), layer.apply_scale(x, layer.new_scale))

    def _close(self, base: Tensor, gain: Tensor, started_from: Tensor | None) -> Tensor:
        assert self.tape is not None and self.tape.output is not None and started_from is not None
        closed = updates.close(self.tape.output, self.hidden, base, gain, started_from)
        self.misses = torch.where(self.valid, closed.misses, 0)
        self.correction = torch.where(self.valid, closed.correction, 0.0)
        return closed.factor

    def on_block(self, _module: nn.Module, _args: Any, out: Any) -> None:
        assert self.seen is not None
        self.seen.output = self._split(_output(out))[0] if self.tape is None else self.tape.output

    # -- afterwards

    def install(self, stack: ExitStack) -> None:
        """Set the block's modules to record, and its hooks."""
        block = self.block
        stack.callback(block.off)
        for name, reader in block.readers.items():
            reader.record(lambda layer, z, name=name: self.reader(name, layer, z))
        block.down.record(self.down)
        if block.post_norm is not None:
            block.post_norm.record(self.norm)
        stack.callback(block.pre_mlp.register_forward_pre_hook(self.on_residual).remove)
        if self.tape is not None:
            dtype = self.tape.hidden.dtype
            _round_block(block, dtype, stack)
        stack.callback(block.block.module.register_forward_hook(self.on_block).remove)

    def check(self, columns: Tensor | slice) -> None:
        """Raises ControllabilityError for the first of the kept columns that no change of this block's weights can serve."""
        for condition, rows in self.uncontrollable.items():
            if rows.any():
                row, token = rows[:, columns].nonzero()[0].tolist()
                raise ControllabilityError(f"{self.block.block.path}, row {row}, kept token {token}: {condition}")


@contextmanager
def recording(recorders: Sequence[BlockRecorder]) -> Iterator[None]:
    """Within this context the blocks compute their factors; read them with :meth:`AttachedBlock.factors` before it ends."""
    with ExitStack() as stack:
        for recorder in recorders:
            recorder.install(stack)
        yield


def _add(y: Tensor, z: Tensor, u: Tensor, v: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """:func:`icl_patch.ops.add_low_rank` on (B, T, ·)."""
    flat = [x.reshape(-1, x.shape[-1]) for x in (y, z, u, v)]
    return ops.add_low_rank(*flat, out_dtype=out_dtype).reshape(y.shape)
