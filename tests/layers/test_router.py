"""Routers, which choose the experts: the patch changes their logits."""

import copy

import pytest
import torch
from support.numeric import normal, seeded
from support.random_models import shallow

from icl_patch.layers.router import PatchedRouter
from icl_patch.models.block_detection import blocks_of


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "granitemoe"])
@torch.no_grad()
def test_a_patched_router_is_the_router_with_the_changed_matrix(family: str) -> None:
    """Logits, experts and their weights, of a patch for each row; without one it is the router."""
    model, generator = shallow(family), seeded(0)
    paths = (block.path_of(name) for block in blocks_of(model) for name in block.spec.routers)
    base = model.get_submodule(next(paths))
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
    delta = u[0]  # as the change of a bias it is u vᵀ with v z = 1
    router.set_patch(delta.expand(5, -1), z / z.square().sum(-1, keepdim=True))
    expected = router(z)
    router.set_bias_change(delta)
    for got, wanted in zip(router(z), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert any(
        not torch.equal(x, y) for x, y in zip(found, plain, strict=True) if x.dtype == torch.int64
    )
