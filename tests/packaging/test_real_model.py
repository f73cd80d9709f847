"""The real model's folder: it appears whole or not at all, and no other file is taken for it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import real_model


def write_two_files(part: Path) -> None:
    (part / "model.safetensors").write_bytes(bytes(range(256)))
    (part / "config.json").write_text("{}")


def not_called(_part: Path) -> None:
    pytest.fail("the folder is made again")


@pytest.mark.parametrize("before", ["absent", "empty"])
def test_a_folder_is_made_once(before: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "model"
    if before == "empty":
        folder.mkdir(parents=True)
    real_model.make(folder, write_two_files)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    real_model.make(folder, not_called)


def test_what_is_no_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for name in ("file", "mine"):
        with pytest.raises(
            ValueError, match=f"expected a model's folder or a free path, .*/{name}"
        ):
            real_model.make(tmp_path / name, not_called)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        write_two_files(part)
        (part / "download").mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        real_model.make(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []
