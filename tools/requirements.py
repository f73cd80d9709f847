"""The requirements of the package and its tests, as pyproject.toml lists them.

python tools/requirements.py met     # exit 0 if this interpreter meets them, else name the others
python tools/requirements.py oldest  # the oldest versions allowed, for pip
python tools/requirements.py newest  # any versions allowed, of which pip takes the newest
python tools/requirements.py peft    # those of a dependency group, for pip: before 25.1 it has no
                                     # --group
"""

import shutil
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement  # every interpreter here has pip


def is_met(requirement: Requirement) -> bool:
    """Whether this interpreter has it; for ninja the system's command will do."""
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return requirement.name == "ninja" and shutil.which("ninja") is not None


def oldest(requirement: Requirement) -> str:
    """Its oldest version, of a requirement with a lower bound."""
    [least] = (x.version for x in requirement.specifier if x.operator == ">=")
    return f"{requirement.name}=={least}"


text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
project = tomllib.loads(text)
groups = project["dependency-groups"]
extras = project["project"]["optional-dependencies"]
build = project["build-system"]["requires"]
tests = [name for name in extras["test"] if name.startswith(("matplotlib", "pytest>="))]
needed = [*project["project"]["dependencies"], *tests]
match sys.argv[1:]:
    case ["met"]:
        if lacking := [name for name in needed + build if not is_met(Requirement(name))]:
            sys.exit(f"setup: {sys.executable} lacks {', '.join(lacking)}")
    case [("oldest" | "newest") as age]:
        tests = [name for name in extras["test"] if "torchao" not in name]
        wanted = dict.fromkeys(Requirement(name) for name in needed + tests)
        # newer ones refuse what the interpreter of the oldest triton does
        numpy = ["numpy<2.4"] if age == "oldest" else []
        names = dict.fromkeys(oldest(x) if age == "oldest" else x.name for x in wanted)
        print(*names, *numpy, *build)
    case [group] if group in groups:
        print(*groups[group])
    case arguments:
        known = ", ".join(("met", "oldest", *groups))
        sys.exit(f"expected {known} or newest, got {' '.join(arguments) or 'nothing'}")
