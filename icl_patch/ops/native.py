"""The native library: C++ and CUDA code behind ``torch.ops.icl_patch``. Importing this module loads
it.

This compiles nothing and touches no device. If the library or its CUDA part is missing,
:mod:`icl_patch.ops` runs the plain torch of :mod:`icl_patch.ops.reference`. It warns once, at the
first call that would have used the library.
"""

import ctypes
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from icl_patch.checks import serve_negated

_LIBRARY = Path(__file__).with_name("_native.so")


def _load() -> str | None:
    """Load the library: None, or the reason why there is none."""
    if not _LIBRARY.exists():
        return (
            f"it was not built: there is no {_LIBRARY}. Install torch and a C++ compiler, then"
            " icl-patch again with pip install --no-build-isolation -e . (otherwise pip builds"
            " without torch, and Python finds no library when it starts in the checkout);"
            " ICL_PATCH_OPS=torch asks for plain torch without this warning"
        )
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        return f"it does not load: {error}"
    return None


_lacking = _load()
_FURTHER = torch.library.Library("icl_patch", "IMPL")


def _text(name: str) -> str:
    if _lacking is not None:
        return ""
    function = getattr(ctypes.CDLL(str(_LIBRARY)), name)
    function.restype = ctypes.c_char_p
    return bytes(function()).decode()


cpu_instructions = _text("icl_patch_cpu_instructions")
"""The instruction set that the CPU drivers use here: ``amx`` (``avx512_bf16`` with the products of
bf16 weights (N, K) on Intel's matrix tiles), ``avx512_bf16``, ``avx512``, ``avx2`` or ``portable``;
empty without the library.

The environment variable ICL_PATCH_CPU, read when the library is loaded, names another one than the
first that the processor has. All of them give the same bits, but in the patched products, which add
up in the processor's own width; where it multiplies bf16 in pairs it takes denormal numbers for 0.
"""
if _lacking is None and not cpu_instructions:
    raise ValueError(
        "expected ICL_PATCH_CPU=amx, avx512_bf16, avx512, avx2 or portable, one that this processor"
        " has and the operating system allows, got"
        f" {os.environ['ICL_PATCH_CPU']!r}"
    )

cuda_architectures = tuple(filter(None, _text("icl_patch_cuda_architectures").split(",")))
"""The compute capabilities there is machine code for, as ``("80", "90")``; empty if the library was
built without CUDA.
"""


def serves(device_type: str) -> bool:
    """Whether the native ops run on a type of device; warns once if only the build lacks them."""
    if _lacking is None and (
        device_type in ("cpu", "meta") or (device_type == "cuda" and cuda_architectures)
    ):
        return True
    if device_type in ("cpu", "cuda") and not torch.compiler.is_compiling():
        _warn(device_type)
    return False


def describe() -> str:
    """The library's instruction set and GPUs in one line, or the reason why it is missing."""
    if _lacking is not None:
        return f"no native library: {_lacking}"
    devices = (
        f"CUDA {', '.join(cuda_architectures)}"
        if cuda_architectures
        else "no CUDA (there was no nvcc)"
    )
    return f"native library for {cpu_instructions} and {devices}"


@cache
def _warn(device_type: str) -> None:
    reason = _lacking or "it was built where there was no nvcc"
    warnings.warn(
        f"icl_patch runs on plain torch for {device_type} tensors; the native library: {reason}",
        stacklevel=5,
    )


def op(name: str, results: Callable[..., Any]) -> Any:
    """An op of the library; None without it. ``results`` returns empty tensors like the op's."""
    if _lacking is not None:
        return None
    if not hasattr(torch.ops.icl_patch, name):
        raise ImportError(f"{_LIBRARY} was built from other sources, without {name}: install again")
    torch.library.register_fake(f"icl_patch::{name}", results)
    serve_negated(_FURTHER, name)
    return getattr(torch.ops.icl_patch, name).default
