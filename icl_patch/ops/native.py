"""The native library: C++ and CUDA behind ``torch.ops.icl_patch``, loaded when this module is
imported.

Nothing is compiled and no device is touched here. Where the library or its CUDA part is missing,
:mod:`icl_patch.ops` runs the plain torch of :mod:`icl_patch.ops.reference` and says so once, at the
first call that would have used it.
"""

import ctypes
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LIBRARY = Path(__file__).with_name("_native.so")


def _inversion(like: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The results for rows like these, in fp64 where a tensor is."""
    is_wide = torch.float64 in (like.dtype, *(x.dtype for x in others))
    rows = like.shape[:1]
    return (
        like.new_empty(like.shape, dtype=torch.float64 if is_wide else torch.float32),
        like.new_empty(rows, dtype=torch.float64),
        like.new_empty(like.shape, dtype=torch.float64),
        like.new_empty(rows, dtype=torch.int8),
        like.new_empty(rows, dtype=torch.int32),
    )


def _direction(z: Tensor, wide: bool = False) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if wide else torch.float32
    return z.new_empty(z.shape, dtype=dtype), z.new_empty(z.shape[:1], dtype=dtype)


def _norm_pair(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    delta = hidden.new_empty((hidden.shape[0] // 2, hidden.shape[1]), dtype=torch.float32)
    return hidden.new_empty(hidden.shape), delta, *_direction(delta)


def _product(
    x: Tensor, size: tuple[int, ...] | torch.Size, out_dtype: torch.dtype | None
) -> Tensor:
    return x.new_empty(size, dtype=out_dtype or x.dtype)


_FAKES: dict[str, Callable[..., Any]] = {
    "invert_rmsnorm": lambda target, *_, **__: _inversion(target),
    "stable_scale": lambda delta, scale, hidden_down, *_, **__: _inversion(
        delta, scale, hidden_down
    ),
    "patched_linear": lambda z, weight, u=None, v=None, bias=None, index=None, out_dtype=None: (
        _product(z, (z.shape[0], weight.shape[0]), out_dtype)
    ),
    "record_linear": lambda z_pair, weight, v, bias=None: (
        z_pair.new_empty((z_pair.shape[0], weight.shape[0])),
        z_pair.new_empty((z_pair.shape[0] // 2, weight.shape[0]), dtype=torch.float32),
    ),
    "add_low_rank": lambda y, z, u, v, index=None, out_dtype=None: _product(y, y.shape, out_dtype),
    "expert_linear": lambda x, weight, expert, bias=None, out_dtype=None: _product(
        x, (*expert.shape, weight.shape[1]), out_dtype
    ),
    "read_direction": _direction,
    "rms_norm": lambda x, *_, **__: x.new_empty(x.shape),
    "norm_pair": _norm_pair,
    "gated_product": lambda gate, *_, **__: gate.new_empty(gate.shape),
    "decode_attention": lambda query, _key, value, *_, **__: query.new_empty(
        (*query.shape[:2], value.shape[-1])
    ),
}
"""The shapes and dtypes that the ops return, for torch.compile and for meta tensors."""


def _load() -> str | None:
    """Load the library: None, or the reason why there is none."""
    if not _LIBRARY.exists():
        return (
            "it was not built. Install torch and a C++ compiler, then icl-patch again with"
            " pip install --no-build-isolation (pip builds without torch otherwise);"
            " ICL_PATCH_OPS=torch asks for plain torch without this warning"
        )
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        return f"it does not load: {error}"
    missing = [name for name in _FAKES if not hasattr(torch.ops.icl_patch, name)]
    return (
        f"it was built from other sources, without {', '.join(missing)}: install again"
        if missing
        else None
    )


_lacking = _load()

is_loaded = _lacking is None
"""Whether there is a library; :func:`serves` says for which devices."""


def _text(name: str) -> str:
    if _lacking is not None:
        return ""
    function = getattr(ctypes.CDLL(str(_LIBRARY)), name)
    function.restype = ctypes.c_char_p
    return bytes(function()).decode()


cpu_instructions = _text("icl_patch_cpu_instructions")
"""The instruction set that the CPU drivers use here: ``avx512_bf16``, ``avx512``, ``avx2`` or
``portable``; empty without the library.

The environment variable ICL_PATCH_CPU, read when the library is loaded, names another one, or
``amx``: ``avx512_bf16`` with the products of bf16 weights (N, K) on matrix tiles. Nobody has timed
``amx``, so it is used only if it is named. All of them give the same bits, but in the patched
products, which add up in the processor's own width; where it multiplies bf16 in pairs it takes
denormal numbers for 0.
"""
if _lacking is None and not cpu_instructions:
    raise ValueError(
        "expected ICL_PATCH_CPU=avx512_bf16, avx512, avx2, portable or amx (bf16 products on matrix"
        " tiles, never timed), one that this processor has and the operating system allows, got"
        f" {os.environ['ICL_PATCH_CPU']!r}"
    )

cuda_architectures = tuple(filter(None, _text("icl_patch_cuda_architectures").split(",")))
"""The compute capabilities there is machine code for, as ``("80", "90")``; empty if the library was
built without CUDA.
"""


def serves(device_type: str) -> bool:
    """Whether the native ops run on a type of device; warns once if a build could have them."""
    if _lacking is None and (
        device_type in ("cpu", "meta") or (device_type == "cuda" and cuda_architectures)
    ):
        return True
    if device_type in ("cpu", "cuda") and not torch.compiler.is_compiling():
        _warn(device_type)
    return False


def describe() -> str:
    """The library's instruction set and GPUs, or the reason why there is none, in one line."""
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


def _register_fake(name: str, results: Callable[..., Any]) -> None:
    """Tell torch the shapes and dtypes of an op's results. Torch also asks if meta tensors are
    mixed with others: that is an error.
    """

    def checked(*args: Any, **kwargs: Any) -> Any:
        devices = {x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        if len(devices) > 1:
            raise RuntimeError(
                f"expected tensors on one device, got {', '.join(sorted(map(str, devices)))}"
            )
        return results(*args, **kwargs)

    torch.library.register_fake(f"icl_patch::{name}", checked)


if _lacking is None:
    for _name, _results in _FAKES.items():
        _register_fake(_name, _results)
