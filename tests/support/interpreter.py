"""Triton's interpreter, made quicker and stricter for a process in which every kernel is
interpreted.
"""

import gc
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.guard_pages import between_guards, is_poisoned_around, memory_of
from torch import Tensor
from triton.runtime import interpreter


@cache
def prepare() -> None:
    """The interpreter takes less time, sums products in one order, and puts tensors between guard
    pages.
    """
    gc.set_threshold(50_000, 20, 20)
    _replace_once()
    _multiply_in_order()
    _guard_tensors()


def _replace_once() -> None:
    """Triton replaces the functions of its language at every call of a device function and puts
    them back after every launch; here it does so once for each function.
    """
    replace_language = interpreter._patch_lang

    @cache
    def once(function: Any) -> SimpleNamespace:
        replace_language(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = once


def _multiply_in_order() -> None:
    """An element's bits do not depend on its place in a block. Those of numpy's BLAS do, on
    processors without AVX-512.
    """

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (x.data.astype(d.data.dtype, copy=False) for x in (a, b))
        out = np.zeros_like(d.data)
        for k in range(left.shape[-1]):
            out += left[..., k, None] * right[..., k, None, :]
        return interpreter.TensorHandle(out + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


tensors_begin_behind_guards = False  # or else they end at them


def _guard_tensors() -> None:
    """Every tensor of a kernel ends at a guard page, so that an access behind it kills the process.
    The numbers around a tensor in its own pages are NaN, and have to stay so.
    """
    run: Any = interpreter.GridExecutor.__call__

    def run_guarded(self: Any, *arguments: Any, **options: Any) -> None:
        # a copy would resolve a negation, of which a kernel sees nothing
        assert not any(isinstance(x, Tensor) and x.is_neg() for x in arguments)
        copies = [
            between_guards(x, at_start=tensors_begin_behind_guards) if isinstance(x, Tensor) else x
            for x in arguments
        ]
        run(self, *copies, **options)
        for name, x, copy in zip(self.arg_names, arguments, copies, strict=False):
            if isinstance(x, Tensor):
                assert is_poisoned_around(copy), f"{self.fn.__name__} wrote outside of {name}"
                memory_of(x).copy_(memory_of(copy))

    interpreter.GridExecutor.__call__ = run_guarded
