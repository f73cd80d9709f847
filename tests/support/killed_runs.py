"""A run over a data set that is killed again and again, and then ends.

    python killed_runs.py DATASET FOLDER KILLS SEED

A child of this process runs; it is killed before a rename, behind one, or at any moment. After each
kill all that a reader sees is read. Prints how many were killed where.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from icl_patch import ContextPatch, ContextPatcher, embedded, scale

PLACES = ("before a rename", "behind a rename", "any moment")
BATCHING = scale.Batching(rows=2)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(patcher: ContextPatcher, dataset: Path, folder: Path, place: str, at: int) -> None:
    """In the child: die at the given rename, if not earlier."""
    replace, renames = os.replace, 0

    def counted(*paths: Any) -> None:
        nonlocal renames
        renames += 1
        if renames == at and place == "before a rename":
            die()
        replace(*paths)
        if renames == at and place == "behind a rename":
            die()

    os.replace = counted
    scale.extract_dataset(patcher, dataset, folder, batching=BATCHING)


def read_everything(folder: Path, known: set[str]) -> None:
    """The description, the index, and the shards that are not known; twice is an error."""
    if not (folder / "run.json").exists():
        return
    index = scale.PatchDataset(folder).index
    ids = index["id"].to_pylist()
    assert len(ids) == len(set(ids)), "a patch stands twice in the index"
    for path in folder.glob("shards/*.safetensors"):
        if path.name not in known:
            ContextPatch.load(path)
            known.add(path.name)
    assert {Path(file).name for file in index["file"].to_pylist()} <= known, "a patch is lost"


def main(dataset: Path, folder: Path, kills: int, seed: int) -> None:
    rng, places, known = random.Random(seed), Counter[str](), set[str]()
    model, tokenizer = embedded.load()
    with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
        while places.total() < kills:
            place, at = PLACES[places.total() % len(PLACES)], rng.randint(1, 4)
            child = os.fork()
            if child == 0:
                run_and_die(patcher, dataset, folder, place, at)
                os._exit(0)
            if place == "any moment":
                time.sleep(rng.uniform(0, 0.3))
                os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == -signal.SIGKILL, f"a run ended with {status} before it was killed"
            places[place] += 1
            read_everything(folder, known)
        there = len(known)
        summary = scale.extract_dataset(patcher, dataset, folder, batching=BATCHING)
        read_everything(folder, set())
    print(json.dumps({"kills": places, "shards": there, "patches": summary.patches}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
