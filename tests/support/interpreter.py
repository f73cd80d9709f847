"""Triton's interpreter, made quicker for a process in which every kernel is interpreted."""

from functools import cache
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def speed_up() -> None:
    """Triton replaces the functions of its language at every call of a device function and puts
    them back after every launch, a third of the time of small launches; here it does so once for
    each function. So with its table of dtypes, which it builds at every look-up.
    """
    replace = interpreter._patch_lang

    @cache
    def replace_once(function: Any) -> SimpleNamespace:
        replace(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = replace_once
