"""Memory stays constant over thousands of cycles."""

import gc
import resource
from pathlib import Path

import pytest
import torch
from support.random_models import build
from torch import Tensor

from icl_patch import ContextPatcher


def resident_bytes() -> int:
    """Of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


@pytest.mark.stress
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("update", ["stable", "exact"])
def test_two_thousand_cycles_take_no_more_memory(update: str) -> None:
    """Of compute, forward and generate, after a tenth of them has filled the caches."""
    generator = torch.Generator().manual_seed(0)
    sizes: list[int] = []

    def random_ids(columns: int) -> Tensor:
        return torch.randint(3, 90, (2, columns), generator=generator)

    with ContextPatcher(build("llama"), update) as patcher:
        for cycle in range(2000):
            patch = patcher.compute(random_ids(9), random_ids(3))
            patcher.forward(patch.kept_ids, patch)
            for step in patcher.generate(random_ids(7), max_new_tokens=2, eos_token_id=None):
                assert step.patch.layers
            if cycle % 200 == 199:
                gc.collect()
                sizes.append(resident_bytes())
    # an allocator's arenas may still grow by some MB; one kept patch a cycle would be 100 MB
    assert max(sizes[1:]) - sizes[0] < 16e6, [f"{size / 1e6:.0f} MB" for size in sizes]
