"""Replacing a module by a patched module that wraps it, and putting it back."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import nn

from icl_patch.layers.patched_module import PatchedModule

_Module = TypeVar("_Module", bound=PatchedModule)


def swap(model: nn.Module, path: str, wrap: Callable[[nn.Module], _Module]) -> _Module:
    """Put ``wrap(module)`` in the place of the module at ``path`` and return it."""
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent)
    patched = wrap(getattr(holder, name))
    setattr(holder, name, patched)
    return patched


def restore(roots: Iterable[nn.Module], patched: PatchedModule) -> bool:
    """Put the base module back in every place where the roots hold the patched one, at any depth;
    False if they hold it nowhere.
    """
    holders = [module for root in roots for module in root.modules()]
    places = [
        (holder, name)
        for holder in holders
        for name, child in holder._modules.items()
        if child is patched
    ]
    for holder, name in places:
        setattr(holder, name, patched.base_layer)
    return bool(places)
