"""Capturing the activations of blocks in a pass, without changing the pass."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from icl_patch.layers.router import PatchedRouter
from icl_patch.recording.attached_block import AttachedBlock, BlockActivations


@contextmanager
def observe(blocks: Sequence[AttachedBlock]) -> Iterator[list[BlockActivations]]:
    """Within this context each call of a block appends its activations to the list."""
    all_activations: list[BlockActivations] = []
    with ExitStack() as hooks:
        for block in blocks:
            _Observer(block, all_activations).install(hooks)
        yield all_activations


class _Observer:
    """Captures one block's activations."""

    def __init__(self, block: AttachedBlock, all_activations: list[BlockActivations]) -> None:
        self.block, self.all_activations = block, all_activations
        self.shape: Any = None

    def _keep(self, x: Tensor) -> Tensor:
        return x.reshape(*self.shape, -1).clone()

    def _start(self, shape: Any) -> None:
        self.shape = shape
        self.all_activations.append(BlockActivations())

    def _residual(self, x: Tensor) -> None:
        activations, x = self.all_activations[-1], self._keep(x)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        activations.hidden = x if activations.hidden is None else activations.hidden + x

    def _end(self, total: Tensor) -> None:
        self.all_activations[-1].output = self._keep(total)

    def _read(self, name: str, out: Tensor) -> None:
        self.all_activations[-1].readers[name] = self._keep(out)

    def _choice(self, z: Tensor, index: Tensor) -> None:
        self.all_activations[-1].experts = (self._keep(z), self._keep(index))

    def _written(self, _module: nn.Module, _args: Any, out: Tensor) -> None:
        self.all_activations[-1].written = self._keep(out)

    def install(self, hooks: ExitStack) -> None:
        block = self.block
        block.on_start(hooks, self._start)
        block.on_residual(hooks, self._residual)
        for name, reader in block.readers.items():
            if isinstance(reader, PatchedRouter):
                reader.observer = lambda logits, name=name: self._read(name, logits)
                hooks.callback(setattr, reader, "observer", None)
            else:
                block.hook(
                    hooks,
                    reader.register_forward_hook,
                    lambda _module, _args, out, name=name: self._read(name, out),
                )
        if block.experts is not None:
            block.experts.observer = self._choice
            hooks.callback(setattr, block.experts, "observer", None)
        if block.spec.mixer and block.down is not None:
            block.hook(hooks, block.down.register_forward_hook, self._written)
        block.on_end(hooks, self._end)
