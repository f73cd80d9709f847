"""What a command says on stderr while it works."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.status import Status


def import_torch() -> Any:
    """torch, imported under a label: it takes seconds."""
    with stage("importing torch"):
        import torch
    return torch


def stage(title: str, options: argparse.Namespace | None = None) -> Status:
    """A labelled spinner on stderr, for work that cannot be counted.

    If stderr is no terminal, a line as :func:`say` prints it. Without options, which may not be
    read yet, nothing.
    """
    console = _stderr()
    if options is not None and not console.is_terminal:
        say(options, title)
    return console.status(title)


def say(options: argparse.Namespace, text: str) -> None:
    """A line about the command's progress on stderr. Where that is no terminal, only a command that
    takes minutes prints it, and not with ``--json``.
    """
    if _stderr().is_terminal or (options.lines and not options.json):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(title: str, options: argparse.Namespace) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, or about ten lines of :func:`say` if that is no terminal; call the yielded
    function with (done, total).
    """
    console = _stderr()
    if not console.is_terminal:
        yield _lines(title, options)
        return
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(title: str, options: argparse.Namespace) -> Callable[[int, int], None]:
    """Says the first of (done, total), the last, and every tenth of the work between them."""
    last = (-1, -1)

    def update(done: int, total: int) -> None:
        nonlocal last
        is_new = total != last[1] or done < last[0] or done - last[0] >= max(1, total / 10)
        if is_new or (done == total and (done, total) != last):
            last = (done, total)
            say(options, f"{title}: {done} of {total}")

    return update


def _stderr() -> Console:
    """Stderr, on which a spinner is drawn only if it is a terminal."""
    console = Console(stderr=True)
    console.quiet = not console.is_terminal
    return console
