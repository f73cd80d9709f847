"""How far two ways to compute the same may differ."""

import torch


def rounding_limit(dtype: torch.dtype) -> float:
    """``√eps``, the relative error above which a difference between two ways to compute is no
    rounding.

    Rounding takes the last few digits of a result, a mistake takes the first ones: the limit lies
    half way between. It is 3.5e-4 in fp32, 0.031 in fp16 and 0.088 in bf16. An fp64 model has the
    limit of fp32, because norms and softmax of transformers compute in that.
    """
    return float(torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps ** 0.5)
