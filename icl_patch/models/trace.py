"""The values that the modules of a block pass to each other in one small forward. A block's form is
read from them.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from icl_patch.layers.device_hooks import device_of
from icl_patch.models.forward import CACHE_NAMES, call
from icl_patch.models.kv_cache import new_cache
from icl_patch.models.module_search import outermost

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
    """The block's own call, and the calls within it in the order in which they returned."""

    path: str
    block: Call
    calls: list[Call]

    @property
    def mixers(self) -> list[Call]:
        """The outermost modules within the block that see the context."""
        return outermost_calls(
            call
            for call in self.calls
            if call.sees_context and (call.module._modules or call.module._parameters)
        )


def outermost_calls(calls: Iterable[Call]) -> list[Call]:
    """The calls of modules that are inside no other one's."""
    calls = list(calls)
    paths = outermost(call.path for call in calls)
    return [call for call in calls if call.path in paths]


def _trace_block(
    path: str, block: nn.Module, traces: dict[str, BlockTrace], hooks: ExitStack
) -> None:
    names = {module: name for name, module in block.named_modules()}
    calls: list[Call] = []
    alive: list[Tensor] = []
    starts: list[tuple[Value | None, bool]] = []  # one for each call that has not returned
    device = device_of(block)  # its hooks bring the input from the block before to it

    def value_of(tensor: Tensor) -> Value:
        alive.append(tensor)
        return Value.of(tensor)

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = first_tensor((*args, kwargs))
        value = None if tensor is None else value_of(tensor.to(device))
        starts.append((value, not kwargs.keys().isdisjoint(_CONTEXT_INPUTS)))

    def after(module: nn.Module, _args: Any, out: Any) -> None:
        (given, sees_context), made = starts.pop(), first_tensor(out)
        if given is not None and made is not None:
            several = isinstance(out, tuple)
            call = Call(names[module], module, given, value_of(made), sees_context, several)
            if module is block:
                traces[path] = BlockTrace(path, call, calls)
            else:
                calls.append(call)
        if module is block:
            alive.clear()

    for module in names:
        hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.enter_context(module.register_forward_hook(after))


def traced(layers: Mapping[str, nn.Module], forward: Callable[[], object]) -> dict[str, BlockTrace]:
    """The calls in each of the layers while ``forward`` runs their model; without a layer that did
    not run.
    """
    traces: dict[str, BlockTrace] = {}
    with ExitStack() as hooks:
        for path, layer in layers.items():
            _trace_block(path, layer, traces, hooks)
        forward()
    return traces


@torch.no_grad()
def trace(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], ids: Tensor
) -> dict[str, BlockTrace]:
    """:func:`traced` in a forward of the model on ``ids`` (B, T), without tokens before."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    mask, cache = torch.ones_like(ids), new_cache(model)
    return traced(layers, lambda: call(model, ids, mask, positions, cache))
