"""Check the tools, and the package as it is installed: a tree of links, in which
``triton_kernels/`` and ``bench/`` are ``icl_patch.kernels`` and ``icl_patch.bench``.

    python tools/lint.py imports [CHECKOUT]    # the import contracts of pyproject.toml
    python tools/lint.py types                 # mypy
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory


def link(checkout: Path, package: Path) -> None:
    """Make the package as it is installed, of links into a checkout."""
    package.mkdir(parents=True)
    for path in (checkout / "icl_patch").iterdir():
        (package / path.name).symlink_to(path)
    for name, source in (("kernels", "triton_kernels"), ("bench", "bench")):
        (package / name).symlink_to(checkout / source)


def main(kind: str, folder: str = ".") -> int:
    """Run one of the checks; returns its exit status."""
    checkout = Path(folder).resolve()
    config = str(checkout / "pyproject.toml")
    with TemporaryDirectory() as made:
        site = Path(made).resolve()
        link(checkout, site / "icl_patch")
        (site / "tools").symlink_to(checkout / "tools")
        os.chdir(site)  # both look here first, before anything that is installed
        if kind == "types":
            cache = str(checkout / ".mypy_cache")
            command = [sys.executable, "-P", "-m", "mypy", "--config-file", config]
            return subprocess.run([*command, "--cache-dir", cache], check=False).returncode
        from importlinter.cli import lint_imports

        sys.path.insert(0, str(site))
        return lint_imports(config_filename=config, no_cache=True, no_logo=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
