"""Writing to stdout; its errors have a type of their own."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class OutputError(OSError):
    """Stdout cannot be written; with ``errno.EPIPE`` its reader has closed it."""


@contextmanager
def output() -> Iterator[None]:
    """Write to stdout, to the end.

    Raises:
        OutputError: it cannot be written; from then on nothing more is.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        discard(sys.stdout)
        raise OutputError(error.errno, f"cannot write to stdout: {error.strerror}") from error


def discard(stream: TextIO) -> None:
    """Send a stream's unwritten and later text nowhere: Python flushes it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
