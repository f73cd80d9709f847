"""The floating dtypes of weights, activations and factors."""

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NARROW = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""Those that the native library and Triton compute in; fp64 takes torch's operators."""


def check_floating(name: str, tensor: Tensor) -> None:
    """The tensor is of a floating dtype that the ops know."""
    if tensor.dtype not in FLOATS:
        raise TypeError(f"expected {name} in fp64, fp32, bf16 or fp16, got {tensor.dtype}")
