"""Whether a tensor is the sum of others, decided element by element and to the last bit.

A norm of the difference would not do. In a trained model one element can be a thousand times larger
than all others; the norm then is the rounding error of that element, which a wrong sum can imitate.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def times(x: Tensor, factor: float) -> Tensor:
    """``factor · x`` in the dtype of x, as a model computes it."""
    return x if factor == 1 else factor * x


def is_sum(total: Tensor, terms: Sequence[Tensor], scale: Tensor | float = 1.0) -> bool:
    """Whether ``scale · Σ terms`` is ``total`` to the last bit of every element, in some order in
    which a model may add the terms up.

    Tensors of one number of elements, in any shape. NaN counts as equal to NaN.
    """
    if any(term.numel() != total.numel() for term in terms):
        return False
    for computed in _computed(total.dtype, [term.reshape(total.shape) for term in terms]):
        if isinstance(scale, Tensor):
            computed = (computed * scale).to(total.dtype)
        if torch.allclose(computed, total, rtol=0, atol=0, equal_nan=True):
            return True
    return False


def _computed(dtype: torch.dtype, terms: Sequence[Tensor]) -> Iterator[Tensor]:
    """The sum in ``dtype``, in every order: each addition rounded to the dtype of its terms or to
    that of the sum, or the whole sum once.
    """
    wide = torch.float32 if dtype.itemsize < 4 else torch.float64
    for kind in (terms, [x.to(dtype) for x in terms], [x.to(wide) for x in terms]):
        for total in _orders(kind):
            yield total.to(dtype)


def _orders(terms: Sequence[Tensor]) -> Iterator[Tensor]:
    """The sum of the terms, in every order of additions."""
    if len(terms) == 1:
        yield terms[0]
        return
    first, others = terms[0], terms[1:]
    for chosen in range(2 ** len(others) - 1):  # which of the others are added to the first term
        left = [first, *(x for bit, x in enumerate(others) if chosen >> bit & 1)]
        right = [x for bit, x in enumerate(others) if not chosen >> bit & 1]
        for x in _orders(left):
            for y in _orders(right):
                yield x + y
