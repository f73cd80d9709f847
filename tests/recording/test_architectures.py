"""Every block form of the papers on the real classes of transformers, on small random models: a
replay gives the context's logits.
"""

import copy
import inspect

import pytest
import torch
from support.materialise import materialise, read_patch
from support.models import EXPERTS, Stock, case, shallow, tokens
from support.numeric import EPSILON, noise_limit, replay_limit
from torch import Tensor

from icl_patch import ContextPatcher, metrics
from icl_patch.evaluation import tiny_models
from icl_patch.models.block_detection import blocks_of
from icl_patch.models.block_spec import Writer
from icl_patch.recording.sequences import assemble

FP32, BF16 = torch.float32, torch.bfloat16
# Each has a form of block that another family has too: they run with the stress tests.
SAME_FORM = ("glm4", "olmo3", "mistral", "qwen2", "qwen3", "smollm3", "stablelm", "llama-bias")
SAME_FORM += ("cohere", "codegen", "phi", "falcon-7b", "starcoder2", "xglm", "gpt_bigcode")
SAME_FORM += ("mixtral", "olmoe", "cohere2_moe", "llava")
families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.stress] if family in SAME_FORM else [])
        for family in tiny_models.SUPPORTED
    ],
)
# All cases on one seed. The others change the random numbers and nothing else, neither the form nor
# the masks: they run with the stress tests.
CASES = {0: ("single", "span", "prefix", "spans"), 1: ("single", "prefix"), 2: ("span",)}
# fp32 takes the same way through the code as bf16 and has two of them.
CASES_IN_FP32 = ("single", "spans")
SEEDS = [pytest.param(seed, marks=[pytest.mark.stress] if seed else []) for seed in CASES]
KINDS = [
    (FP32, 0),
    (BF16, 0),
    *(pytest.param(BF16, seed, marks=pytest.mark.stress) for seed in CASES if seed),
]


@pytest.mark.parametrize("seed", SEEDS)
@families
def test_direct_and_stable_in_fp32(family: str, seed: int) -> None:
    """But for the model's noise: single tokens and spans of seven, ragged rows, prefixes, several
    absorbed spans.
    """
    model = shallow(family, seed)
    inputs, stock = {name: case(name, seed) for name in CASES[seed]}, Stock(model)
    references = {name: stock.logits(arguments) for name, arguments in inputs.items()}
    scales = any(block.spec.writer is Writer.SCALE for block in blocks_of(model))
    for update in ("direct", "stable") if scales else ("direct",):  # which are the same else
        with ContextPatcher(model, update) as patcher:
            for name, arguments in inputs.items():
                patch = patcher.compute(**arguments)
                logits = patcher.forward(patch.kept_ids, patch)
                mask, reference = patch.kept_mask, references[name]
                assert metrics.linf(logits, reference)[mask].max() <= replay_limit(
                    patcher, patch
                ), (update, name)
                assert metrics.same_argmax(logits, reference)[mask].all(), (update, name)
                blocks = len(patcher.attached_model.blocks)
                assert patch.report.misses.shape == (blocks, *patch.kept_ids.shape)
                assert patch.report.reader_error.max() <= 8 * EPSILON[FP32]
                assert not patch.report.experts_changed.any()


@pytest.mark.parametrize(("dtype", "seed"), KINDS, ids=lambda x: str(x).removeprefix("torch."))
@families
def test_exact_is_bit_identical(family: str, dtype: torch.dtype, seed: int) -> None:
    """Logits and every block's output; and the readers, the experts and the size of the correction
    show that it is no accident.
    """
    model = shallow(family, seed, dtype)
    stock = Stock(model)
    with ContextPatcher(model, "exact") as patcher:
        for name in CASES[seed] if dtype == BF16 else CASES_IN_FP32:
            arguments = case(name, seed)
            reference = stock.logits(arguments)
            computed = patcher.attached_model.compute(assemble(**arguments))
            patch = computed.patch
            logits, all_activations = patcher.attached_model.replay(patch)
            mask = patch.kept_mask
            assert torch.equal(patch.logits[mask], reference[mask]), name
            assert torch.equal(logits[mask], reference[mask]), name
            for activations, wanted in zip(all_activations, computed.activations, strict=True):
                assert torch.equal(activations.output[mask], wanted.output[mask]), name
                check_inside(activations, wanted, mask, dtype)
            assert patch.report.misses.sum() == 0
            assert patch.report.reader_error.max() <= 8 * EPSILON[dtype]
            # a new scale of some hundreds magnifies the norm's rounding
            assert patch.report.correction.max() <= 16 * EPSILON[dtype]
            assert not patch.report.experts_changed.any()


def check_inside(activations: object, wanted: object, mask: Tensor, dtype: torch.dtype) -> None:
    """One block's readers give what they give with the context, and its router chooses the same
    experts.
    """
    for name, y_ctx in wanted.readers.items():
        if y_ctx.shape[-1] > 1:  # one number may be near 0, where nothing is large beside it
            assert (
                metrics.linf(activations.readers[name], y_ctx)[mask].max() <= 8 * EPSILON[dtype]
            ), name
    if wanted.experts is not None:
        assert torch.equal(
            activations.experts[1][mask].sort(-1).values, wanted.experts[1][mask].sort(-1).values
        )


@families
def test_a_materialised_token_in_a_stock_model(family: str, tmp_path: object) -> None:
    """``W + u vᵀ``, ``b + Δb`` and ``m'`` from the file, in a fresh model of the same weights: one
    bare token has the context's logits.
    """
    model, context, kept = shallow(family, 3), tokens(0, 1, 9), tokens(1, 1, 1)
    reference = Stock(model).logits({"context_ids": context, "kept_ids": kept})[:, -1]
    with ContextPatcher(model, "stable") as patcher:
        patch = patcher.compute(context, kept)
        patch.save(tmp_path / "patch.safetensors")
    fresh = shallow(family, 3)
    position = (
        {"position_ids": patch.position_ids}
        if "position_ids" in inspect.signature(type(fresh).forward).parameters
        else {}
    )
    with torch.no_grad():
        bare = fresh(kept, **position).logits[:, -1]
        materialise(fresh, *read_patch(tmp_path / "patch.safetensors"))
        patched = fresh(kept, **position).logits[:, -1]
    limit = noise_limit(fresh, kept, **position)  # of the changed weights
    assert metrics.linf(patched, reference).max() <= limit
    # the context is not beside the point
    assert metrics.linf(bare, reference).max() > max(0.02, limit)


@families
def test_detaching_is_exact(family: str) -> None:
    model = shallow(family, 1)
    modules = dict(model.named_modules(remove_duplicate=False))
    attributes = {name: list(vars(module)) for name, module in modules.items()}
    state, ids = copy.deepcopy(model.state_dict()), tokens(5, 2, 6)
    with torch.no_grad():
        before = model(ids).logits
        with ContextPatcher(model) as patcher:
            patch = patcher.compute(tokens(6, 2, 5), tokens(7, 2, 2))
            patcher.forward(patch.kept_ids, patch)
        assert torch.equal(model(ids).logits, before)
    after = dict(model.named_modules(remove_duplicate=False))
    assert after.keys() == modules.keys()
    assert all(after[name] is module for name, module in modules.items())
    assert {name: list(vars(module)) for name, module in after.items()} == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "family", [name for name in EXPERTS if "parallel" not in tiny_models.SUPPORTED[name].note]
)
def test_an_unpatched_router_chooses_other_experts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What identical choices are worth: without the routers' part of the patch many are others."""
    model, arguments = shallow(family, 0), case("span", 0)
    with ContextPatcher(model, "exact") as patcher:
        assert not patcher.compute(**arguments).report.experts_changed.any()
        monkeypatch.setattr(
            "icl_patch.recording.updates.reader_update", lambda y_ctx, y: torch.zeros_like(y)
        )
        report = patcher.compute(**arguments).report
    assert (report.experts_changed > 0).sum() > 3
