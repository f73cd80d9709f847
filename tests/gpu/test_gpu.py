"""The main claim on a CUDA device."""

import pytest
import torch
from support.models import CASES, FAMILIES, build, case
from support.numeric import on_a_gpu, replay_limit
from torch import Tensor

from icl_patch import ContextPatcher, metrics

pytestmark = on_a_gpu


def on_device(arguments: dict) -> dict:
    return {
        name: value.cuda() if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize("arguments", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_replay_is_bit_identical(family: str, dtype: torch.dtype, arguments: str) -> None:
    with ContextPatcher(build(family, 0, dtype).cuda(), "exact") as patcher:
        patch = patcher.compute(**on_device(case(arguments)))
        logits = patcher.forward(patch.kept_ids, patch)
    assert logits.is_cuda
    assert torch.equal(logits[patch.kept_mask], patch.logits[patch.kept_mask])


@pytest.mark.parametrize("update", ["direct", "stable"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_replay_matches(family: str, update: str) -> None:
    with ContextPatcher(build(family, 0).cuda(), update) as patcher:
        patch = patcher.compute(**on_device(case("prefix")))
        logits = patcher.forward(patch.kept_ids, patch)
        limit = replay_limit(patcher, patch)
    assert metrics.linf(logits, patch.logits)[patch.kept_mask].max() <= limit


def test_a_patch_moves_between_devices() -> None:
    """Factors do not depend on where they lie: a patch computed on the CPU replays there after a
    trip to the device.
    """
    with ContextPatcher(build("gemma3", 0), "exact") as patcher:
        patch = patcher.compute(**case("span"))
        back = patch.to("cuda").to("cpu")
        assert torch.equal(
            patcher.forward(back.kept_ids, back), patcher.forward(patch.kept_ids, patch)
        )
