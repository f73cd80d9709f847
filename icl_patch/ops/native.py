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

_OPS = (
    "invert_rmsnorm",
    "stable_scale",
    "patched_linear",
    "record_linear",
    "add_low_rank",
    "expert_linear",
    "read_direction",
    "rms_norm",
    "norm_pair",
    "gated_product",
)
_LIBRARY = Path(__file__).with_name("_native.so")


def _load() -> str | None:
    """Load the library: None, or the reason why there is none."""
    if not _LIBRARY.exists():
        return "it was not built: see the line that the installation printed"
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        return f"it does not load: {error}"
    missing = [name for name in _OPS if not hasattr(torch.ops.icl_patch, name)]
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

The environment variable ICL_PATCH_CPU, read when the library is loaded, names another one. All of
them give the same bits, but in the patched products, which add up in the processor's own width;
where it multiplies bf16 in pairs it takes denormal numbers for 0.
"""
if _lacking is None and not cpu_instructions:
    raise ValueError(
        "expected ICL_PATCH_CPU=avx512_bf16, avx512, avx2 or portable, one that this processor"
        f" has, got {os.environ['ICL_PATCH_CPU']!r}"
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


def _fake(name: str) -> Callable[[Callable[..., Any]], None]:
    """Register the shapes and dtypes that an op returns, for torch.compile and meta tensors.

    Torch also asks it where meta tensors are mixed with others: that is an error.
    """

    def register(results: Callable[..., Any]) -> None:
        def checked(*args: Any, **kwargs: Any) -> Any:
            devices = {x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
            if len(devices) > 1:
                raise RuntimeError(
                    f"expected tensors on one device, got {', '.join(sorted(map(str, devices)))}"
                )
            return results(*args, **kwargs)

        torch.library.register_fake(f"icl_patch::{name}", checked)

    return register


if _lacking is None:

    def _results(
        like: Tensor, hidden_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        batch, n = like.shape
        sizes_and_dtypes = (
            ((batch, n), hidden_dtype),
            ((batch,), torch.float64),
            ((batch, n), torch.float64),
            ((batch,), torch.int8),
            ((batch,), torch.int32),
        )
        hidden, shift, new_scale, status, evaluations = (
            like.new_empty(size, dtype=dtype) for size, dtype in sizes_and_dtypes
        )
        return hidden, shift, new_scale, status, evaluations

    @_fake("invert_rmsnorm")
    def _(
        target: Tensor,
        scale: Tensor,
        rms: Tensor,
        eps: float = 0.0,
        fallback: Tensor | None = None,
        bisection: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return _results(target, torch.float64 if target.dtype == torch.float64 else torch.float32)

    @_fake("stable_scale")
    def _(
        delta: Tensor, scale: Tensor, hidden_down: Tensor, eps: float = 0.0, bisection: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        wide = torch.float64 in (delta.dtype, scale.dtype, hidden_down.dtype)
        return _results(delta, torch.float64 if wide else torch.float32)

    @_fake("patched_linear")
    def _(
        z: Tensor,
        weight: Tensor,
        u: Tensor | None = None,
        v: Tensor | None = None,
        bias: Tensor | None = None,
        index: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return z.new_empty((z.shape[0], weight.shape[0]), dtype=out_dtype or z.dtype)

    @_fake("record_linear")
    def _(
        z_pair: Tensor, weight: Tensor, v: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, n = z_pair.shape[0], weight.shape[0]
        return z_pair.new_empty((rows, n)), z_pair.new_empty((rows // 2, n), dtype=torch.float32)

    @_fake("add_low_rank")
    def _(
        y: Tensor,
        z: Tensor,
        u: Tensor,
        v: Tensor,
        index: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return z.new_empty(y.shape, dtype=out_dtype or y.dtype)

    @_fake("expert_linear")
    def _(
        x: Tensor,
        weight: Tensor,
        expert: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return x.new_empty((*expert.shape, weight.shape[1]), dtype=out_dtype or x.dtype)

    @_fake("read_direction")
    def _(z: Tensor, wide: bool = False) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if wide else torch.float32
        return z.new_empty(z.shape, dtype=dtype), z.new_empty(z.shape[:1], dtype=dtype)

    @_fake("rms_norm")
    def _(
        x: Tensor, scale: Tensor, eps: float, scale_offset: float = 0.0, cast_first: bool = True
    ) -> Tensor:
        return x.new_empty(x.shape)

    @_fake("norm_pair")
    def _(
        hidden: Tensor,
        weight: Tensor,
        eps: float,
        scale_offset: float = 0.0,
        cast_first: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, d = hidden.shape[0] // 2, hidden.shape[1]
        delta, v, inverse_norm2 = (
            hidden.new_empty(size, dtype=torch.float32) for size in ((rows, d), (rows, d), (rows,))
        )
        return hidden.new_empty(hidden.shape), delta, v, inverse_norm2

    @_fake("gated_product")
    def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
        return gate.new_empty(gate.shape)
