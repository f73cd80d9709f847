"""Recording a mixture of experts: the part of a block's recorder that computes the factors of the
active experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from icl_patch import ops
from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.experts import PatchedExperts, PatchedScaledExperts
from icl_patch.models.block_spec import Writer
from icl_patch.recording import updates

if TYPE_CHECKING:
    from icl_patch.recording.block_recorder import BlockRecorder


def record_experts(
    recorder: BlockRecorder, layer: PatchedExperts, z: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """The experts' output (M, d) with their changes, which are computed here: z (M, d), index and
    weights (M, k).
    """
    if recorder.patches is not None and layer.gathers(z):
        return _record_step(recorder, layer, z, index, weights)
    out_ctx = None
    (z_ctx, z_own), (index_ctx, index_own) = recorder.split(z), recorder.split(index)
    if recorder.activations is None:
        out_ctx, _ = recorder.split(layer.base_layer(z, index, weights))
    else:
        assert recorder.activations.experts is not None
        z_ctx, index_ctx = recorder.activations.experts
    assert z_ctx is not None and index_ctx is not None
    recorder.seen.experts = (z_ctx, index_ctx)
    _note_index(recorder, layer, index_own, index_ctx)
    weights = recorder.split(weights)[1].flatten(0, 1)
    z_ctx, z_own, chosen = (x.flatten(0, 1) for x in (z_ctx, z_own, index_own))
    fused = layer.uses_expert_linear(z, *recorder.shape)
    read = layer.read(z_own, chosen, fused)
    if recorder.spec.reads:
        read = _read(recorder, layer, z, read, layer.read(z_ctx, chosen, fused))
    h = layer.inner(read.to(z.dtype) if fused else read)
    out = recorder.unflat(layer.write(h, chosen, weights, fused))
    return recorder.join(out_ctx, _end(recorder, layer, h, weights, out), z)


def _record_step(
    recorder: BlockRecorder, layer: PatchedExperts, z: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """The same in a decode step, for both streams at once: the host looks at nothing, and no
    stream's matrices are read apart.
    """
    rows, (index_ctx, index_own) = recorder.rows, recorder.split(index)
    assert index_ctx is not None
    _note_index(recorder, layer, index_own, index_ctx)
    if recorder.spec.reads:
        # the context's rows by the experts of either stream, which should be the same ones
        read = layer.read(torch.cat([z, z[:rows]]), torch.cat([index, index[rows:]]), fused=True)
        own = _read(recorder, layer, z, read[rows : 2 * rows], read[2 * rows :])
    else:
        read = layer.read(z, index, fused=True)
        own = read[rows:]
    # of as many rows as in a replay: torch's exp has other bits in other places
    h = layer.inner(own.to(z.dtype))
    both = torch.cat([layer.inner(read[:rows].to(z.dtype)), h])
    out_ctx, out = recorder.split(layer.write(both, index, weights, fused=True))
    return recorder.join(out_ctx, _end(recorder, layer, h, weights[rows:], out), z)


def _note_index(
    recorder: BlockRecorder, layer: PatchedExperts, index: Tensor, index_ctx: Tensor
) -> None:
    """The experts that were chosen, (B, T, k), whose changes these are, and those with the
    context.
    """
    layer.index = index
    recorder.diagnostics.experts(_changed(index, index_ctx))


def _read(
    recorder: BlockRecorder, layer: PatchedExperts, z: Tensor, read: Tensor, read_ctx: Tensor
) -> Tensor:
    """What the active experts make of z, ``read`` (M, k, 2I), with its change, which is computed
    here; ``read_ctx`` is with the context.
    """
    u = recorder.zero_padding(recorder.unflat(updates.reader_update(read_ctx, read)))
    v, inverse, _ = recorder.direction_of(z)
    recorder.diagnostics.refuse(
        f"the input z of {recorder.spec.experts} is 0",
        (inverse == 0) & (u != 0).flatten(2).any(-1),
        inverse == 0,
        "input",
    )
    layer.read_u, layer.read_v = u, v
    z_own = recorder.split(z)[1].flatten(0, 1)
    patched = layer.add_read(read, z_own, u.flatten(0, 1), v.flatten(0, 1))
    recorder.diagnostics.reader(recorder.unflat(patched), recorder.unflat(read_ctx), u)
    return patched


def _end(
    recorder: BlockRecorder, layer: PatchedExperts, h: Tensor, weights: Tensor, out: Tensor
) -> Tensor:
    """The experts' output (B, T, d), from what their input matrices give and what they write."""
    if recorder.spec.inner_norm is not None and recorder.update != "direct":
        wanted = recorder.invert_norms(out.to(h.dtype))
        return _write(recorder, layer, h, weights, out, wanted)
    if recorder.spec.writer is not Writer.EXPERTS:
        return out.to(h.dtype)
    return _write(recorder, layer, h, weights, out, recorder.wanted())


def record_scaled_experts(
    recorder: BlockRecorder, layer: PatchedScaledExperts, x: Tensor
) -> Tensor:
    """The same for experts that read ``s_e z``: x (E·M, d), expert after expert."""
    count = layer.base_layer.gate_up_proj.shape[0]
    rows, batch = x.reshape(count, -1, x.shape[-1]), recorder.rows
    own = rows[:, -batch:]
    index, slots = layer.active(own)
    if recorder.activations is None:
        index_ctx, slots_ctx = layer.active(rows[:, :batch])
    else:
        assert recorder.activations.experts is not None
        slots_ctx, index_ctx = (part.flatten(0, 1) for part in recorder.activations.experts)
        slots_ctx = slots_ctx.reshape(*index_ctx.shape, -1)
    recorder.seen.experts = (recorder.unflat(slots_ctx.flatten(1)), recorder.unflat(index_ctx))
    recorder.diagnostics.experts(_changed(*map(recorder.unflat, (index, index_ctx))))
    read = layer.read(slots, index)
    wanted = layer.read(slots_ctx, index_ctx).take_along_dim(
        _slots_of(index, index_ctx).unsqueeze(-1), 1
    )
    v = recorder.direction[1].v.flatten(0, 1) if recorder.direction is not None else None
    if v is None:
        raise UnsupportedModelError(
            f"{recorder.block.block.path}: {recorder.spec.experts} runs before anything reads the"
            " MLP's input"
        )
    scale = (slots.to(v.dtype) * v.unsqueeze(1)).sum(-1, keepdim=True)
    change = updates.reader_update(wanted, read)
    u = recorder.zero_padding(recorder.unflat(torch.where(scale == 0, 0, change / scale)))
    dead, needed = recorder.unflat(scale == 0), recorder.unflat((change != 0).any(-1, keepdim=True))
    recorder.diagnostics.refuse(
        f"the input of {recorder.spec.experts} is 0",
        (dead & needed).flatten(2).any(-1),
        dead.flatten(2).any(-1),
        "input",
    )
    layer.read_u, layer.read_v, layer.index = u, recorder.unflat(v), recorder.unflat(index)

    def add(made: Tensor) -> Tensor:
        patched = layer.add_to_all(made[:, -batch:], slots, index, u.flatten(0, 1), v)
        return torch.cat([made[:, :-batch], patched], 1)

    patched = (read + scale * u.flatten(0, 1)).to(read.dtype)
    recorder.diagnostics.reader(*map(recorder.unflat, (patched, wanted, change)))
    return layer.with_read(x, add)


def _write(
    recorder: BlockRecorder,
    layer: PatchedExperts,
    h: Tensor,
    weights: Tensor,
    out: Tensor,
    wanted: Tensor,
) -> Tensor:
    """The sum over the experts with what is wanted added: ``o + κ u``."""
    closes = recorder.exact and recorder.spec.writer is Writer.EXPERTS
    wide = torch.float64 if closes else torch.promote_types(h.dtype, torch.float32)
    shares, v = recorder.unflat(weights.double()), None
    if not recorder.spec.expert_bias:
        v, inverse, _ = ops.read_direction(h, wide)
        live = recorder.unflat(inverse != 0)
        v, shares = recorder.unflat(v), torch.where(live, shares, 0)
    total = shares.sum(-1, keepdim=True)
    wanted = wanted.to(wide)
    none = total[..., 0] == 0
    recorder.diagnostics.refuse(
        f"the weights of the experts that {recorder.spec.experts} can use sum to 0",
        none & (wanted != 0).any(-1),
        none,
    )
    share = torch.where(total == 0, 0, 1 / total).to(wide)
    u, v = (
        (wanted * share, None)
        if v is None
        else (wanted, recorder.zero_padding(v * share.unsqueeze(-1)))
    )
    gain = recorder.unflat(layer.gain(h, weights, None if v is None else v.flatten(0, 1)))
    layer.write_u, layer.write_v = recorder.zero_padding(u), v
    if closes:
        recorder.open_loop(out, gain, layer, "write_u")
    return layer.add_written(out, gain, layer.write_u, h.dtype)


def _changed(index: Tensor, index_ctx: Tensor) -> Tensor:
    """How many of the experts (B, T, k) are not among those chosen with the context: (B, T)."""
    return (~(index.unsqueeze(-1) == index_ctx.unsqueeze(-2)).any(-1)).sum(-1)


def _slots_of(index: Tensor, index_ctx: Tensor) -> Tensor:
    """In which slot the context has the expert of each slot (M, k); 0 where it has it in none."""
    return (index.unsqueeze(-1) == index_ctx.unsqueeze(-2)).long().argmax(-1)
