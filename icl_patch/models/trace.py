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
from icl_patch.models.forward import call
from icl_patch.models.kv_cache import new_cache

# Inputs that only a layer that sees the context gets.
_CONTEXT_INPUTS = (
    "attention_mask",
    "past_key_values",
    "past_key_value",
    "layer_past",
    "cache_params",
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


@contextmanager
def _tracing(path: str, block: nn.Module, traces: dict[str, BlockTrace]) -> Iterator[None]:
    calls: list[Call] = []
    alive: list[Tensor] = []
    starts: dict[str, list[tuple[Value | None, bool]]] = {}
    device = device_of(block)  # to which its hooks bring an input from the block before

    def before(name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor, value = first_tensor((*args, kwargs)), None
            if tensor is not None:
                alive.append(tensor.to(device))
                value = Value.of(alive[-1])
            sees_context = any(key in kwargs for key in _CONTEXT_INPUTS)
            starts.setdefault(name, []).append((value, sees_context))

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, _args: Any, out: Any) -> None:
            given, sees_context = starts[name].pop()
            made = first_tensor(out)
            if given is not None and made is not None:
                alive.append(made)
                calls.append(
                    Call(name, module, given, Value.of(made), sees_context, isinstance(out, tuple))
                )
            if not name:
                alive.clear()

        return hook

    with ExitStack() as hooks:
        for name, module in block.named_modules():
            hooks.callback(module.register_forward_pre_hook(before(name), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after(name)).remove)
        yield
    if calls and calls[-1].path == "":
        traces[path] = BlockTrace(path, block, calls)


@contextmanager
def tracing(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, BlockTrace]]:
    """Within this context the calls in each of the layers are kept; a layer that did not run once
    is left out of the result.
    """
    traces: dict[str, BlockTrace] = {}
    with ExitStack() as stack:
        for path, layer in layers.items():
            stack.enter_context(_tracing(path, layer, traces))
        yield traces


@torch.no_grad()
def trace(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], ids: Tensor
) -> dict[str, BlockTrace]:
    """:func:`tracing` of one forward of the model on ``ids`` (B, T)."""
    mask, positions = (
        torch.ones_like(ids),
        torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
    )
    with tracing(layers) as traces:
        call(model, ids, mask, positions, new_cache(model))
    return traces
