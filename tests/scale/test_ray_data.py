"""Ray Data: the example with two actors, killed and started again; and its class without Ray.

``make ray`` installs Ray, which nothing else needs.
"""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.data_sets import own_logits, prompts
from support.numeric import noise_limit
from support.random_models import build
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch import ContextPatcher, embedded, metrics

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from icl_patch import scale  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "scale" / "ray_data.py"
ROWS = prompts(12)
TOKENIZER = embedded.load()[1]


def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return build("llama", vocab_size=len(TOKENIZER)), TOKENIZER


def modified(folder: Path) -> dict[str, int]:
    paths = [x for x in folder.rglob("*") if x.is_file() and not x.name.startswith(".")]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in paths}


def test_every_row_has_a_patch_or_a_reason(tmp_path: Path) -> None:
    """Of two actors on one folder, which get the rows again."""
    records = [*ROWS, ROWS[5], {"context": "x" * 300, "kept": "y"}, {"context": "a", "kept": None}]
    actors = [scale.BatchExtractor(load, tmp_path / "out", "stable") for _ in range(2)]
    parts = [pa.Table.from_pylist(part) for part in (records[:5], records[5:])]
    results = [actor(part).to_pylist() for actor, part in zip(actors, parts, strict=True)]
    found = results[0] + results[1]
    index = scale.PatchDataset(tmp_path / "out").index
    assert sorted(index["id"].to_pylist()) == sorted({row["id"] for row in found[:-2]})
    assert [row["reason"] for row in found[:-2]] == [None] * 13
    assert found[12] == found[5]  # the same texts
    assert "expected at most 256 tokens" in found[-2]["reason"] and found[-2]["id"] is not None
    assert found[-1] == {"id": None, "reason": "expected text in column 'kept', got None"}
    before = modified(tmp_path / "out")
    again = scale.BatchExtractor(load, tmp_path / "out", "stable")
    assert again(pa.Table.from_pylist(records)).to_pylist() == found
    assert modified(tmp_path / "out") == before
    with pytest.raises(ValueError, match="expected patches of this run in"):
        scale.BatchExtractor(load, tmp_path / "out", "exact")


def test_a_batch_without_a_good_row(tmp_path: Path) -> None:
    actor = scale.BatchExtractor(load, tmp_path / "out", "stable")
    [row] = actor(pa.table({"prompt": ["a"]})).to_pylist()
    assert row == {"id": None, "reason": "expected a column 'context', got 'prompt'"}
    assert len(scale.PatchDataset(tmp_path / "out")) == 0


def working_in(folder: Path) -> dict[int, str]:
    """The processes whose working folder it is, the example's and Ray's, with their names."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder:
                found[int(process.name)] = (process / "cmdline").read_text()
        except OSError:  # it has ended, or is another user's
            pass
    return found


@pytest.mark.skipif(find_spec("ray") is None, reason="no Ray: make ray installs it")
def test_actors_are_killed_and_go_on(tmp_path: Path) -> None:
    """One of two, and later all: nothing is lost, nothing is there twice, or computed twice."""
    number = {"context": "say german\n", "kept": "7"}  # a text, which some readers take for one
    too_long = {"context": "x" * 5000, "kept": "y"}
    rows = [*prompts(480), number, too_long]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    out, folder = tmp_path / "out", tmp_path / "work"
    folder.mkdir()
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "rows.parquet"), str(out)]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)

    def wait_for(shards: int) -> int:
        while (count := len(list(out.glob("index/*.parquet")))) < shards:
            assert run.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        return count

    try:
        there = wait_for(2)
        actors = [pid for pid, name in working_in(folder).items() if "MapWorker" in name]
        assert len(actors) == 2
        os.kill(actors[0], signal.SIGKILL)
        wait_for(there + 4)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    while working_in(folder):  # Ray's processes end with the one that started them
        time.sleep(0.1)
    killed = set(scale.PatchDataset(out).index["id"].to_pylist())
    assert 0 < len(killed) < len(rows) - 1
    for _ in range(2):
        before = modified(out)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        assert f"{len(rows) - 1} rows with a patch, 1 without" in done.stdout
        assert "expected at most" in done.stdout
        assert before.items() <= modified(out).items()
    assert before == modified(out)
    patches = scale.PatchDataset(out)
    ids = patches.index["id"].to_pylist()
    expected = [scale.rows.Row(None, **row).id(scale.Columns()).hex() for row in rows[:-1]]
    assert sorted(ids) == sorted(expected) and killed < set(ids)
    model, tokenizer = embedded.load()
    limit, some = noise_limit(model), range(0, len(expected), 40)
    logits = [own_logits(model, tokenizer, rows[place]) for place in some]
    with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
        for place, own in zip(some, logits, strict=True):
            patch = patches[expected[place]]
            replayed = patcher.forward(patch.kept_ids, patch)[0]
            assert float(metrics.linf(replayed, own).max()) <= limit
