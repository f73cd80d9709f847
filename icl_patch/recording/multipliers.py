"""Measuring the numbers by which blocks multiply their MLP's output."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from icl_patch.errors import UnsupportedModelError
from icl_patch.models.forward import call
from icl_patch.models.kv_cache import new_cache
from icl_patch.models.language_model import random_tokens
from icl_patch.recording.attached_block import AttachedBlock, HasBlocks

# The probe is a power of two, far above the residual stream and far below the limits of fp64.
_PROBE = 2.0**40
# In fp64 a number times a power of two has no rounding error; the sum with the stream has one.
_LIMIT = 2.0**-30
_TOKENS = 3


@torch.no_grad()
def measure_multipliers(attached: HasBlocks) -> None:
    """Replace each ``residual_multiplier`` by the number that the block applies to its writer's
    output in fp64, where exact factors are added.

    A pass over two equal rows of a few tokens gives every writer's output one value in fp64, 0 in
    the first row and 2⁴⁰ in the second; the difference of the block's sums is the multiplier.
    Detection found it in the outputs of the model, which have few digits: in bf16 0.999 can give
    the bits of 1.

    Raises:
        UnsupportedModelError: a block does not multiply all elements by one number.
    """
    blocks = [block for block in attached.blocks if block.spec.residual_multiplier != 0]
    for block, (low, high) in zip(blocks, _sums(attached, blocks), strict=True):
        factors = (high - low).flatten() / _PROBE
        multiplier = float(factors.median())
        if not bool(((factors - multiplier).abs() <= _LIMIT * abs(multiplier)).all()):
            raise UnsupportedModelError(
                f"{block.block.path} does not multiply its MLP's output by one number, but by"
                f" {float(factors.min()):.6g} to {float(factors.max()):.6g}"
            )
        block.spec = replace(block.spec, residual_multiplier=multiplier)
        block.block = replace(block.block, spec=block.spec)


def _sums(attached: HasBlocks, blocks: list[AttachedBlock]) -> list[Tensor]:
    """The sums (2, T, d) of the blocks in fp64. Behind its sum a block goes on with ones, so that
    the blocks after it read the same in both rows.
    """
    sums: dict[str, Tensor] = {}

    def write(_module: Any, _args: Any, out: Tensor) -> Tensor:
        written = torch.zeros_like(out, dtype=torch.float64)
        # (2, T, d), or these rows one after the other for each expert
        written.view(-1, 2 * _TOKENS, out.shape[-1])[:, _TOKENS:] = _PROBE
        return written

    def end(block: AttachedBlock) -> Any:
        def hook(total: Tensor) -> Tensor:
            sums[block.block.path] = total.as_subclass(Tensor).double().reshape(2, -1)
            return torch.ones_like(total, dtype=block.dtype)

        return hook

    with ExitStack() as hooks:
        for block in blocks:
            block.hook(hooks, block.writer.register_forward_hook, write)
            block.keep_unrounded(hooks)
            block.on_end(hooks, end(block), first=True)
        ids = random_tokens(attached.model, _TOKENS, seed=1)[:1].repeat(2, 1)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        call(attached.model, ids, torch.ones_like(ids), positions, new_cache(attached.model))
    return [sums[block.block.path] for block in blocks]
