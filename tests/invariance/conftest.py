"""What the tests of batch invariance share."""

from collections.abc import Iterator

import pytest
from support.numeric import numbers_of_threads


@pytest.fixture
def threads() -> Iterator[int]:
    """Three threads: their shares of a tensor end at odd places, and each has its own scratch
    memory.
    """
    yield from numbers_of_threads(3)
