"""Static patches of a model on a CUDA device: every tensor is where the model is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import build, tokens
from support.numeric import on_a_gpu
from support.static import random_examples

from icl_patch.static import Distillation, StaticPatch, fit

pytestmark = on_a_gpu
IDS = tokens(4, 2, 6)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_every_way_of_a_static_patch(family: str, tmp_path: Path) -> None:
    examples, texts = random_examples(), tokens(7, 5, 5).tolist()
    options: dict[str, Any] = {
        "rank": 2,
        "preserve": texts,
        "accept_worse": True,
        "distillation": Distillation(steps=4, check_every=2, dtype=torch.float32),
    }
    model = build(family).cuda()
    patch = fit(model, examples, **options)
    on_cpu = fit(build(family), examples, **options)
    assert fit(model, examples, **options, start=on_cpu).rank == 2
    for path, change in patch.changes.items():
        expected = on_cpu.changes[path].dense()
        # fp32 passes on both devices, before gradient steps
        assert (change.dense().cpu() - expected).norm() < 0.05 * expected.norm()
    patch.save(tmp_path / "patch.safetensors")
    loaded = StaticPatch.load(tmp_path / "patch.safetensors", model)
    with torch.no_grad():
        with loaded.applied(model):
            applied = model(IDS.cuda()).logits
        patch.to_peft(tmp_path / "lora", model)
        merged = patch.merge(model)(IDS.cuda()).logits
    limit = 1e-4 * applied.abs().max()
    assert (merged - applied).abs().max() <= limit
