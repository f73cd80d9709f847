"""Models on a CUDA device: the main claim and static patches; and models whose layers are on two
devices, or offloaded to the CPU: the bits of one device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.linear_cases import check_linear, check_rows_without_a_patch, linear_case
from support.numeric import UNIT, normal, on_a_gpu, replay_limit, seeded
from support.offload import results
from support.optional import imported
from support.random_models import CASES, FAMILIES, build, case, tokens, two_layers
from support.static import random_examples
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import ContextPatcher, metrics, ops
from icl_patch.static import Distillation, StaticPatch, fit

pytestmark = on_a_gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
CONTEXT, KEPT = tokens(1, 2, 9), tokens(2, 2, 4)
# of fits that are compared between devices
FIT: dict[str, Any] = {
    "rank": 2,
    "preserve": tokens(7, 2, 5).tolist(),
    "accept_worse": True,
    "distillation": Distillation(steps=2, check_every=1, dtype=torch.float32),
}


def on_device(arguments: dict) -> dict:
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("arguments", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_replay_is_bit_identical(family: str, dtype: torch.dtype, arguments: str) -> None:
    with ContextPatcher(build(family, 0, dtype).cuda(), "exact") as patcher:
        patch = patcher.compute(**on_device(case(arguments)))
        logits = patcher.forward(patch.kept_ids, patch)
    assert logits.is_cuda
    assert torch.equal(logits[patch.kept_mask], patch.logits[patch.kept_mask])


@pytest.mark.parametrize("layout", ["row", "row-rank", "shared", "pool"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_of_many_rows(dtype: torch.dtype, layout: str) -> None:
    """Torch's, to which the change is added before the only rounding."""
    few = 16 if dtype == torch.float32 else 32
    case = linear_case(layout, (few + 1, 48, 70), 2, dtype, device="cuda")
    assert [ops.product_path(case.z, rows) for rows in (few, few + 1)] == ["gemv", "gemm"]
    for out_dtype in (dtype, torch.float32):
        for weight in (case.weight, case.weight.T.contiguous().T):
            arguments = case.arguments | {"weight": weight, "out_dtype": out_dtype}
            check_linear(case, ops.patched_linear(**arguments), out_dtype)
    if layout == "pool":
        check_rows_without_a_patch(ops.patched_linear, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_recordings_of_many_rows_are_differences_of_fp32(dtype: torch.dtype) -> None:
    pair, weight = (normal(seeded(i), 80 - i, 70, dtype=dtype).cuda() for i in (0, 10))
    _, u, _ = ops.record_linear(pair, weight)
    ctx, reduced = pair.double().chunk(2)
    size = (ctx.abs() + reduced.abs()) @ weight.double().abs().T
    assert u.dtype == torch.float32
    exact = (ctx - reduced) @ weight.double().T
    assert ((u - exact).abs() <= 64 * UNIT[torch.float32] * size).all()


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
    with ContextPatcher(two_layers("gemma3"), "exact") as patcher:
        patch = patcher.compute(**case("span"))
        back = patch.to("cuda").to("cpu")
        moved, own = (patcher.forward(x.kept_ids, x) for x in (back, patch))
        assert torch.equal(moved, own)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_every_way_of_a_static_patch(family: str, tmp_path: Path) -> None:
    examples = random_examples(count=4)
    model = two_layers(family).cuda()
    patch = fit(model, examples, **FIT)
    on_cpu = fit(two_layers(family), examples, **FIT)
    assert fit(model, examples, **FIT, start=on_cpu).rank == 2
    for path, change in patch.changes.items():
        expected = on_cpu.changes[path].dense()
        # fp32 passes on both devices, before gradient steps
        assert (change.dense().cpu() - expected).norm() < 0.05 * expected.norm()
    patch.save(tmp_path / "patch.safetensors")
    loaded = StaticPatch.load(tmp_path / "patch.safetensors", model)
    with torch.no_grad():
        with loaded.applied(model):
            applied = model(CONTEXT.cuda()).logits
        patch.to_peft(tmp_path / "lora", model)
        merged = patch.merge(model)(CONTEXT.cuda()).logits
    limit = 1e-4 * applied.abs().max()
    assert (merged - applied).abs().max() <= limit


def spread(model: PreTrainedModel, other: str) -> PreTrainedModel:
    """Every second block of a model on another device than the rest."""
    names = [name for name, _ in model.model.named_children() if name != "layers"]
    device_map = dict.fromkeys(["lm_head", *(f"model.{name}" for name in names)], "cuda:0")
    for number in range(len(model.model.layers)):
        device_map[f"model.layers.{number}"] = other if number % 2 else "cuda:0"
    return imported("accelerate").dispatch_model(model, device_map)


@pytest.mark.parametrize("update", ["direct", "stable", "exact"])
@pytest.mark.parametrize("family", ["gemma3", "llama"])
@pytest.mark.parametrize(
    "other", [pytest.param("cuda:1", marks=needs_two, id="two_devices"), "cpu"]
)
def test_the_bits_of_one_device_spread_or_offloaded(
    other: str, family: str, update: str, tmp_path: Path
) -> None:
    ids = CONTEXT.cuda(), KEPT.cuda()
    expected, expected_file = results(two_layers(family).cuda(), update, ids, tmp_path / "x")
    got, file = results(spread(two_layers(family), other), update, ids, tmp_path / "y")
    assert file == expected_file
    assert all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(got, expected, strict=True))


@needs_two
def test_a_static_patch_fitted_on_two_devices() -> None:
    models = (two_layers("llama").cuda(), spread(two_layers("llama"), "cuda:1"))
    fits = [fit(model, random_examples(count=4), **FIT) for model in models]
    for path, change in fits[0].changes.items():
        assert torch.equal(change.dense().cpu(), fits[1].changes[path].dense().cpu())
