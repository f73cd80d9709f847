"""LoRA folders: written, read by PEFT itself where it is installed, and imported."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.models import build, shallow, tokens
from support.static import CLOSE, IDS, logits, random_patch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icl_patch import ContextPatcher, PatchFormatError, static
from icl_patch.patch.peft_export import padded_rank
from icl_patch.static import LowRank, StaticPatch, from_peft

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2")


def by_hand(model: nn.Module, folder: Path) -> Tensor:
    """The logits with W + (alpha / r) B A, from the files alone."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    twin: Any = copy.deepcopy(model)
    for target in config["target_modules"]:
        a, b = (tensors[f"base_model.model.{target}.lora_{side}.weight"] for side in "AB")
        assert a.shape[0] == b.shape[1] == config["r"]
        change = config["lora_alpha"] / config["r"] * (b @ a)
        module = twin.get_submodule(target)
        assert isinstance(module, Conv1D) == config["fan_in_fan_out"]
        with torch.no_grad():
            module.weight += change.T if config["fan_in_fan_out"] else change
    return logits(twin)


def imported_peft() -> Any:
    sys.path.append(str(Path(__file__).parents[2] / "build" / "peft"))  # where make test puts it
    return pytest.importorskip("peft")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_are_the_patch(name: str, tmp_path: Path) -> None:
    model = shallow(name)
    patch = random_patch(model, 0)
    patch = replace(patch, info=replace(patch.info, front=(7,)))
    assert patch.to_peft(tmp_path, model) == 8
    assert "must begin with the token of id 7" in (tmp_path / "README.md").read_text()
    with patch.applied(model):
        expected = logits(model)
    assert (by_hand(model, tmp_path) - expected).abs().max() <= CLOSE * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_peft_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    peft = imported_peft()
    model = shallow(name)
    patch = random_patch(model, 0)
    patch.to_peft(tmp_path, model)
    plain = logits(model)
    with patch.applied(model):
        expected = logits(model)
    assert (plain - expected).abs().max() > 1e-2 * expected.abs().max()
    got = logits(peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path))
    assert (got - expected).abs().max() <= CLOSE * expected.abs().max()


def test_peft_stacks_merges_and_generates_with_adapters(tmp_path: Path) -> None:
    peft = imported_peft()
    model, patches = build("llama"), {}
    for name, seed in (("one", 0), ("other", 1)):
        patches[name] = random_patch(model, seed)
        patches[name].to_peft(tmp_path / name, model)
    both = peft.PeftModel.from_pretrained(
        copy.deepcopy(model), tmp_path / "one", adapter_name="one"
    )
    both.load_adapter(tmp_path / "other", adapter_name="other")
    both.base_model.set_adapter(["one", "other"])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with (patches["one"] + patches["other"]).applied(model):
        expected, text = logits(model), model.generate(IDS, **options)
    assert (logits(both) - expected).abs().max() <= CLOSE * expected.abs().max()
    assert torch.equal(both.generate(input_ids=IDS, **options), text)
    merged = both.merge_and_unload()
    assert (logits(merged) - expected).abs().max() <= CLOSE * expected.abs().max()


@pytest.mark.parametrize("rslora", [False, True])
def test_a_lora_of_peft_is_imported(rslora: bool, tmp_path: Path) -> None:
    peft = imported_peft()
    model = build("llama")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=["up_proj", "down_proj", "q_proj"],
        rank_pattern={"down_proj": 2},
        alpha_pattern={"q_proj": 7},
        use_rslora=rslora,
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    expected = logits(adapted)
    adapted.save_pretrained(tmp_path)
    patch = from_peft(tmp_path, model)
    assert len(patch.changes) == 9
    with patch.applied(model):
        got = logits(model)
    assert (got - expected).abs().max() <= CLOSE * expected.abs().max()
    assert (logits(model) - expected).abs().max() > 1e-2 * expected.abs().max()


def test_an_exported_patch_comes_back(tmp_path: Path) -> None:
    model = build("llama")
    patch = random_patch(model, 0)
    patch.to_peft(tmp_path, model)
    back = from_peft(tmp_path, model)
    for path, change in patch.changes.items():
        assert torch.equal(back.changes[path].u[:3], change.u)
        assert torch.equal(back.changes[path].v[:3], change.v)
        assert not back.changes[path].u[3:].any()


def test_the_patch_of_one_token_as_a_lora(tmp_path: Path) -> None:
    model = build("llama")
    context, kept = tokens(0, 2, 5), tokens(1, 2, 3)
    with ContextPatcher(model, "stable") as patcher:
        patch = patcher.compute(context, kept[:, :1])
    assert patch.to_peft(tmp_path, model, row=1) == 1
    lora = from_peft(tmp_path, model)
    with torch.no_grad():
        wanted = model(torch.cat([context, kept[:, :1]], 1)[1:]).logits[:, -1]
        with lora.applied(model):
            got = model(kept[1:, :1], position_ids=torch.tensor([[5]])).logits[:, -1]
    assert (got - wanted).abs().max() <= CLOSE * wanted.abs().max()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gemma3", "a weight vector"), ("gpt2", "a bias vector"), ("olmoe", "experts")],
)
def test_tokens_patches_that_are_no_matrices_name_the_cure(
    name: str, kind: str, tmp_path: Path
) -> None:
    with ContextPatcher(shallow(name), "stable") as patcher:
        patch = patcher.compute(tokens(0, 1, 5), tokens(1, 1, 2))
    with pytest.raises(ValueError, match=f"one of {kind} .*: .*fit a static patch instead"):
        patch.to_peft(tmp_path / "lora", patcher.model)
    if name != "gemma3":
        with pytest.raises(ValueError, match=f"one of {kind} .*: fit a static patch instead"):
            patch.to_peft(tmp_path / "lora", patcher.model, scales=True)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
@pytest.mark.parametrize("through", ["peft", "files"])
def test_scales_of_norms_are_saved_whole(through: str, tmp_path: Path) -> None:
    model = build("gemma3")
    context, kept = tokens(0, 2, 5), tokens(1, 2, 3)
    with ContextPatcher(model, "stable") as patcher:
        patch = patcher.compute(context, kept[:, :1])
    assert patch.to_peft(tmp_path, model, row=1, scales=True) == 1
    norms = [f"model.layers.{i}.post_feedforward_layernorm" for i in range(3)]
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == norms
    wanted = model(torch.cat([context, kept[:, :1]], 1)[1:]).logits[:, -1]
    at = {"position_ids": torch.tensor([[5]])}
    changed: Any = copy.deepcopy(model)
    if through == "peft":
        changed = imported_peft().PeftModel.from_pretrained(changed, tmp_path)
    else:
        tensors = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
        for norm in norms:  # Gemma's scale is 1 + weight
            changed.get_submodule(norm).weight[:] = tensors[f"base_model.model.{norm}.weight"]
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b = tensors[name.replace("lora_A", "lora_B")]
                changed.get_submodule(path).weight += b @ a
    got = changed(kept[1:, :1], **at).logits[:, -1]
    assert (got - wanted).abs().max() <= CLOSE * wanted.abs().max()
    assert (model(kept[1:, :1], **at).logits[:, -1] - wanted).abs().max() > 1e-2


def test_ranks_that_vllm_loads() -> None:
    assert [padded_rank(rank) for rank in (1, 2, 8, 9, 33, 257, 512)] == [1, 8, 8, 16, 64, 320, 512]
    with pytest.raises(ValueError, match="truncate the patch first"):
        padded_rank(513)


def test_modules_of_both_layouts_are_refused(tmp_path: Path) -> None:
    model = shallow("gpt2")
    changes = random_patch(model, 0).changes
    changes["lm_head"] = LowRank(torch.ones(1, 97), torch.ones(1, model.config.n_embd))
    patch = StaticPatch(static.StaticInfo.of(model, None, "random"), changes)
    with pytest.raises(ValueError, match="one fan_in_fan_out"):
        patch.to_peft(tmp_path / "lora", model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=False"),
        ({"bias": "all"}, "bias='none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=None"),
        ({"peft_type": "IA3"}, "expected a LoRA's configuration"),
        ({"r": 4}, "of rank 4"),
        ({"r": None}, "expected positive numbers r and lora_alpha"),
        ({"lora_alpha": float("nan")}, "expected positive numbers r and lora_alpha"),
        ({"rank_pattern": [2]}, "expected positive numbers r and lora_alpha"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=True"),
        ({"init_lora_weights": "olora"}, "init_lora_weights=True"),
        ({"use_qalora": True}, "use_qalora=False"),
    ],
)
def test_loras_that_are_more_than_matrices_are_refused(
    change: dict, message: str, tmp_path: Path
) -> None:
    model = build("llama", num_hidden_layers=1)
    random_patch(model, 0).to_peft(tmp_path, model)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(PatchFormatError, match=message):
        from_peft(tmp_path, model)


def test_a_lora_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = build("llama", num_hidden_layers=1)
    random_patch(model, 0).to_peft(tmp_path, model)
    file = tmp_path / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    next(iter(tensors.values()))[0, 0] = float("inf")
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(PatchFormatError, match="expected finite factors"):
        from_peft(tmp_path, model)


def test_extra_tensors_are_refused(tmp_path: Path) -> None:
    model = build("llama", num_hidden_layers=1)
    random_patch(model, 0).to_peft(tmp_path, model)
    file = tmp_path / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({**tensors, "base_model.model.lm_head.weight": IDS.float()}, file)
    with pytest.raises(PatchFormatError, match="expected only lora_A and lora_B"):
        from_peft(tmp_path, model)


@pytest.mark.parametrize(
    "other", [{"intermediate_size": 50}, {"num_hidden_layers": 1}], ids=["narrower", "shallower"]
)
def test_a_lora_of_a_larger_model_is_refused(other: dict, tmp_path: Path) -> None:
    model = build("llama", num_hidden_layers=2)
    random_patch(model, 0).to_peft(tmp_path, model)
    with pytest.raises(PatchFormatError, match="expected"):
        from_peft(tmp_path, build("llama", **{"num_hidden_layers": 2} | other))
