"""Generation on a CUDA device: devices do not mix, and the captured step is the eager one."""

import pytest
import torch
from models import build, ragged, tokens

from icl_patch import ContextPatcher, metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fast", [False, True], ids=["two streams", "fast"])
def test_a_captured_step_is_the_eager_one(fast: bool, dtype: torch.dtype) -> None:
    model, ids, mask = build("llama", 1, dtype).cuda(), tokens(7, 3, 9).cuda(), ragged(3, 9, side="left").cuda()
    arguments: dict = {"context_mask": mask, "max_new_tokens": 12, "fast": fast, "eos_token_id": None, "cache_implementation": "static"}
    with ContextPatcher(model, "stable") as patcher:
        eager = list(patcher.generate(ids, **arguments))
        captured = []
        for number, step in enumerate(patcher.generate(ids, graph=True, **arguments)):
            assert metrics.linf(patcher.forward(step.patch.kept_ids, step.patch)[:, -1], step.logits).max() <= (
                1e-4 if dtype == torch.float32 else 0.15
            )
            captured.append((step.token_ids.clone(), step.logits.clone()))
            assert torch.equal(captured[-1][1], eager[number].logits)
        assert all(torch.equal(token_ids, step.token_ids) for (token_ids, _), step in zip(captured, eager, strict=True))
        with pytest.raises(ValueError, match="expected a static cache for a CUDA graph"):
            patcher.generate(ids, graph=True, max_new_tokens=2)


def test_the_exact_step_has_the_models_bits() -> None:
    model, ids = build("gemma3", 1, torch.bfloat16).cuda(), tokens(7, 3, 9).cuda()
    with ContextPatcher(model, "exact") as patcher:
        for step in patcher.generate(ids, max_new_tokens=8, eos_token_id=None, check_every=1):
            assert step.check is not None
            assert step.check.linf.max() == 0
