"""Models whose layers are on two CUDA devices, or offloaded to the CPU: the bits of one device."""

from pathlib import Path

import pytest
import torch
from support.models import build, tokens
from support.numeric import on_a_gpu
from support.offload import imported_accelerate, results
from support.static import random_examples
from transformers import PreTrainedModel

from icl_patch.static import Distillation, fit

pytestmark = on_a_gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
CONTEXT, KEPT = tokens(1, 2, 9), tokens(2, 2, 4)


def spread(model: PreTrainedModel, other: str) -> PreTrainedModel:
    """Every second block of a model on another device than the rest."""
    names = [name for name, _ in model.model.named_children() if name != "layers"]
    device_map = dict.fromkeys(["lm_head", *(f"model.{name}" for name in names)], "cuda:0")
    for number in range(len(model.model.layers)):
        device_map[f"model.layers.{number}"] = other if number % 2 else "cuda:0"
    return imported_accelerate().dispatch_model(model, device_map)


@pytest.mark.parametrize("update", ["direct", "stable", "exact"])
@pytest.mark.parametrize("family", ["gemma3", "llama"])
@pytest.mark.parametrize(
    "other", [pytest.param("cuda:1", marks=needs_two, id="two_devices"), "cpu"]
)
def test_the_bits_of_one_device_spread_or_offloaded(
    other: str, family: str, update: str, tmp_path: Path
) -> None:
    ids = CONTEXT.cuda(), KEPT.cuda()
    expected, expected_file = results(build(family).cuda(), update, ids, tmp_path / "x")
    got, file = results(spread(build(family), other), update, ids, tmp_path / "y")
    assert file == expected_file
    assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(got, expected, strict=True))


@needs_two
def test_a_static_patch_fitted_on_two_devices() -> None:
    distillation = Distillation(steps=4, check_every=2, dtype=torch.float32)
    fits = [
        fit(
            model,
            random_examples(),
            rank=2,
            preserve=tokens(7, 5, 5).tolist(),
            accept_worse=True,
            distillation=distillation,
        )
        for model in (build("llama").cuda(), spread(build("llama"), "cuda:1"))
    ]
    for path, change in fits[0].changes.items():
        assert torch.equal(change.dense().cpu(), fits[1].changes[path].dense().cpu())
