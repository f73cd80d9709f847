"""Files that are written whole or not at all: what they replace, and what a failure leaves."""

import multiprocessing
import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.full_disk import full_disk
from support.models import build, tokens

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.cli.main import main
from icl_patch.patch.atomic_file import remove_leftovers, write_atomically

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def patch() -> ContextPatch:
    with ContextPatcher(build("llama", 0, num_hidden_layers=1), "stable") as patcher:
        return patcher.compute(tokens(0, 1, 5), tokens(1, 1, 2))


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_full_disk(patch: ContextPatch, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    path.write_bytes(b"what was there")
    with full_disk(1000), pytest.raises(OSError, match=rf"File too large: '{path}'"):
        patch.save(path)
    assert path.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_on_the_command_line(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    command = ["extract", "--context", "mode upper\n", "--kept", "fmrp>", "--out", str(path)]
    with full_disk(1000):
        assert main(command) == 2
    assert capsys.readouterr().err == f"icl-patch extract: [Errno 27] File too large: '{path}'\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays(there: bool, patch: ContextPatch, tmp_path: Path) -> None:
    """Its target is written, there or not."""
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "p.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(Path("data") / target.name)
    if there:
        target.write_bytes(b"old")
    patch.save(link)
    assert link.is_symlink()
    assert ContextPatch.load(target).info == patch.info
    assert sorted(tmp_path.rglob("*")) == [target.parent, target, link]


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o400])
def test_permissions_stay(mode: int, patch: ContextPatch, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    path.write_bytes(b"old")
    path.chmod(mode)
    with umask(0o022):
        patch.save(path)
    assert permissions(path) == mode
    assert ContextPatch.load(path).info == patch.info


def test_permissions_of_a_new_file(patch: ContextPatch, tmp_path: Path) -> None:
    for mask in (0o022, 0o077, 0o002):
        with umask(mask):
            patch.save(tmp_path / f"{mask}.safetensors")
        assert permissions(tmp_path / f"{mask}.safetensors") == 0o666 & ~mask


def test_while_a_private_file_is_replaced_nobody_else_can_read_it(tmp_path: Path) -> None:
    path, seen = tmp_path / "p", []
    path.write_bytes(b"old")
    path.chmod(0o600)

    def parts() -> Iterator[bytes]:
        seen.extend(permissions(file) for file in tmp_path.iterdir())
        yield b"new"

    with umask(0):
        write_atomically(path, parts())
    assert seen == [0o600, 0o600]
    assert path.read_bytes() == b"new"


def test_a_name_as_long_as_can_be(patch: ContextPatch, tmp_path: Path) -> None:
    for name in ("p" * 243 + ".safetensors", "é" * 127):
        patch.save(tmp_path / name)
        assert ContextPatch.load(tmp_path / name).info == patch.info


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    def save() -> None:
        os.replace = lambda *_paths: os.kill(os.getpid(), signal.SIGKILL)
        write_atomically(tmp_path / "p", [b"content"])

    process = FORK.Process(target=save)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_another_saver_is_writing_is_left_alone(tmp_path: Path) -> None:
    path, begun, go_on = tmp_path / "p", threading.Event(), threading.Event()

    def parts() -> Iterator[bytes]:
        yield b"sl"
        begun.set()
        assert go_on.wait(60)
        yield b"ow"

    slow = threading.Thread(target=write_atomically, args=(path, parts()))
    slow.start()
    assert begun.wait(60)
    remove_leftovers(tmp_path)
    write_atomically(path, [b"fast"])
    assert path.read_bytes() == b"fast"
    assert len(list(tmp_path.iterdir())) == 2
    go_on.set()
    slow.join()
    assert path.read_bytes() == b"slow"
    assert list(tmp_path.iterdir()) == [path]


def test_many_savers_and_a_reader_of_one_path(patch: ContextPatch, tmp_path: Path) -> None:
    """Every read finds a whole file, though leftovers are removed all the time."""
    path = tmp_path / "p.safetensors"
    patch.save(path)

    def save_often() -> None:
        for _ in range(40):
            patch.save(path)
            remove_leftovers(tmp_path)

    savers = [FORK.Process(target=save_often) for _ in range(4)]
    for saver in savers:
        saver.start()
    while any(saver.is_alive() for saver in savers):
        assert ContextPatch.load(path).info == patch.info
    assert [saver.exitcode for saver in savers] == [0] * 4
    assert list(tmp_path.iterdir()) == [path]


def test_paths_that_cannot_be_written(patch: ContextPatch, tmp_path: Path) -> None:
    """The message has the path as it was given, not a temporary file's."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path, error in (
        (tmp_path / "no" / "p.safetensors", FileNotFoundError),
        (tmp_path, IsADirectoryError),
        (tmp_path / "fifo", OSError),
        (tmp_path / "loop", OSError),
        ("/dev/full", OSError),
        ("/dev/null", OSError),
    ):
        with pytest.raises(error, match=f": '{path}'$"):
            patch.save(path)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "fifo", tmp_path / "loop"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written all the same; leftovers stay, since nobody can tell whose they are."""

    def flock(_file: object, _operation: int) -> None:
        raise OSError(38, "Function not implemented")

    (tmp_path / ".icl-patch-1").touch()
    monkeypatch.setattr("icl_patch.patch.atomic_file.fcntl.flock", flock)
    write_atomically(tmp_path / "p", [b"content"])
    remove_leftovers(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".icl-patch-1", "p"]
