"""Recording a mixture of experts: the factors of the experts that are active for each token."""

import torch
from torch import Tensor

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.experts import PatchedExperts, PatchedScaledExperts
from icl_patch.models.block_spec import Writer
from icl_patch.recording import block_math
from icl_patch.recording.block_recorder import BlockRecorder
from icl_patch.recording.diagnostics import BlockDiagnostics


def record_experts(
    recorder: BlockRecorder, layer: PatchedExperts, z: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Compute the changes of the active experts, and their output (M, d) with these changes.

    z (M, d), index and weights (M, k).
    """
    if recorder.valid is None and not recorder.exact and layer.gathers(z):
        return _record_inexact_step(recorder, layer, z, index, weights)
    (z_ctx, z_own), (index_ctx, index_own) = recorder.split(z), recorder.split(index)
    output_ctx = None
    if z_ctx is not None and index_ctx is not None:
        of_context = (x[: recorder.rows] for x in (z, index, weights))
        output_ctx = recorder.unflat(layer.unpatched(*of_context))
        recorder.context.experts = (z_ctx, index_ctx)
    assert recorder.context.experts is not None
    z_ctx, index_ctx = recorder.context.experts
    _keep_index(recorder, layer, index_own, index_ctx)
    weights = recorder.split(weights)[1].flatten(0, 1)
    z_ctx, z_own, chosen = (x.flatten(0, 1) for x in (z_ctx, z_own, index_own))
    fused = layer.uses_expert_linear(z, *recorder.shape)
    if not recorder.spec.reads:
        read = layer.read(z_own, chosen, fused)
    elif fused and output_ctx is not None:
        # Each matrix is read once. A decode step runs in our kernels, in which a row's bits do not
        # depend on other rows.
        both = layer.read(torch.cat([z_own, z_ctx]), chosen.repeat(2, 1), fused)
        read = _read(recorder, layer, z, *both.chunk(2))
    else:
        parts = (layer.read(part, chosen, fused) for part in (z_own, z_ctx))
        read = _read(recorder, layer, z, *parts)
    h = layer.inner(read.to(z.dtype) if fused else read)
    output = recorder.unflat(layer.write(h, chosen, weights, fused))
    own = _end(recorder, layer, h, weights, output)
    if output_ctx is not None and recorder.exact and recorder.spec.writer is Writer.EXPERTS:
        own = torch.zeros_like(output_ctx)  # the factor is chosen after the pass
    return recorder.join(output_ctx, own, z)


def _record_inexact_step(
    recorder: BlockRecorder, layer: PatchedExperts, z: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """:func:`record_experts` in a step of an inexact update: both streams in common products, and
    the host reads no number.
    """
    rows, (index_ctx, index_own) = recorder.rows, recorder.split(index)
    assert index_ctx is not None
    _keep_index(recorder, layer, index_own, index_ctx)
    if recorder.spec.reads:
        # The context's rows go through the experts that either stream chose: normally the same.
        read = layer.read(torch.cat([z, z[:rows]]), torch.cat([index, index[rows:]]), fused=True)
        own = _read(recorder, layer, z, read[rows : 2 * rows], read[2 * rows :])
    else:
        read = layer.read(z, index, fused=True)
        own = read[rows:]
    # As many rows as in a replay: torch's exp gives other bits at other places of a tensor.
    h = layer.inner(own.to(z.dtype))
    h_pair = torch.cat([layer.inner(read[:rows].to(z.dtype)), h])
    output_ctx, output = recorder.split(layer.write(h_pair, index, weights, fused=True))
    return recorder.join(output_ctx, _end(recorder, layer, h, weights[rows:], output), z)


def _keep_index(
    recorder: BlockRecorder, layer: PatchedExperts, index: Tensor, index_ctx: Tensor
) -> Tensor:
    """Keep the chosen experts (B, T, k), and count those that the context did not choose.

    Returns:
        (B, T, k, k) bool, which slots of the context have the expert of each slot.
    """
    recorder.keep(layer, index=index)
    same = index.unsqueeze(-1) == index_ctx.unsqueeze(-2)
    recorder.note(BlockDiagnostics.largest, "experts_changed", (~same.any(-1)).sum(-1))
    return same


def _read(
    recorder: BlockRecorder, layer: PatchedExperts, z: Tensor, read: Tensor, read_ctx: Tensor
) -> Tensor:
    """The active experts' first product (M, k, 2I) with its change, from the products of z and of
    z_ctx.
    """
    u = recorder.fill_padding(recorder.unflat(block_math.reader_update(read_ctx, read)))
    v, inverse, _ = recorder.direction_of(z)
    recorder.refuse(f"the input z of {recorder.spec.experts} is 0", inverse, u, "input")
    recorder.keep(layer, read_u=u, read_v=v)
    z_own = recorder.split(z)[1].flatten(0, 1)
    patched = layer.add_read(read, z_own, u.flatten(0, 1), v.flatten(0, 1))
    recorder.note(BlockDiagnostics.reader, recorder.unflat(patched), recorder.unflat(read_ctx), u)
    return patched


def _end(
    recorder: BlockRecorder, layer: PatchedExperts, h: Tensor, weights: Tensor, out: Tensor
) -> Tensor:
    """The experts' output (B, T, d): where the experts write with their change, ``o + κ u``."""
    if not recorder.spec.experts_write(recorder.update):
        return out.to(h.dtype)
    last = recorder.spec.writer is Writer.EXPERTS  # else a norm reads the output
    target = recorder.writer_target() if last else recorder.invert_norms(out.to(h.dtype))
    closes = recorder.exact and last
    wide = torch.float64 if closes else torch.promote_types(h.dtype, torch.float32)
    slots = (recorder.unflat(weights), recorder.unflat(h))
    update = block_math.expert_update(target, *slots, wide, bias=recorder.spec.expert_bias)
    u, v, total, share = update
    condition = f"the weights of the experts that {recorder.spec.experts} can use sum to 0"
    recorder.refuse(condition, total, target.to(wide))
    v = None if v is None else recorder.fill_padding(v)
    gain = recorder.unflat(layer.gain(h, weights, None if v is None else v.flatten(0, 1)))
    padded = recorder.fill_padding(u)
    recorder.keep(layer, write_u=padded, write_v=v)
    if closes:
        recorder.postpone(out, gain, layer, "write_u")
    written = layer.add_written(out, gain, padded, h.dtype)
    if recorder.exact and not last:
        addend = recorder.addend if recorder.spec.inner_norm is None else None
        moved = block_math.off_zero(written, out, addend)
        padded = recorder.fill_padding(u + (moved if v is not None else moved * share))
        recorder.keep(layer, write_u=padded)
        written = layer.add_written(out, gain, padded, h.dtype)
    return written


def record_scaled_experts(
    recorder: BlockRecorder, layer: PatchedScaledExperts, x: Tensor
) -> Tensor:
    """:func:`record_experts` for experts that read ``s_e z``: x (E·M, d), expert after expert."""
    count = layer.base_layer.gate_up_proj.shape[0]
    rows, batch = x.reshape(count, -1, x.shape[-1]), recorder.rows
    own = rows[:, -batch:]
    index, slots = layer.active(own)
    if rows.shape[1] == 2 * batch:
        index_ctx, slots_ctx = layer.active(rows[:, :batch])
    else:
        assert recorder.context.experts is not None
        slots_ctx, index_ctx = (part.flatten(0, 1) for part in recorder.context.experts)
        slots_ctx = slots_ctx.reshape(*index_ctx.shape, -1)
    same = _keep_index(recorder, layer, recorder.unflat(index), recorder.unflat(index_ctx))
    read = layer.read(slots, index)
    slots_of = same.flatten(0, 1).long().argmax(-1, keepdim=True)  # 0 where there is none
    target = layer.read(slots_ctx, index_ctx).take_along_dim(slots_of, 1)
    if recorder.direction is None:
        raise UnsupportedModelError(
            f"{recorder.block.path}: {recorder.spec.experts} runs before anything reads the"
            " MLP's input"
        )
    v = recorder.direction.v.flatten(0, 1)
    scale = (slots.to(v.dtype) * v.unsqueeze(1)).sum(-1, keepdim=True)
    change = block_math.reader_update(target, read)
    u = block_math.scaled_reader_update(change, scale)
    u = recorder.fill_padding(recorder.unflat(u))
    condition = f"the input of {recorder.spec.experts} is 0"
    recorder.refuse(condition, recorder.unflat(scale), recorder.unflat(change), "input")
    recorder.keep(layer, read_u=u, read_v=recorder.unflat(v))

    def add(product: Tensor) -> Tensor:
        patched = layer.add_to_all(product[:, -batch:], slots, index, u.flatten(0, 1), v)
        return torch.cat([product[:, :-batch], patched], 1)

    patched = recorder.unflat((read + scale * u.flatten(0, 1)).to(read.dtype))
    reference, change = recorder.unflat(target), recorder.unflat(change)
    recorder.note(BlockDiagnostics.reader, patched, reference, change)
    return layer.with_read(x, add)
