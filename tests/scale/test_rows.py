"""Reading rows: every kind of file, and what is said of bad ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data_sets import write_json_lines

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from icl_patch.scale import Columns, Share  # noqa: E402
from icl_patch.scale.rows import Reject, Row, read_rows  # noqa: E402

TEXTS = [("mode upper\n", "fmrp>"), ("Ein Satz über Öl. ", "日本"), ("a" * 3000, "b")]
RECORDS = [{"n": n, "context": x, "kept": y} for n, (x, y) in enumerate(TEXTS)]
ROWS = [Row(n, x, y) for n, (x, y) in enumerate(TEXTS)]


def parquet(path: Path, records: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2)
    return path


def arrow_folder(path: Path, records: list[dict]) -> Path:
    """As ``datasets.Dataset.save_to_disk`` lays it out, in two files."""
    path.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (records[:2], records[2:]), strict=True):
        table = pa.Table.from_pylist(part)
        with (
            pa.OSFile(str(path / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")
    return path


def folder_of_files(path: Path, records: list[dict]) -> Path:
    path.mkdir()
    write_json_lines(path / "1.jsonl", records[:1])
    parquet(path / "2.parquet", records[1:])
    (path / "README.md").write_text("not data")
    return path


KINDS: dict[str, Callable[[Path, list[dict]], Path]] = {
    "rows.jsonl": write_json_lines,
    "rows.parquet": parquet,
    "saved": arrow_folder,
    "folder": folder_of_files,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_has_the_same_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says which column is missing. Also under a relative name that looks like a URI."""
    KINDS[name](tmp_path / f"s3:{name}", RECORDS)
    monkeypatch.chdir(tmp_path)
    dataset = Path(f"s3:{name}")
    assert list(read_rows(dataset, Columns())) == ROWS
    columns = Columns(context="prompt")
    if name.endswith("jsonl") or name == "folder":  # a line of JSON can have any columns
        first = next(read_rows(dataset, columns))
        assert first == Reject(0, "expected a column 'prompt', got 'n', 'context', 'kept'")
        return
    with pytest.raises(ValueError, match=r"column 'prompt' in .*got n, context, kept: .*-column"):
        list(read_rows(dataset, columns))


ONE_LINE = "expected a JSON object on one line"


def test_bad_lines_are_rejected_and_the_others_read(tmp_path: Path) -> None:
    lines: list[tuple[bytes, str]] = [
        (b'{"context": "a", "kept": "b"', f"{ONE_LINE}: Expecting ',' delimiter"),
        ('{"context": "ä", "kept": "b"}'.encode("latin1"), "expected UTF-8 text in"),
        (b"[1, 2]", f"{ONE_LINE}, got [1, 2]"),
        (b'{"context": "a"}', "expected a column 'kept', got 'context'"),
        (b'{"context": "a", "kept": 3}', "expected text in column 'kept', got 3"),
        (b'{"context": "", "kept": "b"}', "expected text in column 'context', got ''"),
        (b'{"context": null, "kept": "b"}', "expected text in column 'context', got None"),
        (rb'{"context": "\ud800", "kept": "b"}', "in column 'context': expected text that UTF-8"),
        (b"[" * 100_000, f"{ONE_LINE}: "),
    ]
    good = b'{"context": "a", "kept": "b"}'
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(line + b"\n\n" + good for line, _ in lines))
    found = list(read_rows(path, Columns()))
    assert [row for row in found if isinstance(row, Row)] == [
        Row(2 * n + 1, "a", "b") for n in range(len(lines))
    ]
    for place, (row, (_, reason)) in enumerate(zip(found[::2], lines, strict=True)):
        assert isinstance(row, Reject) and row.number == 2 * place
        assert row.reason.startswith(reason), row


def test_a_text_of_a_table_that_is_not_utf8(tmp_path: Path) -> None:
    """Parquet does not check it."""
    contexts = pa.array([b"a", b"caf\xe9", b"c"]).cast(pa.string(), safe=False)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"context": contexts, "kept": ["x", "y", "z"]}), path)
    reason = "expected UTF-8 text, got byte 0xe9 at 3 of a column"
    expected = [Row(0, "a", "x"), Reject(1, reason), Row(2, "c", "z")]
    assert list(read_rows(path, Columns())) == expected


def nothing(path: Path) -> None:
    """There is no such file."""


def splits(path: Path) -> None:
    path.mkdir()
    (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def no_state(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text('{"_split": null}')


def damaged(path: Path) -> None:
    """Zeros in place of the data; the schema, which is at the end, is whole."""
    content = bytearray(parquet(path, RECORDS).read_bytes())
    end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[4:end] = bytes(end - 4)
    path.write_bytes(content)


def cut(path: Path) -> None:
    whole = arrow_folder(path.parent / "whole", RECORDS) / "data-00000-of-00002.arrow"
    path.write_bytes(whole.read_bytes()[:-40])


BAD: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "missing": ("rows.jsonl", nothing, "expected a data set, got .* which does not exist"),
    "text": ("rows.txt", Path.touch, r"one of \.jsonl, .*\.parquet, \.arrow, got .*rows\.txt"),
    "empty folder": ("rows", Path.mkdir, "expected files ending in one of .* found none"),
    "splits": (
        "rows",
        splits,
        r"one split of .*\(train, test\): name .*rows/train",
    ),
    "no Parquet": ("rows.parquet", Path.touch, "whole file of Parquet, got .*rows.parquet: "),
    "damaged Parquet": ("rows.parquet", damaged, "whole file of Parquet, got .*rows.parquet: "),
    "no Arrow": ("rows.arrow", Path.touch, "whole file of Arrow's stream format, got .*: "),
    "cut Arrow": ("rows.arrow", cut, "whole file of Arrow's stream format, got .*: Expected"),
    "no state": ("rows", no_state, "expected a folder as Dataset.save_to_disk writes it, got"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path) -> None:
    name, make, message = BAD[case]
    make(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        list(read_rows(tmp_path / name, Columns()))


def test_ids_are_of_the_texts_and_the_kind_of_prompt() -> None:
    kinds = [Columns(), Columns(chat=True), Columns(system=True)]
    ids = {row.id(columns) for row in ROWS for columns in kinds}
    assert len(ids) == 9
    assert Row(7, *TEXTS[0]).id(Columns("x", "y")) == ROWS[0].id(Columns())
    assert Row(0, "ab", "c").id(Columns()) != Row(0, "a", "bc").id(Columns())


TORCH = {"RANK": "1", "WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}


def test_the_share_of_a_process() -> None:
    for environment, expected in (
        ({}, Share()),
        (TORCH, Share(1, 4)),
        (SLURM, Share(2, 3)),
        (TORCH | SLURM, Share(1, 4)),
        ({"SLURM_NTASKS": "3"}, Share()),
    ):
        assert Share.from_environment(environment) == expected
    for rank, size, message in (
        ("1", None, "expected numbers in RANK and WORLD_SIZE, got 1 and nothing"),
        ("x", "2", "got x and 2"),
        ("2", "2", "expected 0 ≤ rank < world_size, got rank 2 and"),
    ):
        with pytest.raises(ValueError, match=message):
            Share.from_environment({"RANK": rank} | ({"WORLD_SIZE": size} if size else {}))
