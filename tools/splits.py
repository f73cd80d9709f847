"""Patches of split and offloaded models beside those of the same models whole, family by family.

    build/python tools/splits.py            # into docs/data/splits.jsonl
    build/python tools/splits.py llama      # these families, to the screen

Every family of icl_patch.evaluation.tiny_models, every update, every split. A line holds the error
of the replay (the largest difference of a logit from the run with the context, relative to the
largest), and whether factors and logits have the bits of the whole model; or the refusal.
tools/readme.py writes the table of docs/scale.md from the file. accelerate must be importable.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from icl_patch import ContextPatcher
from icl_patch.errors import RankError
from icl_patch.evaluation import tiny_models

OUT = Path(__file__).parents[1] / "docs" / "data" / "splits.jsonl"
UPDATES = ("direct", "stable", "exact")
RANKS = {"pp 2": ("pp_size", 2), "pp 4": ("pp_size", 4), "tp 2": ("tp_size", 2)}
Line = dict[str, Any]
_generator = torch.Generator().manual_seed(0)
CONTEXT, KEPT = (torch.randint(3, 90, (2, n), generator=_generator) for n in (9, 3))


def measure(model: PreTrainedModel, update: str) -> tuple[float, str]:
    """The error of a replay, and a hash of factors and logits."""
    with ContextPatcher(model, update, rank_timeout=30) as patcher:
        patch = patcher.compute(CONTEXT, KEPT)
        logits = patcher.forward(KEPT, patch)
    assert patch.logits is not None
    error = (logits - patch.logits).abs().max() / patch.logits.abs().max()
    factors = [layer[name] for layer in patch.layers for name in sorted(layer)]
    return float(error), _digest([*factors, logits])


def _digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _load(folder: Path, family: str, **options: Any) -> PreTrainedModel:
    images = tiny_models.SUPPORTED[family].images
    auto: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_pretrained(folder, **options)
    return model.eval()


def line_of(family: str, split: str, update: str, load: Callable[[], PreTrainedModel]) -> Line:
    """A measurement, or the refusal."""
    line: Line = {"family": family, "split": split, "update": update}
    try:
        line["error"], line["digest"] = measure(load(), update)
    except RankError:
        raise
    except Exception as error:
        line["refused"] = f"{type(error).__name__}: {error}"
    return line


def rank(folder: Path, split: str, family: str) -> None:
    """The measurements of one rank; the first one prints them."""
    option, count = RANKS[split]
    config = DistributedConfig(**{option: count})
    for update in UPDATES:
        load = partial(_load, folder, family, distributed_config=config)
        line = line_of(family, split, update, load)
        if os.environ["RANK"] == "0":
            print(json.dumps(line), flush=True)
    os._exit(0)


def in_ranks(folder: Path, split: str, family: str) -> list[Line]:
    """The lines of a family, split over processes."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS[split][1]}", __file__, family]
    command += ["--rank-of", split, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    reason = "its pipeline fails on one rank"  # the ranks lost each other, and all ended
    lost = UPDATES[len(lines) :]
    return lines + [
        {"family": family, "split": split, "update": update, "refused": reason} for update in lost
    ]


def offloaded(folder: Path, split: str, family: str) -> list[Line]:
    """The lines of a family whose weights lie on the CPU or on disk between two forwards."""

    def load() -> PreTrainedModel:
        model = _load(folder, family)
        if split == "cpu":
            return accelerate.cpu_offload(model, execution_device="cpu")
        return accelerate.disk_offload(model, folder / "offloaded", execution_device="cpu")

    return [line_of(family, split, update, load) for update in UPDATES]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if options.rank_of:
        rank(options.folder, options.rank_of, *options.families)
    lines = []
    for family in options.families or tiny_models.SUPPORTED:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tiny_models.build(family).save_pretrained(folder)
            whole = {update: measure(_load(folder, family), update)[1] for update in UPDATES}
            for split in ("cpu", "disk", *RANKS):
                run = in_ranks if split in RANKS else offloaded
                for line in run(folder, split, family):
                    digest = line.pop("digest", None)
                    if digest is not None:
                        line["bits"] = digest == whole[line["update"]]
                    lines.append(json.dumps(line))
                    print(lines[-1], flush=True)
    if not options.families:
        OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
