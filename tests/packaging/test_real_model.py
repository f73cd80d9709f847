"""The real model's folder: it appears whole or not at all, and no other file is taken for it."""

import hashlib
import multiprocessing
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.models import build

from icl_patch import embedded

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import real_model

FORK = multiprocessing.get_context("fork")


def write_two_files(part: Path) -> None:
    (part / "model.safetensors").write_bytes(bytes(range(256)))
    (part / "config.json").write_text("{}")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound folder, alone in the one above it."""
    folder = tmp_path / "cache" / "model"
    real_model.make(folder, write_two_files)
    return folder


def not_called(_part: Path) -> None:
    pytest.fail("the folder is made again")


def test_a_folder_is_made_once_and_its_sums_are_true(folder: Path) -> None:
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    names = ["config.json", "model.safetensors"]
    assert (folder / "SHA256SUMS").read_text() == "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names
    )
    real_model.make(folder, not_called)


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    real_model.make(tmp_path / "model", write_two_files)
    real_model.make(tmp_path / "model", not_called)


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "removed", "added", "sums emptied"])
def test_a_damaged_folder_is_refused_by_name_and_left(damage: str, folder: Path) -> None:
    path, named = folder / "model.safetensors", "model.safetensors"
    match damage:
        case "flipped bit":
            path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case "removed":
            path.unlink()
        case "added":
            (folder / "second.safetensors").write_bytes(b"x")
            named = "second.safetensors"
        case "sums emptied":
            (folder / "SHA256SUMS").write_text("")
            named = "config.json, model.safetensors"
    before = contents(folder)
    with pytest.raises(ValueError, match=rf"{folder} is damaged: .* got others for {named}\. "):
        real_model.make(folder, not_called)
    assert contents(folder) == before


def test_paths_that_are_no_place_for_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    before = contents(tmp_path)
    file = "expected a folder or a free path, got a file: "
    for path, message in (
        ("file", rf"{file}.*/file$"),
        ("file/model", rf"{file}.*/file$"),
        ("mine/config.json/a/model", rf"{file}.*/mine/config.json$"),
        ("mine", "expected a folder made by this script, but .*/mine has no SHA256SUMS"),
    ):
        with pytest.raises(ValueError, match=message):
            real_model.make(tmp_path / path, not_called)
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_to_write(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(PermissionError):
        real_model.make(tmp_path / "cache" / "model", not_called)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        write_two_files(part)
        (part / "download").mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        real_model.make(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_the_weights_are_written(tmp_path: Path) -> None:
    model, (_, tokenizer) = build("llama"), embedded.load()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(OSError, match=r"could not write the weights to .*File too large"):
            real_model.make(
                tmp_path / "model", lambda part: real_model.save(model, tokenizer, part)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def kill_this_process(*_arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_on_the_way(folder: Path, when: str) -> None:
    """Make the folder in a process of its own that is killed."""

    def run() -> None:
        if when == "before the rename":
            Path.rename = kill_this_process  # type: ignore[assignment, method-assign]
        if when == "before the sums":
            real_model.sums = kill_this_process
        if when == "within a file":
            real_model.make(folder, lambda part: kill_this_process((part / "x").write_bytes(b"y")))
        real_model.make(folder, write_two_files)

    process = FORK.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("when", ["within a file", "before the sums", "before the rename"])
def test_what_a_killed_process_left_is_never_used(when: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    killed_on_the_way(folder, when)
    assert [path.name for path in tmp_path.iterdir()] == [".model.part"]
    real_model.make(folder, write_two_files)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert len(list(folder.iterdir())) == 3


def test_of_several_processes_at_once_one_makes_it(tmp_path: Path) -> None:
    folder, made = tmp_path / "model", FORK.Value("i", 0)
    all_here = FORK.Barrier(4)

    def fill(part: Path) -> None:
        with made.get_lock():
            made.value += 1
        write_two_files(part)

    def run() -> None:
        all_here.wait(60)
        real_model.make(folder, fill)

    processes = [FORK.Process(target=run) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert made.value == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
