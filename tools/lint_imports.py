"""Check the import contracts of pyproject.toml: ``python tools/lint_imports.py [CHECKOUT]``.

``triton_kernels/`` and ``bench/`` are installed as ``icl_patch.kernels`` and ``icl_patch.bench``,
which a checkout does not show: the contracts are checked in a tree of links that does.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from importlinter.cli import lint_imports

checkout = Path(*sys.argv[1:2]).resolve()
with TemporaryDirectory() as folder:
    package = Path(folder).resolve() / "icl_patch"
    package.mkdir()
    for path in (checkout / "icl_patch").iterdir():
        (package / path.name).symlink_to(path)
    (package / "kernels").symlink_to(checkout / "triton_kernels")
    (package / "bench").symlink_to(checkout / "bench")
    os.chdir(folder)  # the linter looks here first, before anything that is installed
    sys.path.insert(0, str(package.parent))
    if find_spec("icl_patch").origin != str(package / "__init__.py"):
        sys.exit(f"expected to check {package}, found {find_spec('icl_patch').origin}")
    status = lint_imports(
        config_filename=str(checkout / "pyproject.toml"), no_cache=True, no_logo=True
    )
sys.exit(status)
