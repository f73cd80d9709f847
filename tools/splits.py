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
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
    model: PreTrainedModel = auto.from_pretrained(folder / family, **options)
    return model.eval()


def rank(folder: Path, split: str, families: list[str]) -> None:
    """The measurements of one rank; the first one prints them."""
    option, count = RANKS[split]
    for family in families:
        for update in UPDATES:
            line: dict[str, Any] = {"family": family, "split": split, "update": update}
            try:
                config = DistributedConfig(**{option: count})
                model = _load(folder, family, distributed_config=config)
                line["error"], line["digest"] = measure(model, update)
            except RankError:
                os._exit(1)  # the ranks have lost each other; the others end too
            except Exception as error:
                line["refused"] = f"{type(error).__name__}: {error}"
            if os.environ["RANK"] == "0":
                print(json.dumps(line), flush=True)
    os._exit(0)


def _launch(folder: Path, split: str, families: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of the families until the ranks end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    count = RANKS[split][1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    command = [sys.executable, __file__, "--rank-of", split, "--folder", str(folder), *families]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(number), "LOCAL_RANK": str(number)},
            stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(count)
    ]
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        if line.startswith("{"):
            yield json.loads(line)
    for process in ranks:
        process.wait()


def in_ranks(folder: Path, split: str, families: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of all families; the ranks are started again where they lost each other."""
    while families:
        seen: list[str] = []
        for line in _launch(folder, split, families):
            seen.append(line["family"])
            yield line
        done = seen.count(seen[-1]) == len(UPDATES) if seen else False
        last = families.index(seen[-1]) if seen else -1
        if done and last == len(families) - 1:
            return
        lost = families[last + 1] if done or not seen else seen[-1]
        for update in UPDATES[0 if lost not in seen else seen.count(lost) :]:
            reason = "its pipeline fails on one rank"
            yield {"family": lost, "split": split, "update": update, "refused": reason}
        families = families[families.index(lost) + 1 :]


def offloaded(folder: Path, split: str, families: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of models whose weights lie on the CPU or on disk between two forwards."""
    for family in families:
        for update in UPDATES:
            line: dict[str, Any] = {"family": family, "split": split, "update": update}
            model = _load(folder, family)
            with tempfile.TemporaryDirectory() as weights:
                if split == "cpu":
                    accelerate.cpu_offload(model, execution_device="cpu")
                else:
                    accelerate.disk_offload(model, weights, execution_device="cpu")
                try:
                    line["error"], line["digest"] = measure(model, update)
                except Exception as error:
                    line["refused"] = f"{type(error).__name__}: {error}"
            yield line


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
    families = options.families or list(tiny_models.SUPPORTED)
    if options.rank_of:
        rank(options.folder, options.rank_of, families)
    with tempfile.TemporaryDirectory() as name:
        folder, whole, lines = Path(name), {}, []
        for family in families:
            tiny_models.build(family).save_pretrained(folder / family)
            for update in UPDATES:
                whole[family, update] = measure(_load(folder, family), update)
        for split in ("cpu", "disk", *RANKS):
            run = in_ranks if split in RANKS else offloaded
            for line in run(folder, split, families):
                digest = line.pop("digest", None)
                if digest is not None:
                    line["bits"] = digest == whole[line["family"], line["update"]][1]
                lines.append(json.dumps(line))
                print(lines[-1], flush=True)
    if not options.families:
        OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
