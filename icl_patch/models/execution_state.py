"""What a pass of a model depends on beside its input: its modules, weights, settings and hooks."""

import copy
from collections.abc import Mapping, Set
from enum import Enum
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import PreTrainedConfig, PreTrainedModel

from icl_patch.layers.patched_module import with_base

_VALUES = (bool, int, float, complex, str, Enum, torch.dtype, FunctionType, BuiltinFunctionType)
# torch's own attributes of a module, and its forward, of which everybody asks
_NO_SETTINGS = vars(nn.Module()).keys() - {"training"} | {"forward"}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def execution_state(model: PreTrainedModel) -> list[Any]:
    """Everything but weights that a pass of the model depends on.

    That is its modules and those beneath patched ones, with their hooks, forwards and settings. A
    hook is listed as its number, which is never used twice.
    """
    found: list[Any] = [
        *_global_forward_pre_hooks,
        *_global_forward_hooks,
        model.config._attn_implementation,
        model.config.get_text_config(decoder=True)._attn_implementation,
        model.dtype,
        repr(model.config.to_dict()),  # forwards read some of it in every call
    ]
    for module in model.modules():
        for part in with_base(module):
            names = vars(part)
            found += (part, *part._forward_pre_hooks, *part._forward_hooks, names.get("forward"))
            found += (type(part), type(part).forward)
            found += [_frozen(x) for name, x in names.items() if name not in _NO_SETTINGS]
    return found


def _frozen(x: Any, depth: int = 4) -> Any:
    """What a forward may read of an attribute, to compare it."""
    if isinstance(x, Tensor):
        return id(x)
    if isinstance(x, Mapping):
        x = [*x, *x.values()]
    if isinstance(x, list | tuple | Set):
        return tuple(_frozen(y, depth - 1) for y in x) if depth else None
    return x if isinstance(x, _VALUES) else None


def _settings(module: object) -> dict[str, Any]:
    """The attributes of a module or configuration that a forward may read, beside tensors and
    modules: values and functions, and collections of these. PEFT, for one, has a list of the active
    adapters and a dictionary of their scales.
    """
    names = vars(module).items()
    return {name: x for name, x in names if name not in _NO_SETTINGS and _is_setting(x)}


def _is_setting(x: Any, depth: int = 4) -> bool:
    if isinstance(x, Mapping):
        x = [*x, *x.values()]
    if isinstance(x, list | tuple | Set):
        return depth > 0 and all(_is_setting(y, depth - 1) for y in x)
    return x is None or isinstance(x, _VALUES)


class ModelWatch:
    """Counts the changes of a model's weights, modules and settings, from one look to the next.

    Passes look before they run. Each look takes a few calls of the interpreter, because decode
    steps do too.

    Attributes:
        weights: how often parameters or buffers were others, or elsewhere, than at the look before.
        numbers: how often they were where they were, with other numbers, as far as torch counts
            this.
        code: how often modules, their classes, settings and other tensors, or the settings of
            configurations, were others. A module's own forward counts as a hook.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.weights = self.numbers = self.code = 0
        self._take()

    def look(self) -> None:
        """Compare the model with the last look, and count the changes."""
        weights, code = self._has_other_weights(), self._has_other_code()
        numbers = self._versions() != self._numbers
        if weights or code or numbers:
            self._take()
        self.weights += weights
        self.code += code
        self.numbers += numbers

    def accept(self) -> None:
        """Take the present state without counting: a forward has changed it, and nobody else."""
        if self._has_other_code() or self._has_other_weights():
            self._take()

    def _take(self) -> None:
        parts = [with_base(module)[-1] for module in self._model.modules()]
        self._attributes = [vars(part) for part in parts]
        # what is empty is read by no code, except in a container, whose parent reads what is added
        self._tensors: list[dict[str, Any]] = [
            x
            for part in parts
            for x in (part._parameters, part._buffers)
            if x or isinstance(part, _CONTAINERS)
        ]
        self._children = [
            part._modules for part in parts if part._modules or isinstance(part, _CONTAINERS)
        ]
        self._parts = parts
        self._classes = [*{type(part) for part in parts}]
        self._other_tensors = [
            (names, name)
            for names in self._attributes
            for name, x in names.items()
            if isinstance(x, Tensor)
        ]
        configs = [names.get("config") for names in self._attributes]
        owners = (*parts, *{id(x): x for x in configs if isinstance(x, PreTrainedConfig)}.values())
        found = [(vars(x), names) for x in owners if (names := _settings(x))]
        self._settled = [names for names, _ in found]
        self._readers = [itemgetter(*names) for _, names in found]
        self._settings = copy.deepcopy(self._current_settings())  # with its own collections
        self._weights = self._current_weights()
        # of subclasses of tensors the object has to do
        self._plain = [x for x in self._weights if type(x) in (Tensor, nn.Parameter)]
        self._counted = [x for x in self._plain if not x.is_inference()]
        self._addresses, self._numbers = [*map(Tensor.data_ptr, self._plain)], self._versions()
        self._code = self._current_code()

    def _has_other_weights(self) -> bool:
        current = self._current_weights()
        same = len(current) == len(self._weights) and all(map(is_, current, self._weights))
        return not same or [*map(Tensor.data_ptr, self._plain)] != self._addresses

    def _has_other_code(self) -> bool:
        try:
            current, settings = self._current_code(), self._current_settings()
        except KeyError:  # a setting is gone
            return True
        same = len(current) == len(self._code) and all(map(is_, current, self._code))
        return not same or settings != self._settings

    def _current_weights(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._tensors))]

    def _versions(self) -> list[int]:
        return [*map(attrgetter("_version"), self._counted)]

    def _current_code(self) -> list[Any]:
        return [
            *chain.from_iterable(map(dict.values, self._children)),
            *map(type, self._parts),
            *map(attrgetter("forward"), self._classes),
            *(names[name] for names, name in self._other_tensors),
        ]

    def _current_settings(self) -> list[Any]:
        return [*map(call, self._readers, self._settled)]
