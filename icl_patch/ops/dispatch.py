"""The choice of an op's implementation: the native library, Triton's kernels or plain torch.

Every op is an :class:`Op`, which tries its implementations in a fixed order. The environment
variable ``ICL_PATCH_OPS`` restricts all ops. ``auto``, the default, means Triton on CUDA and the
native library on the CPU. ``torch`` means :mod:`icl_patch.ops.reference` everywhere. ``triton``
means Triton on the CPU too, in its interpreter.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from icl_patch.checks import Arguments, is_transformed
from icl_patch.dtypes import NARROW
from icl_patch.ops import native

backend = os.environ.get("ICL_PATCH_OPS") or "auto"
if backend not in ("auto", "torch", "triton"):
    raise ValueError(f"expected ICL_PATCH_OPS=auto, torch or triton, got {backend!r}")


def _kernels() -> Any:
    """:mod:`icl_patch.kernels`, or None where there is no Triton."""
    if not is_compiling():
        return _load_kernels()
    if not _has_kernels():
        return None
    # torch.compile has guards for what a statement imports
    from icl_patch import kernels  # noqa: PLC0415

    return kernels


@torch.compiler.assume_constant_result
def _has_kernels() -> bool:
    return _load_kernels() is not None


@cache
def _load_kernels() -> Any:
    try:
        return import_module("icl_patch.kernels")
    except ImportError as error:
        logging.getLogger(__name__).warning(
            "icl_patch runs on plain torch: its kernels need triton (pip install"
            " 'icl-patch[gpu]'), %s",
            error,
        )
        return None


def wants_gradients(args: tuple[Any, ...]) -> bool:
    """Whether autograd may ask for a derivative of these tensors, backwards or forwards."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for x in args:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def constants(*args: Any) -> tuple[Any, ...]:
    """The arguments of an op without derivatives: its results are constants to autograd, backwards
    and forwards.
    """
    if not wants_gradients(args):
        return args
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in args)


def _is_narrow(args: tuple[Any, ...]) -> bool:
    """Whether fp32 is wide enough to accumulate in, for all floating tensors and output dtypes."""
    for x in args:  # not any(): this runs before every launch of a decode step
        dtype = x.dtype if isinstance(x, Tensor) else x
        if isinstance(dtype, torch.dtype) and dtype not in NARROW and dtype.is_floating_point:
            return False
    return True


def triton_for(args: tuple[Any, ...]) -> Any:
    """Triton's kernels if they accept these arguments, else None.

    They have no derivatives, and transforms of torch.func cannot trace them.
    """
    if not (args[0].is_cuda if backend == "auto" else backend == "triton"):
        return None
    if wants_gradients(args) or is_transformed() or not _is_narrow(args):
        return None
    return _kernels()


def native_takes(args: tuple[Any, ...], *, fp64: bool = False) -> bool:
    """Whether the native library's CPU ops accept these arguments. The ops have no derivatives, and
    most of them compute in fp32.
    """
    here = args[0].is_cpu or args[0].is_meta
    return (
        here and (fp64 or _is_narrow(args)) and not wants_gradients(args) and native_serves("cpu")
    )


def native_serves(device_type: str) -> bool:
    """Whether native ops may and can run on a type of device."""
    return backend != "torch" and native.serves(device_type)


def has_kernels(device_type: str) -> bool:
    """Whether products on a type of device run in our kernels and not in torch's."""
    return has_triton(device_type) or (device_type == "cpu" and native_serves("cpu"))


def has_triton(device_type: str) -> bool:
    """Whether products on a type of device run in Triton's kernels."""
    chosen = backend == "triton" or (device_type == "cuda" and backend == "auto")
    return chosen and _kernels() is not None


@dataclass(frozen=True)
class Op:
    """An op and its implementations: a call runs one of them.

    name: the op's name in ``torch.ops.icl_patch``, and the name of the kernel's function in
        :mod:`icl_patch.kernels`. The native op's positional arguments are ``args``. All other
        functions get ``options`` too, Triton's own in their order.
    check: raises an error for arguments that no implementation accepts.
    reference: computes the op in plain torch.
    native_if: a further condition for the native op, besides device, dtypes and derivatives.
    native_fp64: whether the native op computes in fp64 too.
    triton_if: a further condition for Triton's kernel. It checks its arguments itself, on a GPU
        once for all tensors of the same sizes, strides, dtypes and devices.
    triton: calls the kernel if its arguments or results differ from the native op's; its first
        argument is :mod:`icl_patch.kernels`.
    """

    name: str
    check: Arguments
    reference: Callable[..., Any]
    native_if: Callable[..., bool] | None = None
    native_fp64: bool = False
    triton_if: Callable[..., bool] | None = None
    triton: Callable[..., Any] | None = None
    _native: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_native", native.op(self.name, self.check.results))

    def __call__(self, *args: Any, **options: Any) -> Any:
        """In eager inference on the CPU, the native op before its arguments are checked. Else
        Triton's kernel, the native op or plain torch: the first that serves the arguments.

        The native op checks its arguments itself and raises a RuntimeError. Then the error is
        raised in Python's words, or another implementation serves the call. In a decode step Python
        code before a kernel is slow, because the weights have displaced it from the processor's
        caches.
        """
        native_fits = self.native_if is None or self.native_if(*args, **options)
        if (
            native_fits
            and args[0].is_cpu
            and backend == "auto"
            and not torch.is_grad_enabled()
            and not is_compiling()
            and self._native is not None
            and forward_ad._current_level < 0
        ):
            try:
                return self._native(*args)
            except RuntimeError:
                pass
        kernels = triton_for(args)
        if kernels is not None and (self.triton_if is None or self.triton_if(*args, **options)):
            if self.triton is not None:
                return self.triton(kernels, *args, **options)
            return getattr(kernels, self.name)(*args, *options.values())
        self.check(*args, **options)
        if native_fits and native_takes(args, fp64=self.native_fp64):
            return self._native(*map(_as_native, args))
        if args[0].is_meta or not torch.is_autocast_enabled(args[0].device.type):
            return self.reference(*args, **options)
        with torch.autocast(args[0].device.type, enabled=False):  # the kernels do not see it
            return self.reference(*args, **options)


def _as_native(x: Any) -> Any:
    """An argument as the native ops take it: integers as contiguous int64."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.dtype == torch.bool:
        return x
    return x.to(torch.int64).contiguous()
