"""Triton's interpreter, made quicker for a process in which every kernel is interpreted."""

from functools import cache
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def speed_up() -> None:
    """Triton replaces the functions of its language at every call of a device function and puts
    them back after every launch, a third of the time of small launches; here it does so once for
    each function. And it builds a table of dtypes at every look-up.
    """
    look_up: Any = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = look_up(kind)
        return found[name]

    interpreter._get_np_dtype = dtype_of
    replace = interpreter._patch_lang

    @cache
    def replace_once(function: Any) -> SimpleNamespace:
        replace(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = replace_once
