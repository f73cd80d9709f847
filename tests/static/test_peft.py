"""LoRA folders: written, and read by PEFT itself where it is installed."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.optional import imported
from support.random_models import shallow
from support.static import CLOSE, logits, random_patch
from torch import nn
from transformers.pytorch_utils import Conv1D

from icl_patch import static
from icl_patch.static import LowRank, StaticPatch


@torch.no_grad()
def by_hand(model: nn.Module, folder: Path) -> nn.Module:
    """A copy of the model with W + (alpha / r) B A, from the files alone."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    twin: Any = copy.deepcopy(model)
    for target in config["target_modules"]:
        a, b = (tensors[f"base_model.model.{target}.lora_{side}.weight"] for side in "AB")
        assert a.shape[0] == b.shape[1] == config["r"]
        change = config["lora_alpha"] / config["r"] * (b @ a)
        module = twin.get_submodule(target)
        assert isinstance(module, Conv1D) == config["fan_in_fan_out"]
        module.weight += change.T if config["fan_in_fan_out"] else change
    return twin


def by_peft(model: nn.Module, folder: Path) -> nn.Module:
    return imported("peft").PeftModel.from_pretrained(copy.deepcopy(model), folder)


both_ways = pytest.mark.parametrize("read", [by_hand, by_peft])


@both_ways
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "falcon"])
def test_the_folder_is_the_patch(name: str, read: Any, tmp_path: Path) -> None:
    model = shallow(name)
    patch = random_patch(model, 0)
    patch = replace(patch, info=replace(patch.info, front=(7,)))
    assert patch.to_peft(tmp_path, model) == 8
    assert "must begin with the token of id 7" in (tmp_path / "README.md").read_text()
    with patch.applied(model):
        expected = logits(model)
    assert (logits(model) - expected).abs().max() > 1e-2 * expected.abs().max()
    assert (logits(read(model, tmp_path)) - expected).abs().max() <= CLOSE * expected.abs().max()


def test_ranks_are_those_that_vllm_loads(tmp_path: Path) -> None:
    model = shallow("llama")
    for rank, written in ((1, 1), (2, 8), (9, 16), (257, 320)):
        assert random_patch(model, 0, rank).to_peft(tmp_path / f"{rank}", model) == written
    with pytest.raises(ValueError, match=r"at most 512, .* got 513: truncate the patch first"):
        random_patch(model, 0, 513).to_peft(tmp_path / "513", model)


def test_modules_of_both_layouts_are_refused(tmp_path: Path) -> None:
    model = shallow("gpt2")
    changes = random_patch(model, 0).changes
    changes["lm_head"] = LowRank(torch.ones(1, 97), torch.ones(1, model.config.n_embd))
    patch = StaticPatch(static.StaticInfo.of(model, None, "random"), changes)
    with pytest.raises(ValueError, match="one fan_in_fan_out"):
        patch.to_peft(tmp_path / "lora", model)
    assert not list(tmp_path.iterdir())
