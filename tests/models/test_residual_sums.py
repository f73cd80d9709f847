"""Sums of a block's residual stream and MLP, where one element is far larger than the others."""

import pytest
import torch
from torch import Tensor

from icl_patch.models.residual_sums import is_sum, times

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def streams(dtype: torch.dtype, count: int = 2) -> list[Tensor]:
    """Terms (2, 3, 63), the first token of each with one element thousands of times larger."""
    torch.manual_seed(0)
    terms = [torch.randn(2, 3, 63) for _ in range(count)]
    for term in terms:
        term[:, 0, 5] *= 4000
    return [term.to(dtype) for term in terms]


@dtypes
def test_the_true_numbers_explain_every_element_and_numbers_near_them_do_not(
    dtype: torch.dtype,
) -> None:
    hidden, mlp = streams(dtype)
    total = hidden + mlp
    assert is_sum(total, [hidden, mlp])
    near = 1 + 0.6 * torch.finfo(dtype).eps  # imitates the rounding of the largest element
    assert not is_sum(total, [near * hidden.double(), mlp.double() / near])
    wrong = mlp.clone()
    wrong[0, 0, 6] *= 1.5  # the same token; the error is far below the large element's rounding
    assert not is_sum(total, [hidden, wrong])


@dtypes
def test_sums_in_a_wider_dtype_and_sums_that_are_scaled(dtype: torch.dtype) -> None:
    hidden, mlp = streams(dtype)
    scale = torch.tensor([0.37], dtype=dtype)
    assert is_sum((hidden.double() + mlp.double()).to(dtype), [hidden, mlp])
    assert is_sum((hidden + mlp) * scale, [hidden, mlp], scale)
    assert is_sum(hidden + 0.22 * mlp, [hidden, times(mlp, 0.22)])
    assert is_sum(hidden.float() + mlp, [hidden, mlp])  # a stream in fp32


def test_numbers_that_are_not_finite_are_equal_to_themselves() -> None:
    hidden, mlp = streams(torch.float16)
    hidden[0, 1, 2], hidden[1, 1, 3] = torch.inf, torch.nan
    assert is_sum(hidden + mlp, [hidden, mlp])
    assert not is_sum((hidden + mlp).nan_to_num(), [hidden, mlp])
