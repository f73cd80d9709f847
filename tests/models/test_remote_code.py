"""A class that transformers does not have, loaded from a folder with ``trust_remote_code``."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers.dynamic_module_utils
from support.numeric import noise_limit
from support.patchers import refuses, updates
from support.random_models import tokens
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from icl_patch import ContextPatcher
from icl_patch.evaluation.tiny_models import randomise

SOURCES = Path(__file__).parent.parent / "support" / "remote_model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the models are, and their code as transformers copies it."""
    folder = tmp_path_factory.mktemp("remote")
    with pytest.MonkeyPatch.context() as patched:
        modules = str(folder / "modules")
        patched.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
        patched.syspath_prepend(modules)
        yield folder


def load(folder: Path, *, masks: bool) -> PreTrainedModel:
    """The model of ``tests/support/remote_model``, from a folder as the hub has it."""
    home = folder / f"model_{masks}"
    shutil.copytree(SOURCES, home, dirs_exist_ok=True)
    classes = {
        "AutoConfig": "configuration_small.SmallConfig",
        "AutoModelForCausalLM": "modeling_small.SmallForCausalLM",
    }
    config = {"model_type": "small_remote", "auto_map": classes, "masks": masks}
    (home / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(home, trust_remote_code=True), trust_remote_code=True
    )
    randomise(made)
    made.save_pretrained(home)
    (home / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(home, trust_remote_code=True).eval()


@updates
@torch.no_grad()
def test_remote_code(update: str, folder: Path) -> None:
    model = load(folder, masks=True)
    assert type(model).__module__.startswith("transformers_modules")
    prefix, context, kept = tokens(0, 2, 3), tokens(1, 2, 9), tokens(2, 2, 4)
    whole = torch.cat([prefix, context, kept], 1)
    expected = model(whole).logits[:, -4:]
    with ContextPatcher(model, update) as patcher:
        patch = patcher.compute(torch.cat([prefix, context], 1), kept, keep_first=3)
        logits = patcher.forward(kept, patch)
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error <= max(noise_limit(model, whole), 1e-5)
    without = model(torch.cat([prefix, kept], 1)).logits[:, -4:]
    assert (without - expected).abs().max() > 100 * (logits - expected).abs().max()


def test_remote_code_with_masks_of_its_own_is_refused(folder: Path) -> None:
    refuses(load(folder, masks=False), "its attention does not take the mask")
