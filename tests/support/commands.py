"""A command of ``icl-patch`` as a user runs it."""

from collections.abc import Callable

import pytest

from icl_patch.cli import main as cli

Run = Callable[..., tuple[int, str, str]]


def run_command(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    """The exit status of a command, and what it wrote to stdout and stderr."""
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:  # of a command line that does not parse
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err
