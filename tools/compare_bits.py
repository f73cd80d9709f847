"""Compare two records of ``tools/record_bits.py``, and name each entry that differs.

    build/python tools/compare_bits.py before.json after.json
    build/python tools/compare_bits.py before.json after.json --rename noise_floor=noise_floor

The exit status is 0 for equal records, 1 for a difference, and 2 if they cannot be compared.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any


def read_record(path: Path) -> dict[str, Any]:
    """The content of a record's file.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a record in {path}, got {error}") from error
    if not isinstance(found, dict) or not {"quick", "environment", "entries"} <= found.keys():
        raise ValueError(f"expected a record in {path}, got other JSON")
    return found


def renamed(entries: dict[str, str], words: list[tuple[str, str]]) -> dict[str, str]:
    """The entries, with each whole word (old, new) of their names replaced.

    Raises:
        ValueError: two entries would have one name.
    """
    found = entries
    for old, new in words:
        word = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
        found = {word.sub(lambda _, new=new: new, name): value for name, value in found.items()}
    if len(found) != len(entries):
        raise ValueError("expected words that keep the names apart, got two entries of one name")
    return found


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """A line for each entry that differs or that only one of two records has."""
    lines = [f"differs: {name}" for name in old if name in new and old[name] != new[name]]
    lines += [f"only in OLD: {name}" for name in old if name not in new]
    return lines + [f"only in NEW: {name}" for name in new if name not in old]


def compare(old: dict[str, Any], new: dict[str, Any], words: list[tuple[str, str]]) -> bool:
    """Print how two records differ; whether they are equal.

    Raises:
        ValueError: they do not record the same things, or a word of ``words`` does not fit.
    """
    if old["quick"] != new["quick"]:
        raise ValueError("expected two quick records or two whole ones, got one of each")
    for key in sorted(old["environment"].keys() | new["environment"].keys()):
        was, now = (record["environment"].get(key) for record in (old, new))
        if was != now:
            print(f"note: {key} was {was!r} and is {now!r}", file=sys.stderr)
    lines = differences(renamed(old["entries"], words), new["entries"])
    print(*lines, f"{len(lines)} differences in {len(new['entries'])} entries", sep="\n")
    return not lines


def word_pair(text: str) -> tuple[str, str]:
    """The two words of ``OLD=NEW``."""
    old, _, new = text.partition("=")
    if not (old and new):
        raise argparse.ArgumentTypeError(f"expected OLD=NEW, got {text!r}")
    return old, new


def main(arguments: list[str] | None = None) -> int:
    """Compare two records; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare two records of tools/record_bits.py.")
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    parser.add_argument(
        "--rename",
        type=word_pair,
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="a word in the names of OLD, and the word that NEW has in its place; repeatable",
    )
    options = parser.parse_args(arguments)
    try:
        equal = compare(read_record(options.old), read_record(options.new), options.rename)
    except ValueError as error:
        parser.error(str(error))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
