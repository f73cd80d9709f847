"""The requirements of the package and its tests, as pyproject.toml lists them.

python tools/requirements.py met     # exit 0 if this interpreter meets them, else name the others
python tools/requirements.py oldest  # the oldest versions allowed, for pip
python tools/requirements.py docs    # those of the extra docs, for pip
"""

import re
import shutil
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.11.0+cu130 is (2, 11, 0)."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", text).group().split("."))


def parsed(requirement: str) -> tuple[str, str]:
    """Name and oldest version of a requirement of the form ``name>=version`` (what follows is
    ignored).
    """
    return re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()


def is_met(requirement: str) -> bool:
    """Whether this interpreter has it; for ninja the system's command will do."""
    name, least = parsed(requirement)
    below = re.search(r",<([\d.]+)", requirement)
    try:
        found = release(version(name))
        return found >= release(least) and not (below and found >= release(below[1]))
    except PackageNotFoundError:
        return name == "ninja" and shutil.which(name) is not None


project = tomllib.loads(
    (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
)
build = project["build-system"]["requires"]
needed = [*project["project"]["dependencies"], "pytest>=8"]
match sys.argv[1:]:
    case ["met"]:
        if lacking := [requirement for requirement in needed + build if not is_met(requirement)]:
            sys.exit(f"setup: {sys.executable} lacks {', '.join(lacking)}")
    case ["oldest"]:
        tests = [
            requirement
            for requirement in project["project"]["optional-dependencies"]["test"]
            if "torchao" not in requirement
        ]
        print(
            *dict.fromkeys("{}=={}".format(*parsed(requirement)) for requirement in needed + tests),
            *build,
        )
    case ["docs"]:
        print(*project["project"]["optional-dependencies"]["docs"])
    case arguments:
        sys.exit(f"expected met, oldest or docs, got {' '.join(arguments) or 'nothing'}")
