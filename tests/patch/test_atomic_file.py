"""Files that are written whole or not at all: what they replace, and what a failure leaves."""

import multiprocessing
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.full_disk import full_disk

from icl_patch.atomic_file import remove_leftovers, write_atomically


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def interrupted() -> Iterator[bytes]:
    yield b"new"
    raise KeyboardInterrupt


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(b"what was there")
    with full_disk(1000), pytest.raises(OSError, match=rf"File too large: '{path}'"):
        write_atomically(path, [b"new" * 1000])
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, interrupted())
    assert path.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [path]
    for name in ("p", "p" * 255, "é" * 127):  # also as long as can be
        write_atomically(tmp_path / name, [b"n", b"ew"])
        assert (tmp_path / name).read_bytes() == b"new"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays(there: bool, tmp_path: Path) -> None:
    """Its target is written, there or not."""
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "p", tmp_path / "link"
    link.symlink_to(Path("data") / target.name)
    if there:
        target.write_bytes(b"old")
    write_atomically(link, [b"new"])
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert sorted(tmp_path.rglob("*")) == [target.parent, target, link]


def test_permissions(tmp_path: Path) -> None:
    """A replaced file's stay, a new file has those that the process gives; and while a private file
    is replaced nobody else can read it.
    """
    path, seen = tmp_path / "p", []

    def parts() -> Iterator[bytes]:
        seen.extend(permissions(file) for file in tmp_path.iterdir())
        yield b"new"

    for mode, mask in ((0o600, 0), (0o664, 0o077), (0o400, 0)):
        path.write_bytes(b"old")
        path.chmod(mode)
        with umask(mask):
            write_atomically(path, parts())
        assert permissions(path) == mode
        path.unlink()
    assert seen[:2] == [0o600, 0o600]
    for mask in (0o022, 0o077, 0o002):
        with umask(mask):
            write_atomically(tmp_path / f"{mask}", [b"new"])
        assert permissions(tmp_path / f"{mask}") == 0o666 & ~mask


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    def save() -> None:
        os.replace = lambda *_paths: os.kill(os.getpid(), signal.SIGKILL)
        write_atomically(tmp_path / "p", [b"content"])

    process = multiprocessing.get_context("fork").Process(target=save)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    [leftover] = tmp_path.iterdir()
    remove_leftovers(tmp_path)
    assert leftover.exists()  # a process may be writing it
    os.utime(leftover, (0, time.time() - 601))
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


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    """The message has the path as it was given, not a temporary file's."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path, error in (
        (tmp_path / "no" / "p.safetensors", FileNotFoundError),
        (tmp_path, OSError),
        (tmp_path / "fifo", OSError),
        (tmp_path / "loop", OSError),
        ("/dev/full", OSError),
        ("/dev/null", OSError),
    ):
        with pytest.raises(error, match=f": '{path}'$"):
            write_atomically(path, [b"new"])
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "fifo", tmp_path / "loop"]
