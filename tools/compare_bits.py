"""Compare two records of ``tools/record_bits.py``, and name each entry that differs.

    build/python tools/compare_bits.py before.json after.json

The exit status is 0 for equal records, 1 for a difference, and 2 if they record different things.
"""

import argparse
import json
import sys
from pathlib import Path


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """A line for each entry that differs or that only one of two records has."""
    lines = [f"differs: {name}" for name in old if name in new and old[name] != new[name]]
    lines += [f"only in OLD: {name}" for name in old if name not in new]
    return lines + [f"only in NEW: {name}" for name in new if name not in old]


def main(arguments: list[str] | None = None) -> int:
    """Compare two records; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare two records of tools/record_bits.py.")
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    paths = vars(parser.parse_args(arguments)).values()
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    if old["quick"] != new["quick"]:
        parser.error("expected two quick records or two whole ones, got one of each")
    if old["environment"] != new["environment"]:
        print(f"note: recorded in {old['environment']} and {new['environment']}", file=sys.stderr)
    lines = differences(old["entries"], new["entries"])
    print(*lines, f"{len(lines)} differences in {len(new['entries'])} entries", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
