"""A patch is a change of ordinary weights: a process without this package applies it to a stock
model and gets the context's logits.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.materialise import materialise, read_patch
from support.models import build, tokens
from support.numeric import noise_limit

from icl_patch import ContextPatcher, embedded, metrics

TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
CASES = {
    ("embedded", "stable"): {},
    # it divides by activations: eight layers of that magnify the rounding of a matrix that is built
    ("gemma3", "direct"): TWO_LAYERS,
    ("gemma3", "stable"): {},
    ("llama", "direct"): {},
    ("llama", "stable"): {},
}
Logits = dict[str, torch.Tensor]


def case_of(family: str, changes: dict) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A model, a context and one kept token."""
    if family != "embedded":
        return build(family, **changes), tokens(0, 1, 9), tokens(1, 1, 1)
    model, tokenizer = embedded.load()
    prompt = embedded.held_out_prompts("recall", 1)[0]
    ids = tokenizer(prompt.context + prompt.question, return_tensors="pt").input_ids
    return model, ids[:, :-1], ids[:, -1:]


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[tuple[str, str], Logits], dict[tuple[str, str], float], list[str]]:
    """For every case the logits ``reference`` (with the context), ``patched`` and ``bare``, and the
    noise of the changed weights.

    And the modules that the one subprocess imported.
    """
    folders, references, limits = {}, {}, {}
    for (family, update), changes in CASES.items():
        folder = folders[family, update] = tmp_path_factory.mktemp(f"{family}-{update}")
        model, context, kept = case_of(family, changes)
        with torch.no_grad():
            references[family, update] = model(torch.cat([context, kept], 1)).logits[:, -1:]
        with ContextPatcher(model, update) as patcher:
            patch = patcher.compute(context, kept)
        patch.save(folder / "patch.safetensors")
        model.save_pretrained(folder / "model")
        materialise(model, *read_patch(folder / "patch.safetensors"))
        limits[family, update] = noise_limit(model, kept, position_ids=patch.position_ids)
    command = [
        sys.executable,
        "-P",
        str(Path(__file__).parents[1] / "support" / "materialise.py"),
        *map(str, folders.values()),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path_factory.getbasetemp(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    logits = {
        case: load_file(folder / "logits.safetensors") | {"reference": references[case]}
        for case, folder in folders.items()
    }
    return logits, limits, json.loads(done.stdout)


@pytest.mark.parametrize(("family", "update"), CASES)
def test_materialised_weights_give_the_contexts_logits(
    outcome: tuple, family: str, update: str
) -> None:
    logits, limit = (part[family, update] for part in outcome[:2])
    assert metrics.linf(logits["patched"], logits["reference"]).max() <= limit
    # the context is not beside the point
    assert metrics.linf(logits["bare"], logits["reference"]).max() > max(0.1, limit)


def test_the_subprocess_never_imports_this_package(outcome: tuple) -> None:
    imported = outcome[2]
    assert "transformers" in imported
    assert not [name for name in imported if name.split(".")[0] == "icl_patch"]
