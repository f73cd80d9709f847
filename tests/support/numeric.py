"""What the tests of the ops share: dtypes, rounding units, seeded numbers, bits."""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

FLOATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Half the spacing of the dtype's numbers at 1: the largest relative error of one rounding.
UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
ULP = 2.0**-52
# The spacing of the dtype's numbers at 1: errors of rounding are small multiples of it.
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

every_dtype = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def bits(x: Tensor) -> Tensor:
    """The numbers as integers: tells -0 from 0, and a NaN equals itself."""
    return x.contiguous().view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(bits(x), bits(y))


def poisoned(x: Tensor) -> Tensor:
    """The same numbers between NaNs: rows that are further apart and do not begin where a vector
    load would like them to.
    """
    wide = torch.full([size + 3 for size in x.shape], torch.nan, dtype=x.dtype, device=x.device)
    return wide[tuple(slice(1, size + 1) for size in x.shape)].copy_(x)


def by_columns(x: Tensor) -> Tensor:
    """The same numbers with the last but one dimension contiguous, as a Conv1D stores its
    weight.
    """
    return x.mT.contiguous().mT


def in_gaps(x: Tensor) -> Tensor:
    """The same numbers with a NaN after each."""
    wide = torch.full([2 * size for size in x.shape], torch.nan, dtype=x.dtype, device=x.device)
    return wide[tuple(slice(None, None, 2) for _ in x.shape)].copy_(x)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold huge numbers or NaN until they are written: those that torch allocates, and
    those that the native ops do.
    """
    perturb = -6  # glibc's M_PERTURB: allocated bytes are the complement
    allocator = ctypes.CDLL(None)
    assert allocator.mallopt(perturb, 0x80)
    assert (torch.empty(100) > 3e38).all() and (torch.empty(100, dtype=torch.int8) == 127).all()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        allocator.mallopt(perturb, 0)


FLOATING = "expected {} in fp64, fp32, bf16 or fp16, got torch.{}"


def check_refused(error: type, message: str, call: Callable[[], object]) -> None:
    """The error itself, not a subclass, with the message somewhere in it."""
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert type(raised.value) is error
