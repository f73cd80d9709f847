"""Run the norms and gated MLPs of a decode step through our ops, which take fewer launches.

An MLP is tried on random rows: if one of our ops gives the same output, it takes the module's
place, as for norms (:func:`icl_patch.layers.rms_norm.rms_norms`). No table lists classes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch import metrics, ops
from icl_patch.activation_functions import ACTIVATIONS
from icl_patch.invariance.arithmetic import BATCH_INVARIANT, running_in
from icl_patch.layers.linear import LINEAR, PatchedLinear
from icl_patch.layers.patched_module import like_rows_of, rows_of, untouched
from icl_patch.layers.rms_norm import PatchedRMSNorm, random_rows, rms_norms
from icl_patch.models.forward_override import Forward, FusedModule
from icl_patch.recording.attached_block import AttachedBlock

_ROUNDINGS = 16  # the allowed difference between two orders of the same arithmetic
# Scales of the rows that an MLP is tried on; the large ones show whether it clamps.
_SCALES = (1.0, 30.0, 1000.0)


@dataclass(eq=False)
class NormBefore(FusedModule):
    """The norm before a block's MLP, which also gives the block's recorder delta and the readers'
    direction.
    """

    block: AttachedBlock


@torch.no_grad()
def fused_modules(
    model: PreTrainedModel, blocks: Sequence[AttachedBlock], *, keeps_bits: bool
) -> list[FusedModule]:
    """The norms and gated MLPs of an attached model that our ops can run.

    Args:
        model: the model. blocks: its blocks, with their patched modules off.
        keeps_bits: whether the ops must have the modules' bits in the batch-invariant arithmetic,
            because a replay runs the modules.
    """
    with running_in(BATCH_INVARIANT, model) if keeps_bits else nullcontext():
        found: list[FusedModule] = [*_gated(blocks, 0 if keeps_bits else _ROUNDINGS)]
    before = dict(_inputs(blocks))
    for norm in rms_norms(model):
        module = norm.base_layer
        if not (keeps_bits or untouched(module)):  # a replay takes all norms
            continue
        if (block := before.get(module)) is not None:
            found.append(NormBefore(module, _pair(norm, block), block))
        else:
            found.append(FusedModule(module, norm.in_one_launch))
    return found


def _inputs(blocks: Sequence[AttachedBlock]) -> Iterator[tuple[nn.Module, AttachedBlock]]:
    """The modules whose input is all of a block's residual stream before its MLP."""
    for block in blocks:
        side, _, path = block.spec.residual[0].partition(" of ")
        if side == "input" and path and len(block.spec.residual) == 1:
            yield block.module.get_submodule(path), block


def _pair(norm: PatchedRMSNorm, block: AttachedBlock) -> Callable[[Tensor], Tensor]:
    module: Any = norm.base_layer

    def run(x: Tensor) -> Tensor:
        on_norm_pair = block.on_norm_pair
        if on_norm_pair is None:
            return norm.in_one_launch(x)
        pair = ops.norm_pair(
            x.reshape(-1, x.shape[-1]),
            module.weight,
            norm.eps,
            scale_offset=norm.scale_offset,
            cast_first=norm.cast_first,
        )
        on_norm_pair(pair, x)
        return pair.z_pair.reshape(x.shape)

    return run


def _gated(blocks: Sequence[AttachedBlock], roundings: int) -> Iterator[FusedModule]:
    """MLPs ``down(act(gate(x)) ⊙ up(x))``; gate and up may be the halves of one matrix. Their
    outputs may differ by so many roundings.
    """
    for block in blocks:
        parent = str(block.spec.down).rpartition(".")[0]
        if block.down is None or block.experts is not None or not parent:
            continue
        module = block.module.get_submodule(parent)
        children = [child for child in module.children() if child is not block.down]
        readers = [child for child in children if isinstance(child, (PatchedLinear, *LINEAR))]
        others = [child for child in children if child not in readers]
        if len(others) != 1 or len(readers) not in (1, 2) or not untouched(module):
            continue
        if (activation := _activation(others[0])) is None:
            continue
        weight = next(module.parameters())
        x = random_rows(_width(readers[0]), _SCALES).to(weight.device, weight.dtype)
        for order in (1, -1):  # whether the gate is the first or the second reader or half
            run = _gated_product(readers, block.down, activation, order)
            if _same(run, module, block.down, x, roundings):
                yield FusedModule(module, run)
                break


def _gated_product(
    readers: Sequence[nn.Module], down: nn.Module, activation: str, order: int
) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        # Both streams (2, B, 1, d) of a shared cache go through the MLP as rows.
        z = rows_of(x) if x.dim() > 3 else x
        halves = [reader(z) for reader in readers]
        gate, up = (halves if len(halves) == 2 else halves[0].chunk(2, -1))[::order]
        h = ops.gated_product(rows_of(gate), rows_of(up), activation)
        out: Tensor = down(like_rows_of(gate, h))
        return out if z is x else like_rows_of(x, out)

    return run


def _width(reader: Any) -> int:
    """K, the number of input features of a linear module."""
    width: int = reader.in_features if hasattr(reader, "in_features") else reader.weight.shape[0]
    return width


def _activation(module: nn.Module) -> str | None:
    if [*module.parameters(), *module.buffers()] or not untouched(module):
        return None
    x = torch.linspace(-8, 8, 161)
    limit = _ROUNDINGS * torch.finfo(x.dtype).eps * x.abs()  # of x: in GELU the result may cancel
    try:
        output = module(x)
    except Exception:  # the module's own code takes other inputs: not a known activation
        return None
    return next(
        (
            name
            for name, function in ACTIVATIONS.items()
            if bool(((output - function(x)).abs() <= limit).all())
        ),
        None,
    )


def _same(fused: Forward, module: nn.Module, down: nn.Module, x: Tensor, roundings: int) -> bool:
    """Whether both give ``down`` the same input, and have the same output, up to so many roundings,
    in rows that do not overflow. The output alone is the same for every input if ``down`` is 0.
    """
    found: list[list[Any]] = []
    for run in (fused, module):
        given: list[Any] = []
        with down.register_forward_pre_hook(lambda _, inputs, given=given: given.extend(inputs)):
            try:
                found.append([run(x), given])
            except Exception:  # the module's own code takes other inputs
                return False
    (output, given), (expected, due) = found
    pairs = zip([output, *given], [expected, *due], strict=False)
    return len(given) == len(due) and all(_near(x, y, roundings) for x, y in pairs)


def _near(output: Any, expected: Any, roundings: int) -> bool:
    if not (isinstance(output, Tensor) and isinstance(expected, Tensor)):
        return False
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return False
    finite = expected.isfinite().all(-1)
    limit = roundings * torch.finfo(expected.dtype).eps
    near = metrics.linf(output[finite], expected[finite]) <= limit
    return bool(near.all()) and len(near) >= len(expected) // len(_SCALES)
