"""How far two ways to compute the same may differ."""

import torch

# With so few digits rounding alone may choose other tokens, or other experts.
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# The floor is the largest difference of a few samples, and a patched pass rounds in more places.
_NOISE_FLOORS = 10
# The least floor in units of eps: batches may round alike by accident. Over all model classes
# (docs/model_classes.md) the largest error with a smaller floor is 280 units, 3.3e-5.
_LEAST_FLOOR = 32


def rounding_limit(dtype: torch.dtype) -> float:
    """``√eps``, the relative error above which a difference between two ways to compute is no
    rounding.

    Rounding takes the last few digits of a result, a mistake takes the first ones: the limit lies
    half way between. It is 3.5e-4 in fp32, 0.031 in fp16 and 0.088 in bf16. An fp64 model has the
    limit of fp32, because norms and softmax of transformers compute in that.
    """
    return float(torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps ** 0.5)


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype with the fewest digits."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def noise_limit(noise_floor: float) -> float:
    """``10 max(noise floor, 32 eps)``: the largest error of logits, relative to the largest logit,
    that passes for rounding in fp32 and fp64.

    The noise floor is how much the unmodified model's logits vary with batching and caching; a
    patched pass rounds in more places than that. With fp32's eps the limit is at least 3.8e-5.
    """
    eps = float(torch.finfo(torch.float32).eps)
    return _NOISE_FLOORS * max(noise_floor, _LEAST_FLOOR * eps)
