"""What all tests share."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The models are tiny: a second thread costs more than it gives, and much more beside another busy process."""
    torch.set_num_threads(1)
