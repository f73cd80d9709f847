"""Generation on a CUDA device: devices do not mix, and the captured step is the eager one."""

import warnings
from typing import Any

import pytest
import torch
from support.numeric import noise_floor, noise_limit, on_a_gpu, replay_error
from support.random_models import build, ragged, tokens, two_layers
from torch import Tensor, nn

from icl_patch import ContextPatcher, metrics
from icl_patch.errors import SlowerStepsWarning
from icl_patch.generation import reusable_step
from icl_patch.generation.captured_step import CapturedStep

pytestmark = on_a_gpu
BY_DEFAULT, COMPILED = "auto", True


@pytest.fixture(autouse=True)
def _few_tokens_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for as many tokens as a test has."""
    monkeypatch.setattr(reusable_step, "_FEW", 2)


def captured_step(patcher: ContextPatcher) -> CapturedStep:
    """The only graph that is kept."""
    (step,) = patcher.plans.reusable_steps.values()
    run: Any = step.run._run_values
    assert isinstance(run, CapturedStep)
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compile", [BY_DEFAULT, COMPILED], ids=["by default", "compiled"])
@pytest.mark.parametrize(
    "mode", ["two_stream", "shared_cache"], ids=["two streams", "shared cache"]
)
def test_a_captured_step_is_the_eager_one(
    mode: str, compile: bool | str, dtype: torch.dtype
) -> None:
    """Captured once, for the next context too; rows that end at different steps; logits and patches
    outlive their steps, and a generation that nobody finishes.
    """
    model = two_layers("llama", dtype).cuda()
    # 10 floors of bf16 are everything
    near = noise_limit(model) if dtype == torch.float32 else 2 * noise_floor(model)
    with ContextPatcher(model, "stable") as patcher:
        graphs = []
        for seed in (7, 8):
            ids, mask = tokens(seed, 3, 9).cuda(), ragged(3, 9, side="left").cuda()
            arguments: dict = {"max_new_tokens": 4, "mode": mode, "context_mask": mask}
            first = next(patcher.generate(ids, compile=False, eos_token_id=None, **arguments))
            arguments |= {"eos_token_id": int(first.token_ids[1]), "pad_token_id": 0}
            eager = list(patcher.generate(ids, compile=False, **arguments))
            made = list(patcher.generate(ids, compile=compile, **arguments))
            cancelled = patcher.generate(ids, compile=compile, **arguments)
            for _ in range(len(made) - 1):
                next(cancelled)  # over the same buffers
            cancelled.close()  # type: ignore[attr-defined]
            graphs.append(captured_step(patcher))
            assert len(made) == len(eager) or dtype != torch.float32
            for step, expected in zip(made, eager, strict=False):
                assert replay_error(patcher, step)[step.live].max() <= near
                if dtype == torch.float32:  # a token of bf16 may differ, and all that follow
                    assert torch.equal(step.live, expected.live)
                    assert torch.equal(step.token_ids, expected.token_ids)
                    assert metrics.linf(step.logits, expected.logits).max() <= near
        assert graphs[0] is graphs[1]
        assert patcher.step_source is not None


@pytest.mark.parametrize("compile", [False, BY_DEFAULT, COMPILED], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_exact_step_has_the_bits_of_its_replay(dtype: torch.dtype, compile: bool | str) -> None:
    model, ids = two_layers("gemma3", dtype).cuda(), tokens(7, 3, 9).cuda()
    with ContextPatcher(model, "exact") as patcher:
        arguments: dict = {"max_new_tokens": 4, "eos_token_id": None, "compile": compile}
        steps = list(patcher.generate(ids, **arguments))
        assert not any(replay_error(patcher, step).any() for step in steps)
        if compile:
            assert {step.mode for step in steps} == {"shared_cache"}
            captured_step(patcher)


class ThroughTheHost(nn.Embedding):
    """What no graph can hold."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).cpu().to(ids.device)


def test_what_cannot_be_captured_runs_without_a_graph() -> None:
    """With one warning, which says why; what does not pay, without one."""
    model, ids = build("llama", 1, num_hidden_layers=1).cuda(), tokens(7, 2, 5).cuda()
    embedding: Any = model.get_input_embeddings()
    arguments: dict = {"max_new_tokens": 4, "eos_token_id": None}
    with ContextPatcher(model, "stable") as patcher:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(patcher.generate(ids, max_new_tokens=1))
        assert not patcher.plans.reusable_steps
        expected = list(patcher.generate(ids, compile=False, **arguments))
    embedding.__class__ = ThroughTheHost
    warned = pytest.warns(SlowerStepsWarning, match="are no CUDA graph.*: .*captur")
    with ContextPatcher(model, "stable") as patcher, warned as found:
        made = list(patcher.generate(ids, **arguments))
        list(patcher.generate(ids, **arguments))
    assert len(found) == 1
    for step, other in zip(made, expected, strict=True):
        assert metrics.linf(step.logits, other.logits).max() <= noise_limit(model)
