"""Printing results to stdout, as tables or with ``--json``; the errors have a type of their own."""

import argparse
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console


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


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to :func:`output`; rich would end the process."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_result(options: argparse.Namespace, result: dict[str, Any], *renderables: Any) -> None:
    """Print the result as one JSON object with ``--json``, else the texts and tables. A reader that
    has closed stdout, such as ``head``, does not change the command's exit status.
    """
    try:
        with output():
            _print(options, result, renderables)
    except OutputError as error:
        if error.errno != errno.EPIPE:
            raise


def _print(options: argparse.Namespace, result: dict[str, Any], renderables: Sequence[Any]) -> None:
    from icl_patch.evaluation.report import to_json

    if options.json:
        print(to_json(result))
        return
    console = _Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = 160  # a file has no width to fit
    for renderable in renderables:
        if isinstance(renderable, str):
            print(renderable)  # as it is: rich would fold it
        else:
            console.print(renderable)
