"""Triton kernels, installed as ``icl_patch.kernels``; this directory is never imported under its
own name.

They run on CUDA tensors, and on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1). Importing
this needs triton, touches no device and compiles nothing. Every op is deterministic: no atomic adds
of floats, no tuning at run time, one order of summation that depends on the shapes of the weight,
the dtype and the GPU.
"""

if __name__ == "triton_kernels":
    raise ImportError(
        "import icl_patch.kernels: the top-level name triton_kernels belongs to the Triton"
        " project's own package"
    )

from icl_patch.kernels.ops.attention import attention_pair, decode_attention, write_and_attend
from icl_patch.kernels.ops.direction import read_direction
from icl_patch.kernels.ops.experts import expert_linear
from icl_patch.kernels.ops.gated_product import gated_product
from icl_patch.kernels.ops.linear import patched_linear
from icl_patch.kernels.ops.linear_maps import linear_maps
from icl_patch.kernels.ops.low_rank import add_low_rank
from icl_patch.kernels.ops.norms import norm_pair, rms_norm
from icl_patch.kernels.ops.recording import record_linears
from icl_patch.kernels.ops.rotary import rotary_embedding

__all__ = [
    "add_low_rank",
    "attention_pair",
    "decode_attention",
    "expert_linear",
    "gated_product",
    "linear_maps",
    "norm_pair",
    "patched_linear",
    "read_direction",
    "record_linears",
    "rms_norm",
    "rotary_embedding",
    "write_and_attend",
]
