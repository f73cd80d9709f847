"""Generation on a CUDA device: devices do not mix, and the captured step is the eager one."""

import pytest
import torch
from support.numeric import noise_floor, noise_limit, on_a_gpu, replay_error
from support.random_models import build, ragged, tokens

from icl_patch import ContextPatcher, metrics

pytestmark = on_a_gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize(
    "mode", ["two_stream", "shared_cache"], ids=["two streams", "shared cache"]
)
def test_a_captured_step_is_the_eager_one(mode: str, compiled: bool, dtype: torch.dtype) -> None:
    """Captured once, for the next context too; a compiled one rounds elsewhere."""
    model = build("llama", 1, dtype).cuda()
    # 10 floors of bf16 are everything
    near = noise_limit(model) if dtype == torch.float32 else 2 * noise_floor(model)
    with ContextPatcher(model, "stable") as patcher:
        for seed in (7, 8):
            ids, mask = tokens(seed, 3, 9).cuda(), ragged(3, 9, side="left").cuda()
            arguments: dict = {"max_new_tokens": 5, "mode": mode, "eos_token_id": None}
            arguments["context_mask"] = mask
            eager = list(patcher.generate(ids, **arguments))
            arguments["compile"] = "inductor+cuda_graph" if compiled else "cuda_graph"
            captured: list[tuple[torch.Tensor, torch.Tensor]] = []
            for step in patcher.generate(ids, **arguments):
                assert replay_error(patcher, step).max() <= near
                captured.append((step.token_ids.clone(), step.logits.clone()))
            for (token_ids, logits), expected in zip(captured, eager, strict=True):
                if dtype == torch.float32:  # a token of bf16 may differ, and all that follow
                    assert torch.equal(token_ids, expected.token_ids)
                    assert metrics.linf(logits, expected.logits).max() <= near
        assert len(patcher.plans.compiled) == 1
        step = list(patcher.generate(ids, **arguments))[3]
        with pytest.raises(ValueError, match="before the next step"):
            _ = step.patch


def test_the_exact_step_has_the_models_bits() -> None:
    model, ids = build("gemma3", 1, torch.bfloat16).cuda(), tokens(7, 3, 9).cuda()
    with ContextPatcher(model, "exact") as patcher:
        for step in patcher.generate(ids, max_new_tokens=5, eos_token_id=None):
            assert replay_error(patcher, step).max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compile", ["cuda_graph", "inductor", "inductor+cuda_graph"])
def test_a_captured_exact_step_has_the_bits_of_its_replay(compile: str, dtype: torch.dtype) -> None:
    model, ids = build("gemma3", 1, dtype).cuda(), tokens(7, 3, 9).cuda()
    with ContextPatcher(model, "exact") as patcher:
        arguments: dict = {"max_new_tokens": 8, "eos_token_id": None}
        for step in patcher.generate(ids, compile=compile, **arguments):
            assert step.mode == "shared_cache"
            assert replay_error(patcher, step).max() == 0
