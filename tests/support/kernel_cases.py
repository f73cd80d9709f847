"""Arguments for the Triton kernels, and what they should give in fp64; on the CPU where the kernels
are interpreted, else on the GPU.
"""

from functools import partial

import torch
from support import interpreter, linear_cases
from support.linear_cases import LAYOUTS, Case
from support.numeric import UNIT
from torch import Tensor

from icl_patch.kernels import INTERPRETED

if INTERPRETED:
    interpreter.prepare()
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
__all__ = ["DEVICE", "DTYPES", "LAYOUTS", "Case", "check_linear", "linear_case", "rounding"]
linear_case = partial(linear_cases.linear_case, device=DEVICE)


def rounding(dtype: torch.dtype) -> float:
    """The relative error of one rounding: twice as large in Triton's interpreter, which cuts bf16
    off.
    """
    return UNIT[dtype] * (2 if INTERPRETED and dtype == torch.bfloat16 else 1)


def check_linear(case: Case, out: Tensor, out_dtype: torch.dtype) -> None:
    """One rounding to out_dtype on top of sums in fp32."""
    expected, size = case.expected()
    assert (out.dtype, out.shape) == (out_dtype, expected.shape)
    # Matrix units cut off what falls below the running sum's last digit, 8 or 16 products at a
    # time: such errors do not cancel.
    sums = max(32, case.z.shape[1] / 256)
    bound = rounding(out_dtype) * expected.abs() + sums * UNIT[torch.float32] * size
    assert (
        (out.double() - expected).abs() <= 1.01 * bound + torch.finfo(out_dtype).smallest_normal
    ).all()
