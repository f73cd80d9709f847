"""Functions of transformers that are replaced for a while."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from torch import nn

_Value = TypeVar("_Value")


class TableOverride:
    """A function of transformers that is replaced as long as any thread needs it.

    Args:
        names: the mapping that holds the function. name: its key there.
        replacement: runs in its place. It gets the function first, then the function's arguments.
    """

    def __init__(
        self, names: MutableMapping[str, Any], name: str, replacement: Callable[..., Any]
    ) -> None:
        self._names, self._name, self._replacement = names, name, replacement
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
                    self._names[self._name] = partial(self._replacement, self._before)
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
                self._put_back(self._before)
                self._before = None

    def _put_back(self, function: Any) -> None:
        """Let the mapping be as it was: one of transformers' tables may have the function from its
        class, and an entry of its own would hide what is registered there later.
        """
        if not isinstance(self._names, dict):
            with suppress(KeyError):  # after an interrupt it is gone
                del self._names[self._name]
            if self._names.get(self._name) is function:
                return
        self._names[self._name] = function


@contextmanager
def overridden(
    overrides: Iterable[TableOverride], variable: ContextVar[_Value], value: _Value
) -> Iterator[None]:
    """Within this context the functions are replaced, and in this thread ``variable``, which the
    replacements look at, has a value.
    """
    token = variable.set(value)
    try:
        with ExitStack() as stack:
            for override in overrides:
                stack.enter_context(override())
            yield
    finally:
        variable.reset(token)


_of_files: dict[tuple[str, str], TableOverride] = {}


def file_override(
    module: nn.Module, name: str, replacement: Callable[..., Any]
) -> list[TableOverride]:
    """The override of the function ``name`` in the source file of the module's class, if it has
    one; always with the same replacement.
    """
    home = vars(sys.modules[type(module).__module__])
    if name not in home:
        return []
    return [_of_files.setdefault((home["__name__"], name), TableOverride(home, name, replacement))]
