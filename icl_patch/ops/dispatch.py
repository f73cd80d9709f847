"""Which implementation serves a product: Triton's kernels, the native library or plain torch.

``ICL_PATCH_OPS`` in the environment says it for all calls: ``auto`` (the default: Triton on CUDA,
the native library on the CPU), ``torch`` (the specification, :mod:`icl_patch.ops.reference`,
everywhere) or ``triton`` (also on the CPU, in Triton's interpreter).
"""

import logging
import os
import sys
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from icl_patch.ops import native

STREAM, TILE = "stream", "tile"
_STREAM_ROWS = 16
_STREAM_ROWS_BESIDE_AMX = 4
_NARROW = frozenset((torch.float32, torch.bfloat16, torch.float16))

wanted = os.environ.get("ICL_PATCH_OPS") or "auto"
if wanted not in ("auto", "torch", "triton"):
    raise ValueError(f"expected ICL_PATCH_OPS=auto, torch or triton, got {wanted!r}")


def _cpu_stream_rows(matrix_units: str, kernels: str) -> int:
    """Up to how many rows a streamed product is faster than torch's own in a narrow dtype."""
    if wanted == "triton":
        return _STREAM_ROWS
    if getattr(torch.cpu, matrix_units, lambda: False)():
        return _STREAM_ROWS_BESIDE_AMX
    if (
        native.cpu_instructions.startswith("avx")
        and not getattr(torch.ops.mkldnn, kernels, lambda: True)()
    ):
        return sys.maxsize  # torch multiplies number by number
    return _STREAM_ROWS


_CPU_STREAM_ROWS = {
    torch.bfloat16: _cpu_stream_rows("_is_amx_tile_supported", "_is_mkldnn_bf16_supported"),
    torch.float16: _cpu_stream_rows("_is_amx_fp16_supported", "_is_mkldnn_fp16_supported"),
}


@cache
def _kernels() -> Any:
    """:mod:`icl_patch.kernels`, or None where there is no Triton."""
    try:
        return import_module("icl_patch.kernels")
    except ImportError as error:
        logging.getLogger(__name__).warning(
            "icl_patch runs on plain torch: its kernels need triton, %s", error
        )
        return None


def triton_for(z: Tensor, *others: Tensor | None, out_dtype: torch.dtype | None = None) -> Any:
    """Triton's kernels if they serve these tensors, else None; they have no derivatives forwards,
    and no torch.func sees into them.
    """
    if forward_ad._current_level >= 0 or is_transformed():
        return None
    if not (z.is_cuda if wanted == "auto" else wanted == "triton") or not _are_narrow(
        z, *others, out_dtype=out_dtype
    ):
        return None
    return _kernels()


def native_for(z: Tensor, *others: Tensor | None, out_dtype: torch.dtype | None = None) -> Any:
    """``torch.ops.icl_patch`` if its CPU drivers serve tensors of these dtypes, else None; they
    have no gradients.
    """
    on_cpu = z.is_cpu
    if not (on_cpu or z.is_meta) or not _are_narrow(z, *others, out_dtype=out_dtype):
        return None
    for tensor in others:  # torch would send a mixed call to whichever device comes first with it
        if tensor is not None and not (tensor.is_cpu if on_cpu else tensor.is_meta):
            return None
    if wants_gradients(z, *others):
        return None
    return native_on("cpu")


def native_on(device_type: str) -> Any:
    """``torch.ops.icl_patch`` if native ops are wanted and serve such a device, else None; for any
    dtype, without gradients.
    """
    return torch.ops.icl_patch if wanted != "torch" and native.serves(device_type) else None


def at_once(z: Tensor) -> Any:
    """``torch.ops.icl_patch`` where an op may be tried before anything but z was looked at, else
    None.

    It checks its arguments as it goes and raises a RuntimeError: then what does not fit is to be
    said, or it is to be served otherwise. Python that stands before a kernel is slow in a decode
    step, whose weights have driven it out of the caches.
    """
    if (
        not z.is_cpu
        or wanted != "auto"
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or not native.is_loaded
    ):
        return None
    if forward_ad._current_level >= 0:
        return None
    return torch.ops.icl_patch


def is_traced() -> bool:
    """Whether what is called now is being written down, to run on other numbers."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_transformed() -> bool:
    """Whether ``torch.func`` looks at what is called now."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def wants_gradients(*tensors: Tensor | None) -> bool:
    """Whether a derivative may be asked for, backwards or forwards."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:  # not any(), as below
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _are_narrow(*tensors: Tensor | None, out_dtype: torch.dtype | None) -> bool:
    """Whether fp32 is wide enough to accumulate in."""
    for tensor in tensors:  # not any(): this stands before every op of a decoding step
        if tensor is not None and tensor.dtype not in _NARROW:
            return False
    return out_dtype is None or out_dtype in _NARROW


def regime_of(z: Tensor, rows: int) -> str:
    """``"stream"`` or ``"tile"``: in which of the two products with z's dtype on z's device are
    computed for so many rows.

    Within a regime a row's bits do not depend on the number of rows. On the CPU a tile is a product
    of torch's own, from 17 rows on; in bf16 from 5 rows on where the processor has matrix units,
    and never where torch has no fast product of a dtype (fp16 without AVX512-FP16).
    """
    if rows > (_CPU_STREAM_ROWS.get(z.dtype, _STREAM_ROWS) if z.is_cpu else _STREAM_ROWS):
        return TILE
    return STREAM
