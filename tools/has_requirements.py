"""Exit 0 if this interpreter has what the package and its tests cannot do without, in versions that will do; else say what it lacks."""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.11.0+cu130 is (2, 11, 0)."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", text).group().split("."))


def satisfied(requirement: str) -> bool:
    """Whether a requirement of the form ``name>=version`` (and a marker, ignored) is met."""
    name, least = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
    try:
        return release(version(name)) >= release(least)
    except PackageNotFoundError:
        return False


project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
needed = [*project["project"]["dependencies"], "pytest>=8", *project["build-system"]["requires"]]
lacking = [requirement for requirement in needed if not satisfied(requirement)]
if lacking:
    print(f"setup: {sys.executable} lacks {', '.join(lacking)}", file=sys.stderr)
sys.exit(bool(lacking))
