"""A neuron that few tokens excite and that makes one channel of the residual stream large."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.models.block_detection import blocks_of
from icl_patch.models.block_spec import Block
from icl_patch.models.trace import first_tensor

# The neuron's input on the tokens that excite it.
_GAIN = 40.0


def add_neuron(
    model: PreTrainedModel, ids: Tensor, size: float, norm_scales: tuple[float, float]
) -> Block | None:
    """Give the second block's MLP a neuron that the first token of each row of ``ids`` (B, T)
    excites and the others hardly do. It writes one channel, which so is ``size`` times the median
    of the residual stream.

    norm_scales: the smallest and the largest scale of a norm.

    Returns the block, or None if it has no MLP.
    """
    blocks = blocks_of(model)
    block = blocks[min(1, len(blocks) - 1)]
    if block.spec.mixer:
        return None
    neuron = _Neuron(model, block, ids)
    neuron.excite()
    neuron.write(size, norm_scales)
    return block


class _Neuron:
    """The neuron that is largest on the first token of ``ids`` (B, T), and all that reads or writes
    it.

    Gradients tell which numbers these are. With an output matrix of 0 but for one element the
    neuron is the MLP's only output, and a row that has a gradient then is one of the neuron's own.
    """

    def __init__(self, model: PreTrainedModel, block: Block, ids: Tensor) -> None:
        self.model, self.block, self.ids = model, block, ids
        spec = block.spec
        self.module = model.get_submodule(block.path_of(spec.down or spec.experts or ""))
        self.width = self._outputs(self.module).shape[-1]
        self.channel = self.width // 2
        self._backward()
        self.matrix, neurons = self._written()
        self.expert, self.index = divmod(int(neurons.argmax()), neurons.shape[-1])
        self.neurons = neurons.shape[-1]

    @property
    def entry(self) -> Tensor:
        """The number by which the neuron writes the channel."""
        return self._stack(self.matrix, -2)[self.expert, self.channel, self.index]

    @torch.no_grad()
    def excite(self) -> None:
        """Turn the neuron's rows to the first tokens and away from all others."""
        own = self.matrix.clone()
        self.matrix.zero_()
        self.entry.fill_(1.0)
        self._backward()
        rows = list(self._rows())

        def turn(signs: tuple[float, ...]) -> float:
            for sign, (row, direction) in zip(signs, rows, strict=True):
                row.copy_(sign * direction)
            return self._size()

        turn(max(product((1.0, -1.0), repeat=len(rows)), key=turn))
        self.matrix.copy_(own)

    @torch.no_grad()
    def write(self, size: float, norm_scales: tuple[float, float]) -> None:
        """Let the neuron alone write its channel, as large as ``size`` says."""
        stack, spec = self._stack(self.matrix, -2), self.block.spec
        stack[self.expert, :, self.index] = 0.0
        stack[:, self.channel] /= 100
        if spec.inner_norm is not None:  # the experts have a norm, and so has the MLP beside them
            for norm, scale in zip((spec.addend, spec.inner_norm), norm_scales, strict=True):
                self._scale_of(norm or "").fill_(scale - spec.scale_offset)
        own = self._outputs(self.module)[:, 0].norm(dim=-1).max()
        self.entry.fill_(1.0)
        self.entry.fill_(own / self._size())
        knob = self.entry if spec.post_norm is None else self._scale_of(spec.post_norm)
        offset = spec.scale_offset if spec.post_norm is not None else 0.0
        for _ in range(5):
            residual = residual_after(self.model, self.block, self.ids)
            found = residual[:, 0, self.channel].abs().max()
            knob.copy_((knob + offset) * size * residual.abs().median() / found - offset)

    def _size(self) -> float:
        """The least number that the first tokens get in the channel of the writer's output."""
        return float(self._outputs(self.module)[:, 0, self.channel].abs().min())

    def _scale_of(self, norm: str) -> Tensor:
        """The norm's weight in the channel."""
        weight: Tensor = self.model.get_submodule(self.block.path_of(norm)).weight
        return weight[self.channel]

    def _rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows (width,) of matrices that make the neuron, each with its new direction."""
        for parameter, holder in self._parameters():
            if parameter.grad is None or not parameter.grad.any():
                continue
            gradient, stack = self._stack(parameter.grad, -1), self._stack(parameter, -1)
            if gradient.shape[-1] != self.width or gradient.shape[-2] % self.neurons:
                continue
            strength = gradient.norm(dim=-1)
            own = (strength > 0.1 * strength.max()).nonzero().tolist()
            if len(own) > 2:
                continue  # a matrix of the attention, or a router
            direction = self._direction(holder)
            if len(direction) == self.width:  # of another width: what the attention writes with
                yield from ((stack[expert, row], direction) for expert, row in own)

    def _parameters(self) -> Iterator[tuple[nn.Parameter, nn.Module]]:
        """The block's matrices but for the writer's, with the modules that get their input."""
        experts = self.block.spec.experts if self.block.spec.down is None else None
        for path, module in self.model.get_submodule(self.block.path).named_modules():
            within = experts is not None and path.startswith(experts)
            for parameter in module.parameters(recurse=False):
                if parameter is not self.matrix and parameter.dim() > 1:
                    yield parameter, self.module if within else module

    def _direction(self, holder: nn.Module) -> Tensor:
        """The row (width,) whose product with the first tokens' inputs is the gain, and with the
        others' as small as can be: ``(Σ z zᵀ over the others)⁻¹ z`` of the first ones.
        """
        z = self._outputs(holder, inputs=True).double()
        others, own = z[:, 1:].flatten(0, 1), z[:, 0].mean(0)
        moments = others.mT @ others / len(others)
        moments += 0.1 * moments.diagonal().diag()  # no large numbers that cancel each other
        direction = torch.linalg.solve(moments, own)
        return (_GAIN * direction / (direction @ own)).float()

    def _stack(self, tensor: Tensor, axis: int) -> Tensor:
        """A matrix, or those of experts, or their transposes: (E, ., .) with the residual stream's
        width on this axis, if it has that at all.
        """
        stack = tensor if tensor.dim() == 3 else tensor.unsqueeze(0)
        return stack if stack.shape[axis] == self.width else stack.mT

    def _outputs(self, module: nn.Module, inputs: bool = False) -> Tensor:
        """A module's output (B, T, .), or its input."""
        found: list[Tensor] = []

        def hook(_module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
            tensor = first_tensor((*args, kwargs) if inputs else out)
            assert tensor is not None
            found.append(tensor.reshape(*self.ids.shape, -1))

        handle = module.register_forward_hook(hook, with_kwargs=True)
        try:
            self.model(self.ids)
        finally:
            handle.remove()
        return found[0]

    def _backward(self) -> None:
        """Leave the gradients of the writer's output, in the channel of the first token."""
        self.model.zero_grad()
        with torch.enable_grad():
            self._outputs(self.module)[0, 0, self.channel].backward()

    def _written(self) -> tuple[nn.Parameter, Tensor]:
        """The writer's matrix, and the neurons (E, I) of the first token. They are the matrix's
        gradient in the channel's row; it has none in other rows.
        """
        for parameter in self.module.parameters():
            if parameter.dim() > 1 and parameter.grad is not None:
                gradient = self._stack(parameter.grad, -2).clone()
                if gradient.shape[-2] == self.width:
                    neurons = gradient[:, self.channel].clone()
                    gradient[:, self.channel] = 0.0
                    if neurons.any() and not gradient.any():
                        return parameter, neurons
        raise ValueError(f"expected an output matrix in {self.block}, found none")


@torch.no_grad()
def residual_after(model: PreTrainedModel, block: Block, ids: Tensor) -> Tensor:
    """The residual stream (B, T, width) after a block, before a norm that the block ends in; of
    several streams the first.
    """
    found: list[Tensor] = []
    module = model.get_submodule(block.path)
    if block.spec.final_norm is not None:
        norm = module.get_submodule(block.spec.final_norm)
        handle = norm.register_forward_hook(lambda _m, args, _out: found.append(args[0]))
    else:
        handle = module.register_forward_hook(
            lambda _m, _args, out: found.append(first_tensor(out))
        )
    try:
        model(ids)
    finally:
        handle.remove()
    streams = found[0] if found[0].dim() == 4 else found[0].reshape(1, *ids.shape, -1)
    return streams[0]
