"""The command ``icl-patch``: parse, run one command, turn errors into an exit status.

Every command prints text and tables for people, or with ``--json`` one JSON object on stdout and
nothing else. Progress goes to stderr, and only to a terminal. Exit status: 0 fine, 1 the check
failed (a patch that is broken or of another model, an effect that no change of weights can have), 2
bad usage, 130 interrupted.

A command is a module with ``HELP``, ``add_arguments`` and ``run``. Other packages add commands by
the entry points ``icl_patch.commands``, as ``icl_patch.bench`` does. ``run`` imports what it needs:
``--help`` does not wait for torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Protocol

from icl_patch._version import __version__
from icl_patch.cli import apply, demo, export, extract, fit, generate, inspect, verify
from icl_patch.errors import ControllabilityError, FingerprintMismatch, PatchFormatError

COMMANDS = "icl_patch.commands"


class Command(Protocol):
    """What a command's module has."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments, apart from ``--json``, which all have."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command; returns the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ∞ must not cost the result
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except (FingerprintMismatch, PatchFormatError, ControllabilityError) as error:
        print(f"icl-patch {options.command}: {error}", file=sys.stderr)
        return 1
    # the reader of stdout has seen enough; what is still buffered is dropped
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError) as error:
        print(f"icl-patch {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="icl-patch", description="A context as a change of weights: W + u vᵀ, one per token."
    )
    parser.add_argument("--version", action="version", version=f"icl-patch {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _commands().items():
        subparser = subparsers.add_parser(
            name, help=command.HELP, description=command.HELP.capitalize() + "."
        )
        subparser.add_argument(
            "--json", action="store_true", help="print one JSON object instead of tables"
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _commands() -> dict[str, Command]:
    commands: dict[str, Command] = {
        "demo": demo,
        "verify": verify,
        "generate": generate,
        "extract": extract,
        "inspect": inspect,
        "fit": fit,
        "apply": apply,
        "export": export,
    }
    return commands | {entry.name: entry.load() for entry in entry_points(group=COMMANDS)}
