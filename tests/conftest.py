"""What all tests share."""

import gc
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from support.commands import Run, run_command
from support.random_models import build

from icl_patch import ContextPatcher

sys.path.append(str(Path(__file__).parents[1]))  # for tools; last: the package is the installed one

# In processes of their own: begun last, they would keep one core busy and the others waiting.
LONGEST = ("test_in_the_interpreter", "test_on_a_pretended_device", "test_two_ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first."""
    items.sort(key=lambda item: item.name.partition("[")[0] not in LONGEST)


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    """One, here and in subprocesses, unless OMP_NUM_THREADS names more: with tiny models a second
    thread costs more than it gives.
    """
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True, scope="session")
def _garbage() -> None:
    """Collected less often: each search of all objects takes longer than a test, with torch's and
    transformers' modules among them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="module")
def llama_patcher() -> Iterator[ContextPatcher]:
    """A patcher on a small Llama, shared by tests that leave it as it is."""
    with ContextPatcher(build("llama")) as patcher:
        yield patcher


@pytest.fixture
def run(capsys: pytest.CaptureFixture) -> Run:
    """Runs a command of ``icl-patch``: its exit status, and what it wrote to stdout and stderr."""
    return partial(run_command, capsys)
