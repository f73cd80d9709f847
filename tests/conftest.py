"""What all tests share."""

from collections.abc import Iterator

import pytest
import torch
from support.small import small

from icl_patch import ContextPatcher


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The models are tiny: a second thread costs more than it gives, and much more beside another
    busy process.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama_patcher() -> Iterator[ContextPatcher]:
    """A patcher on a small Llama, shared by tests that leave it as it is."""
    with ContextPatcher(small("llama")) as patcher:
        yield patcher
