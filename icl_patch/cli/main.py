"""The command ``icl-patch``: parse, run one command, turn errors into an exit status.

Every command prints text and tables for people, or with ``--json`` one JSON object on stdout and
nothing else; an error is ``{"error": {"type": …, "message": …}, "status": …}``. Progress goes to
stderr: bars to a terminal; elsewhere lines of ``demo``, ``fit`` and ``report``, and those not with
``--json``. These three print each result when they have it. Exit status: 0 fine, 1 the check failed
(a patch that is broken or of another model, an effect that no change of weights can have, logits
that are not finite), 2 bad usage, 130 interrupted.

A command is a module with ``HELP``, ``add_arguments`` and ``run``. Other packages add commands by
the entry points ``icl_patch.commands``, as ``icl_patch.bench`` does. ``run`` imports the modules
that it needs: ``--help`` does not wait for torch.
"""

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from icl_patch._version import __version__
from icl_patch.cli import (
    apply,
    arguments,
    demo,
    export,
    extract,
    fit,
    generate,
    inspect,
    replay,
    report,
    verify,
)
from icl_patch.cli.output import OutputError, discard, output
from icl_patch.errors import (
    ControllabilityError,
    FingerprintMismatch,
    NonFiniteError,
    PatchFormatError,
    ReplayMismatch,
)

COMMANDS = "icl_patch.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    program, as_json = "icl-patch", "--json" in given
    if sys.stderr is None:  # it was closed, and print would write to stdout in its place
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stdout is None:
        closed = OSError("expected an open stdout, got a closed one: redirect it, as >/dev/null")
        return _report(program, closed, 2, False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ∞ must not cost the result
    try:
        options = _parser().parse_args(given)
        program, as_json = f"icl-patch {options.command}", options.json
        status = int(options.run(options))
        with output():  # what a command of another package has left to flush
            return status
    except _UsageError as error:
        raise SystemExit(_report(error.program, error, 2, as_json)) from None
    except (
        FingerprintMismatch,
        PatchFormatError,
        ReplayMismatch,
        ControllabilityError,
        NonFiniteError,
    ) as error:
        return _report(program, error, 1, as_json)
    except (ValueError, TypeError, OSError, argparse.ArgumentTypeError) as error:
        return _report(program, error, 2, as_json)
    except KeyboardInterrupt:
        return 130


class _UsageError(Exception):
    """A command line that does not parse."""

    def __init__(self, message: str, program: str, usage: str) -> None:
        super().__init__(message)
        self.program, self.usage = program, usage


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or the version; argparse ignores errors of stdout."""
        with output():
            print(message, end="")

    def error(self, message: str) -> NoReturn:
        """Leave it to ``main``, which may have to print JSON."""
        raise _UsageError(message, self.prog, self.format_usage())


def _report(program: str, error: Exception, status: int, as_json: bool) -> int:
    """Print an error, as a line on stderr or as JSON on stdout; returns the exit status.

    An error of stdout itself is always a line. It is none if the reader has closed it.
    """
    if isinstance(error, OutputError):
        if error.errno == errno.EPIPE:
            return 0
        as_json = False
    try:
        if as_json:
            kind = "UsageError" if isinstance(error, _UsageError) else type(error).__name__
            found = {"error": {"type": kind, "message": str(error)}, "status": status}
            with output():
                print(json.dumps(found))
        else:
            usage = error.usage if isinstance(error, _UsageError) else ""
            print(f"{usage}{program}: {error}", file=sys.stderr)
    except OutputError as unwritten:
        if unwritten.errno != errno.EPIPE:
            return _report(program, error, status, False)
    except OSError:  # nobody can be told but by the status
        discard(sys.stderr)
    return status


def _version() -> str:
    """The version, and whether the native library is there; nothing is imported to find out."""
    library = Path(__file__).parents[1] / "ops" / "_native.so"
    found = "yes" if library.exists() else "no (plain PyTorch runs; see docs/installing.md)"
    return f"icl-patch {__version__}, native library: {found}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="icl-patch", description="A context as a change of weights: W + u vᵀ, one per token."
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _commands().items():
        subparser = subparsers.add_parser(
            name, help=command.HELP, description=f"{command.HELP[0].upper()}{command.HELP[1:]}."
        )
        arguments.add_json(subparser)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _commands() -> dict[str, ModuleType]:
    own = (demo, verify, generate, extract, inspect, replay, report, fit, apply, export)
    commands = {command.__name__.rpartition(".")[2]: command for command in own}
    for entry in entry_points(group=COMMANDS):
        try:
            commands[entry.name] = entry.load()
        except Exception as error:  # of another package, without which the other commands work
            reason = f"{type(error).__name__}: {error}"
            print(f"icl-patch: no command {entry.name} ({entry.value}): {reason}", file=sys.stderr)
    return commands
