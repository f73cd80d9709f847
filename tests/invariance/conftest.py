"""What the tests of batch invariance share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def threads() -> Iterator[None]:
    """Three threads: their shares of a tensor end at odd places, and each has its own scratch
    memory.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
