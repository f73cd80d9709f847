"""Writing a file that appears whole or not at all."""

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_MARK = ".icl-patch-"  # begins the names of temporary files, which are short
_ABANDONED = 600  # seconds


def write_atomically(path: str | os.PathLike[str], parts: Iterable[bytes | memoryview]) -> None:
    """Write the parts, one after the other, to ``path``: whole or not at all.

    The parts are written to a temporary file in the same folder, which is then renamed. If the path
    is a symbolic link, its target is replaced. A replaced file keeps its permissions. A process
    that is killed leaves its temporary file behind.

    Raises:
        OSError: the file cannot be written, or the path is neither a regular file nor free.
    """
    try:
        _write(Path(os.path.realpath(path)), parts)
    except OSError as error:  # its path is the temporary file's, if it has one
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _write(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    permissions = _permissions(target)
    temporary = target.with_name(_MARK + secrets.token_hex(8))
    mode = 0o666 if permissions is None else permissions
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        try:
            for part in parts:
                file.write(part)
            file.flush()
            if permissions is not None:
                os.fchmod(file.fileno(), permissions)
            os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _permissions(target: Path) -> int | None:
    """The permissions of the file that will be replaced, None if there is none."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "expected the name of a regular file, got a folder or device")
    return stat.S_IMODE(mode)


def remove_leftovers(folder: Path) -> None:
    """Remove a folder's temporary files that nobody has written to for ten minutes; they are left
    over from killed processes.
    """
    for leftover in folder.glob(f"{_MARK}*"):
        with suppress(FileNotFoundError):  # another process removes them too
            if time.time() - leftover.stat().st_mtime > _ABANDONED:
                leftover.unlink()
