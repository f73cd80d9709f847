"""``icl-patch extract --dataset``: what is printed, the exit status, options that go together."""

import json
import sys
from pathlib import Path

import pytest
import torch
from support.chats import shallow_chat_model
from support.commands import Run
from support.data_sets import prompts, write_json_lines

from icl_patch import embedded
from icl_patch.cli.extract import _layers, _own_device
from tools import measure

scale = pytest.importorskip("icl_patch.scale", reason="no pyarrow")

ROWS = prompts(6)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    rows = [{"text": row["context"], "question": row["kept"]} for row in ROWS]
    return write_json_lines(tmp_path / "rows.jsonl", rows)


COLUMNS = ("--context-column", "text", "--kept-column", "question")


def test_what_is_planned_and_written(dataset: Path, tmp_path: Path, run: Run) -> None:
    """The patches are those of test_extract_dataset.py."""
    out = tmp_path / "out"
    status, text, plan = run("extract", "--dataset", dataset, *COLUMNS, "--out", out)
    assert (status, text) == (0, f"{out}: 6 patches written\n")
    assert plan.startswith(
        "6 rows; patches to compute: 6, already there: 0; duplicates: 0, unreadable: 0\n"
    )
    assert f"into {out}, " in plan and plan.endswith(" are free\n")
    kept = [patch.kept_ids[0] for patch in map(scale.PatchDataset(out).__getitem__, range(6))]
    assert list(map(embedded.load()[1].decode, kept)) == [row["kept"] for row in ROWS]


def test_json_rejects_and_the_exit_status(dataset: Path, tmp_path: Path, run: Run) -> None:
    """Rounded factors of two layers, from a data set with a bad row."""
    with dataset.open("a") as file:
        file.write('{"text": "abc"}\n')
    options = ("--update", "stable", "--layers", "2:4", "--factors-dtype", "bf16")
    options += ("--batch-size", "2", "--batch-tokens", "100")
    command = ("--dataset", dataset, *COLUMNS, "--out", tmp_path / "out", *options)
    status, text, _ = run("extract", *command, "--json")
    result = json.loads(text)
    assert (status, result["patches"], result["rejected"]) == (1, 6, 1)
    plan = result["plan"]
    assert plan["bytes"] == plan["kept_tokens"] * plan["bytes_per_token"]
    assert 0 < result["largest_replay_error"] < 0.1
    [line] = Path(result["rejects"]).read_text().splitlines()
    assert json.loads(line) == {"row": 6, "reason": "expected a column 'question', got 'text'"}
    assert len(list((tmp_path / "out" / "shards").iterdir())) >= 3
    assert scale.PatchDataset(tmp_path / "out").run.layers == [2, 3]
    status, text, _ = run("extract", *command)
    without = f"rows without a patch: 1, for the reasons in {result['rejects']}\n"
    assert (status, text) == (1, f"{tmp_path / 'out'}: 0 patches written; {without}")
    status, text, _ = run("extract", *command, "--update", "exact", "--json")
    assert status == 2
    assert "expected patches of this run" in json.loads(text)["error"]["message"]


def test_chats_and_statistics(
    dataset: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """System messages, by the second of two processes, which takes no row of the one group."""
    folder = shallow_chat_model(tmp_path / "model")
    monkeypatch.setenv("WORLD_SIZE", "2")
    columns = ("--system-column", "text", "--kept-column", "question", "--statistics")
    command = (folder, "--dataset", dataset, *columns, "--out", tmp_path / "out")
    monkeypatch.setenv("RANK", "1")
    status, text, err = run("extract", *command)
    assert (status, err) == (0, "")
    assert text == f"{tmp_path / 'out'}: 0 patches written by process 1 of 2\n"
    monkeypatch.setenv("RANK", "0")
    status, text, err = run("extract", *command)
    assert status == 0 and "6 patches written by process 0 of 2" in text
    assert "statistics without factors" in err
    [first, *_] = scale.PatchDataset(tmp_path / "out").index.to_pylist()
    # the user's turn, its end and the beginning of the answer
    assert first["kept_tokens"] == len(f"<user>{ROWS[0]['kept']}\n<model>")
    assert first["context_tokens"] == len(f"<system>{ROWS[0]['context']}\n")
    assert first["ranks"]["mlp.up_proj"][0] >= 1


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("4", [4]), ("4:6", [4, 5]), ("-1", [6]), (":2", [0, 1]), ("::4", [0, 4]), ("5:", [5, 6])],
)
def test_layers(text: str, blocks: list[int]) -> None:
    assert list(range(7))[_layers(text)] == blocks


def test_without_pyarrow(dataset: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("icl_patch.scale")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("icl_patch.scale")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = run("extract", "--dataset", dataset, "--out", "out")
    assert status == 2
    assert "expected pyarrow for data sets of contexts" in err and "icl-patch[data]" in err


def test_every_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cuda = torch.device("cuda")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert _own_device(cuda) == cuda
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert _own_device(cuda) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _own_device(cuda) == torch.device("cuda", 0)
    for device in (None, torch.device("cpu"), torch.device("cuda", 1)):
        assert _own_device(device) == device


def test_the_tool_that_times_extractions() -> None:
    """What it writes down, on the embedded model."""
    records = list(measure.extract("embedded", "stable", "1", 3))
    assert len(records) == 2
    for record in records:
        assert record["seconds"]["all"] > 0 and record["seconds"]["own"] > 0
        assert record["patches"] == 3
    _, tokenizer = embedded.load()
    rows = measure.texts_of(tokenizer, range(3, 6))
    assert len({row["context"] for row in rows}) == 3
    lengths = [len(tokenizer(row["context"], add_special_tokens=False).input_ids) for row in rows]
    assert all(192 <= length <= 320 + 3 for length in lengths)
