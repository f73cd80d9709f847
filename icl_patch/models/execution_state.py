"""What a pass of a model depends on beside its input: its modules, weights, settings and hooks."""

import copy
from collections.abc import Mapping, Set
from itertools import chain, repeat
from operator import attrgetter, call, is_, itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import PreTrainedConfig, PreTrainedModel

from icl_patch.layers.patched_module import with_base

_SCALARS = (bool, int, float, str, torch.dtype, FunctionType, BuiltinFunctionType)
# torch's own attributes of a module, and its forward, of which everybody asks
_NO_SETTINGS = vars(nn.Module()).keys() - {"training"} | {"forward"}


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
            found.append(type(part).forward)
            tensors = [id(x) for x in names.values() if isinstance(x, Tensor)]
            settings = _settings(part).values()
            found += [*tensors, *(x if isinstance(x, _SCALARS) else repr(x) for x in settings)]
    return found


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
    return x is None or isinstance(x, _SCALARS)


class WatchedState:
    """What a model's code may read, as it is now: its modules' weights, children, other tensors and
    settings, those of its configurations, and the forwards.
    """

    def __init__(self, model: nn.Module) -> None:
        parts = [part for module in model.modules() for part in with_base(module)]
        places = [x for part in parts for x in (part._parameters, part._buffers, part._modules)]
        # a patched module shares them with its base
        self._places: list[dict[str, Any]] = [*{id(x): x for x in places}.values()]
        self._attributes = [vars(part) for part in parts]
        self._classes = [*{type(part) for part in parts}]
        self._tensors = [
            (names, name)
            for names in self._attributes
            for name, x in names.items()
            if isinstance(x, Tensor)
        ]
        configs = [names.get("config") for names in self._attributes]
        kinds = (nn.Module, PreTrainedConfig)
        owners = {id(x): x for x in (*parts, *configs) if isinstance(x, kinds)}
        found = [(itemgetter(*names), vars(x)) for x in owners.values() if (names := _settings(x))]
        self._readers, self._with_settings = zip(*found, strict=True)
        self._settings = copy.deepcopy(self._current_settings())  # with its own collections
        self._objects = self._current()
        self._weights = [x for x in self._objects if isinstance(x, Tensor)]
        self._addresses = [*map(Tensor.data_ptr, self._weights)]

    # in few calls of the interpreter: these run before every step

    def _current(self) -> list[Any]:
        forwards = map(dict.get, self._attributes, repeat("forward"))
        return [
            *chain.from_iterable(map(dict.values, self._places)),
            *forwards,
            *map(attrgetter("forward"), self._classes),
            *(names[name] for names, name in self._tensors),
        ]

    def _current_settings(self) -> list[Any]:
        return [*map(call, self._readers, self._with_settings)]

    @property
    def is_unchanged(self) -> bool:
        """Whether all of these are what and where they were."""
        try:
            current, settings = self._current(), self._current_settings()
        except KeyError:  # one is gone
            return False
        return (
            len(current) == len(self._objects)
            and all(map(is_, current, self._objects))
            and settings == self._settings
            and [*map(Tensor.data_ptr, self._weights)] == self._addresses
        )
