"""Finding a model's modules by their attributes and by their paths."""

from collections.abc import Collection, Iterable

from torch import nn


def modules_holding(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """The modules of a model, each once, that have one of these attributes of their own.

    Every forward pass asks for them, so this is a third of the time of ``model.modules()``, which
    also makes each module's path.
    """
    found, seen, waiting = [], {model}, [model]
    for module in waiting:  # grows meanwhile
        attributes = vars(module)
        if not attributes.keys().isdisjoint(names):
            found.append(module)
        for child in attributes["_modules"].values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return found


def inside(path: str, outer: str) -> bool:
    """Whether ``path`` is ``outer`` or a module below it."""
    return path == outer or path.startswith(f"{outer}.")


def outermost(paths: Iterable[str]) -> set[str]:
    """The paths that are below none of the others."""
    paths = set(paths)
    return {path for path in paths if not any(inside(path, other) for other in paths - {path})}
