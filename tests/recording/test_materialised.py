"""A patch is a change of ordinary weights: a process without this package applies it to a stock
model and gets the context's logits. All families in this process are in test_architectures.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from support.materialise import materialise, read_patch
from support.models import build, tokens
from support.numeric import noise_limit

from icl_patch import ContextPatcher, metrics


def test_materialised_weights_give_the_contexts_logits(tmp_path: Path) -> None:
    model, context, kept = build("gemma3"), tokens(0, 1, 9), tokens(1, 1, 1)
    with torch.no_grad():
        reference = model(torch.cat([context, kept], 1)).logits[:, -1:]
    with ContextPatcher(model, "stable") as patcher:
        patch = patcher.compute(context, kept)
    patch.save(tmp_path / "patch.safetensors")
    model.save_pretrained(tmp_path / "model")
    script = Path(__file__).parents[1] / "support" / "materialise.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    imported = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "transformers" in imported and "icl_patch" not in imported
    logits = load_file(tmp_path / "logits.safetensors")
    materialise(model, *read_patch(tmp_path / "patch.safetensors"))
    limit = noise_limit(model, kept, position_ids=patch.position_ids)  # of the changed weights
    assert metrics.linf(logits["patched"], reference).max() <= limit
    # the context is not beside the point
    assert metrics.linf(logits["bare"], reference).max() > max(0.1, limit)
