"""The values that the modules of a block pass to each other in one small forward. A block's form is
read from them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.layers.device_hooks import device_of
from icl_patch.models.forward import CACHE_NAMES, call
from icl_patch.models.kv_cache import new_cache

# Inputs that only a layer that sees the context gets.
_CONTEXT_INPUTS = (
    *CACHE_NAMES,
    "attention_mask",
    "past_key_value",
    "layer_past",
    "position_embeddings",
    "alibi",
)


def first_tensor(value: Any) -> Tensor | None:
    """The first floating tensor in a module's inputs or outputs."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return next((found for found in map(first_tensor, value) if found is not None), None)
    return None


@dataclass(frozen=True, eq=False)
class Value:
    """A module's input or output: its numbers at that time, and the address of its storage, which
    shows whether two modules of a block share it. A block's tensors are kept while it runs, so that
    no other one can get an address of theirs; another block may use them again.
    """

    now: Tensor
    address: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Value":
        """A copy of the tensor's numbers."""
        return cls(tensor.detach().clone(), tensor.data_ptr())

    def same_as(self, other: "Value") -> bool:
        """Whether both are the same rows of the same storage, in any shape."""
        if self.now.numel() != other.now.numel() or self.now.dtype != other.now.dtype:
            return False
        if self.address == other.address:
            return True
        mine, others = self.now.flatten(), other.now.flatten()
        return bool(mine.any()) and torch.equal(mine, others)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module: its path in the block, the module, its first floating input and output,
    the names of its other inputs.
    """

    path: str
    module: nn.Module
    given: Value
    made: Value
    sees_context: bool
    several: bool  # whether it returned more than one tensor


@dataclass(frozen=True, eq=False)
class BlockTrace:
    """The calls within one block, in the order in which they returned; the last one is the block's
    own.
    """

    path: str
    module: nn.Module
    calls: list[Call]

    @property
    def block(self) -> Call:
        """The block's own call."""
        return self.calls[-1]

    @property
    def mixers(self) -> list[Call]:
        """The outermost modules within the block that see the context."""
        return outermost(
            call
            for call in self.calls[:-1]
            if call.sees_context and (call.module._modules or call.module._parameters)
        )


def inside(path: str, outer: str) -> bool:
    """Whether ``path`` is ``outer`` or a module below it."""
    return path == outer or path.startswith(f"{outer}.")


def outermost(calls: Iterable[Call]) -> list[Call]:
    """The calls of modules that are inside no other one's."""
    calls = list(calls)
    paths = {call.path for call in calls}
    return [
        call for call in calls if not any(inside(call.path, path) for path in paths - {call.path})
    ]


def _trace_block(
    path: str, block: nn.Module, traces: dict[str, BlockTrace], hooks: ExitStack
) -> None:
    names = {module: name for name, module in block.named_modules()}
    calls: list[Call] = []
    alive: list[Tensor] = []
    starts: list[tuple[Value | None, bool]] = []  # one for each call that has not returned
    device = device_of(block)  # its hooks bring the input from the block before to it

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor, value = first_tensor((*args, kwargs)), None
        if tensor is not None:
            alive.append(tensor.to(device))
            value = Value.of(alive[-1])
        starts.append((value, any(key in kwargs for key in _CONTEXT_INPUTS)))

    def after(module: nn.Module, _args: Any, out: Any) -> None:
        (given, sees_context), made = starts.pop(), first_tensor(out)
        if given is not None and made is not None:
            alive.append(made)
            of_made, several = Value.of(made), isinstance(out, tuple)
            calls.append(Call(names[module], module, given, of_made, sees_context, several))
            if module is block:
                traces[path] = BlockTrace(path, block, calls)
        if module is block:
            alive.clear()

    for module in names:
        hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        hooks.callback(module.register_forward_hook(after).remove)


@contextmanager
def tracing(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, BlockTrace]]:
    """Within this context the calls in each of the layers are kept; a layer that did not run is
    left out of the result.
    """
    traces: dict[str, BlockTrace] = {}
    with ExitStack() as hooks:
        for path, layer in layers.items():
            _trace_block(path, layer, traces, hooks)
        yield traces


@torch.no_grad()
def trace(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], ids: Tensor
) -> dict[str, BlockTrace]:
    """:func:`tracing` of one forward of the model on ``ids`` (B, T)."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    with tracing(layers) as traces:
        call(model, ids, torch.ones_like(ids), positions, new_cache(model))
    return traces
