"""Triton's interpreter, made quicker and stricter for a process in which every kernel is
interpreted.
"""

import gc
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.guard_pages import between_guards, is_poisoned_around, memory_of
from torch import Tensor
from triton.language import core, semantic
from triton.runtime import interpreter


@cache
def prepare() -> None:
    """The interpreter takes half the time, nearly all of which goes to Python objects that are made
    again for each operation, sums products in one order, and puts tensors between guard pages.
    """
    gc.set_threshold(50_000, 20, 20)
    _replace_once()
    _look_up_once()
    _build_types_once()
    _skip_what_does_nothing()
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


def _look_up_once() -> None:
    """Triton builds a table of dtypes at every look-up."""
    look_up: Any = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = look_up(kind)
        return found[name]

    interpreter._get_np_dtype = dtype_of


def _build_types_once() -> None:
    """Block types of the same element and shape share their attributes, and so do tensors of the
    same type, apart from the handle.
    """
    init_type, init_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple, dict[str, Any]] = {}

    def type_once(self: Any, element_ty: Any, shape: Any) -> None:
        # the type keeps its element, so that no other has its id
        key = (id(element_ty), *(getattr(size, "value", size) for size in shape))
        if key not in types:
            init_type(self, element_ty, shape)
            types[key] = vars(self)
        self.__dict__ = types[key]

    def tensor_once(self: Any, handle: Any, kind: Any) -> None:
        if "of_tensors" not in vars(kind):
            init_tensor(self, None, kind)
            kind.of_tensors = dict(vars(self))
        vars(self).update(kind.of_tensors, handle=handle)

    core.block_type.__init__ = type_once
    core.tensor.__init__ = tensor_once


def _skip_what_does_nothing() -> None:
    """Blocks of one shape are not broadcast, and integers are not computed a second time in 64 bits
    for an assertion that only a debugging run makes.
    """
    broadcast: Any = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and [*lhs.type.shape] == [*rhs.type.shape]:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_others
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


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
