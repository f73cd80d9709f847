"""A run that is killed goes on: nothing is lost, nothing is there twice, no file is torn."""

import json
from pathlib import Path

import pytest
from support.data_sets import prompts, write_json_lines
from support.processes import run_python

from icl_patch import ContextPatcher, embedded

scale = pytest.importorskip("icl_patch.scale", reason="no pyarrow")


@pytest.mark.parametrize(
    ("kills", "rows"), [(3, 10), pytest.param(100, 1200, marks=pytest.mark.stress)]
)
def test_a_killed_run_goes_on(kills: int, rows: int, tmp_path: Path) -> None:
    """In the end it has the files of a run that was not stopped; temporary ones stay a while."""
    dataset = write_json_lines(tmp_path / "rows.jsonl", prompts(rows))
    done = run_python("-m", "support.killed_runs", dataset, tmp_path / "killed", kills, 0)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    print(counts)
    assert sum(counts["kills"].values()) == kills and len(counts["kills"]) == 3
    assert counts["patches"] < rows  # the killed runs had written some
    model, tokenizer = embedded.load()
    with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
        batching = scale.Batching(rows=2)
        whole = scale.extract_dataset(patcher, dataset, tmp_path / "whole", batching=batching)
    assert whole.patches == rows
    found = []
    for folder in (tmp_path / "whole", tmp_path / "killed"):
        paths = [x for x in folder.rglob("*") if x.is_file() and not x.name.startswith(".")]
        found.append({path.relative_to(folder): path.read_bytes() for path in paths})
    assert found[0] == found[1]
    assert len(found[0]) >= 2 * (rows // 2) + 1
