"""Routers, which choose the experts of a mixture: the patch changes their logits."""

import copy

import pytest
import torch
from support.numeric import normal, seeded
from support.random_models import EXPERTS, case, of_the_zoo, shallow, tokens
from torch import nn

from icl_patch import ContextPatcher
from icl_patch.evaluation import tiny_models
from icl_patch.layers.router import PatchedRouter
from icl_patch.models.block_detection import blocks_of

FAMILIES = [name for name in EXPERTS if "parallel" not in tiny_models.SUPPORTED[name].note]


def router_of(family: str) -> nn.Module:
    """The first of a model of the zoo."""
    model = shallow(family)
    path = next(f"{block.path}.{name}" for block in blocks_of(model) for name in block.spec.routers)
    return model.get_submodule(path)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "granitemoe"])
@torch.no_grad()
def test_a_patched_router_is_the_router_with_the_changed_matrix(family: str) -> None:
    """Logits, experts and their weights, of a patch for each row; without one it is the router."""
    base, generator = router_of(family), seeded(0)
    n, k = base.weight.shape
    z, v = (normal(generator, 5, k, dtype=torch.float32) for _ in range(2))
    u = normal(generator, 5, n, dtype=torch.float32) / 4
    router = PatchedRouter(base)
    plain = base(z)
    assert all(map(torch.equal, router(z), plain))
    router.set_patch(u, v)
    found = router(z)
    for row in range(5):
        changed = copy.deepcopy(base)
        changed.weight += torch.outer(u[row], v[row])
        for got, expected in zip(found, changed(z[row : row + 1]), strict=True):
            torch.testing.assert_close(got[row : row + 1], expected)
    assert any(
        not torch.equal(x, y) for x, y in zip(found, plain, strict=True) if x.dtype == torch.int64
    )


@pytest.mark.parametrize("family", of_the_zoo(FAMILIES))
def test_an_unpatched_router_chooses_other_experts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What identical choices are worth: without the routers' part of the patch many are others."""
    model, arguments = shallow(family, 0), case("span", 0)
    with ContextPatcher(model, "exact") as patcher:
        assert not patcher.compute(**arguments).report.experts_changed.any()
        monkeypatch.setattr(
            "icl_patch.recording.block_math.reader_update", lambda y_ctx, y: torch.zeros_like(y)
        )
        report = patcher.compute(**arguments).report
    assert (report.experts_changed > 0).sum() > 3


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "granitemoe"])
def test_a_replay_has_the_bits_of_its_step(family: str) -> None:
    """In bf16 a router's ties are decided by rounding: a replay that rounds otherwise would choose
    experts that have no factors.
    """
    for seed, rows in enumerate((2, 66)):
        with ContextPatcher(shallow(family, seed, torch.bfloat16), "stable") as patcher:
            for step in patcher.generate(
                tokens(seed, rows, 8), max_new_tokens=3, mode="auto", eos_token_id=None
            ):
                assert step.mode == "two_stream"
                assert torch.equal(patcher.attached_model.replay(step.patch)[0][:, -1], step.logits)
