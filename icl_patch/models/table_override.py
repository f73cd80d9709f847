"""Functions of transformers that are replaced for a while."""

import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn


class TableOverride:
    """A function of transformers that is replaced as long as any thread needs it.

    Args:
        names: the mapping that holds the function. name: its key there. wrap: makes the replacement
            from it.
    """

    def __init__(
        self, names: MutableMapping[str, Any], name: str, wrap: Callable[[Any], Any]
    ) -> None:
        self._names, self._name, self._wrap = names, name, wrap
        self._wrapped, self._made = names[name], wrap(names[name])
        self._before: Any = None
        self._users, self._lock = set[object](), threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within this context the replacement is in force."""
        user = object()
        try:
            with self._lock:
                if not self._users:
                    self._before = self._names[self._name]
                    if self._before is not self._wrapped:  # somebody has put another one there
                        self._wrapped, self._made = self._before, self._wrap(self._before)
                    self._names[self._name] = self._made
                self._users.add(user)
            yield
        finally:
            try:
                self._leave(user)
            except BaseException:  # an interrupt
                self._leave(user)
                raise

    def _leave(self, user: object) -> None:
        """End one use: it may be called again at any place."""
        with self._lock:
            self._users.discard(user)
            if not self._users and self._before is not None:
                self._names[self._name] = self._before
                self._before = None


_of_files: dict[tuple[str, str], TableOverride] = {}
_adding = threading.Lock()


def file_override(module: nn.Module, name: str, wrap: Callable[[Any], Any]) -> list[TableOverride]:
    """The override of the function ``name`` in the source file of the module's class, if it has
    one; always with the same ``wrap``.
    """
    home = vars(sys.modules[type(module).__module__])
    key = home["__name__"], name
    with _adding:
        if name in home and key not in _of_files:
            _of_files[key] = TableOverride(home, name, wrap)
    return [_of_files[key]] if name in home else []
