"""The ops: functions that have kernels of our own.

Each op is a function of one of the modules here. It checks its arguments, and its errors give the
expected and the actual value. :mod:`icl_patch.ops.dispatch` chooses whether it runs in the native
library, in Triton's kernels or in plain torch (:mod:`icl_patch.ops.reference`, the specification).
"""

from icl_patch.ops.attention import (
    attention_pair,
    decode_attention,
    rotary_embedding,
    write_and_attend,
)
from icl_patch.ops.direction import Direction, read_direction
from icl_patch.ops.dispatch import has_kernels, has_triton
from icl_patch.ops.experts import expert_linear
from icl_patch.ops.gated_product import gated_product, has_gated_product
from icl_patch.ops.inversion import invert_rmsnorm
from icl_patch.ops.linear import (
    add_low_rank,
    gemv_products,
    patched_linear,
    product_path,
    record_linear,
    record_linears,
)
from icl_patch.ops.norms import NormPair, norm_pair, rms_norm, rms_normalize
from icl_patch.ops.reference import InversionStatus, RMSNormInverse
from icl_patch.ops.stable_update import NormRecord, StableScale, record_norm, stable_scale

__all__ = [
    "Direction",
    "InversionStatus",
    "NormPair",
    "NormRecord",
    "RMSNormInverse",
    "StableScale",
    "add_low_rank",
    "attention_pair",
    "decode_attention",
    "expert_linear",
    "gated_product",
    "gemv_products",
    "has_gated_product",
    "has_kernels",
    "has_triton",
    "invert_rmsnorm",
    "norm_pair",
    "patched_linear",
    "product_path",
    "read_direction",
    "record_linear",
    "record_linears",
    "record_norm",
    "rms_norm",
    "rms_normalize",
    "rotary_embedding",
    "stable_scale",
    "write_and_attend",
]
