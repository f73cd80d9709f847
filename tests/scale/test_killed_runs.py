"""A run that is killed again and again goes on: nothing is lost, nothing is there twice, no file is
torn.
"""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.data_sets import files, prompts, write_json_lines

from icl_patch import ContextPatch, ContextPatcher, embedded

scale = pytest.importorskip("icl_patch.scale", reason="no pyarrow")

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


@pytest.mark.parametrize(
    ("kills", "rows"), [(3, 10), pytest.param(100, 1200, marks=pytest.mark.stress)]
)
def test_a_killed_run_goes_on(kills: int, rows: int, tmp_path: Path) -> None:
    """A child of this process runs; it is killed before a rename, behind one, or at any moment.
    After each kill all that a reader sees is read. In the end there are the files of a run that was
    not stopped; temporary ones stay a while.
    """
    dataset = write_json_lines(tmp_path / "rows.jsonl", prompts(rows))
    rng, places, known = random.Random(0), Counter[str](), set[str]()
    folder = tmp_path / "killed"
    model, tokenizer = embedded.load()
    with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
        while places.total() < kills:
            place, at = PLACES[places.total() % len(PLACES)], rng.randint(1, 4)
            if (child := os.fork()) == 0:
                try:
                    run_and_die(patcher, dataset, folder, place, at)
                finally:
                    os._exit(1)
            if place == "any moment":
                time.sleep(rng.uniform(0, 0.3))
                os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == -signal.SIGKILL, f"a run ended with {status} before it was killed"
            places[place] += 1
            read_everything(folder, known)
        print(places, len(known))
        assert len(places) == 3 and known
        written = scale.extract_dataset(patcher, dataset, folder, batching=BATCHING).patches
        assert written < rows  # the killed runs had written some
        read_everything(folder, set())
        whole = scale.extract_dataset(patcher, dataset, tmp_path / "whole", batching=BATCHING)
    assert whole.patches == rows
    found = files(tmp_path / "whole")
    assert found == {name: x for name, x in files(folder).items() if "/." not in f"/{name}"}
    assert len(found) >= 2 * (rows // 2) + 1
