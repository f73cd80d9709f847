"""Measure the memory of a patch with the weights in memory and on disk, and of a generation.

    build/python tools/offload_memory.py MODEL_FOLDER        # into docs/data/offload-memory.json

Each in a process of its own: how far the process grows beyond the imports while it loads the model,
and then while it attaches, computes an exact patch and replays it; and how far it grows beyond the
loaded model while it generates two tokens after 8,000. accelerate must be importable.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from icl_patch import ContextPatcher

OUT = Path(__file__).parents[1] / "docs" / "data" / "offload-memory.json"
MIB = 2**20
CONTEXT = 8000  # tokens
CALLS = ("own", "exact", "stable")


def measure(folder: str, place: str) -> dict[str, int]:
    """MiB, by what they are of."""
    torch.set_num_threads(1)
    before = _resident()
    device_map = None
    if place == "disk":
        parts = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
        device_map = {**dict.fromkeys(parts, "disk"), "model.rotary_emb": "cpu"}
    with tempfile.TemporaryDirectory() as weights:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, device_map=device_map, offload_folder=weights
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = ("The capital of Zubrowka is Lutz. ", "What is the capital of Zubrowka? It is")
        context, kept = (tokenizer(text, return_tensors="pt").input_ids for text in texts)
        with ContextPatcher(model) as patcher:
            patch = patcher.compute(context, kept)
            assert patch.logits is not None
            assert torch.equal(patcher.forward(kept, patch), patch.logits)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sizes = [x.nbytes for x in model.parameters()]
    largest = {"largest_weight": max(sizes) // MIB, "growth": (peak - before) // MIB}
    # two modules that share a weight in memory have one each on disk
    return largest if place == "disk" else {"weights": sum(sizes) // MIB, **largest}


def generation(folder: str, call: str) -> int:
    """MiB of two tokens after a long context: the model's own, or of an update's steps."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for weight in model.parameters():
        weight.sum()  # from_pretrained maps the file: read it before the count begins
    ids = torch.randint(3, 900, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    before = _resident()
    if call == "own":
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
    else:
        list(ContextPatcher(model, call).generate(ids, max_new_tokens=2))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (peak - before) // MIB


def _resident() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def main(folder: str, place: str | None = None) -> None:
    """See the module."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if place is not None:
        print(json.dumps((generation if place in CALLS else measure)(folder, place)))
        return
    parts: dict[str, object] = {}
    for name in ("memory", "disk", *CALLS):
        command = [sys.executable, __file__, folder, name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        parts[name] = json.loads(done.stdout.splitlines()[-1])
    found: dict[str, object] = {"model": Path(folder).name, "dtype": "float32"}
    found |= {name: parts.pop(name) for name in ("memory", "disk")}
    found["generation"] = {"context_tokens": CONTEXT, **parts}
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
