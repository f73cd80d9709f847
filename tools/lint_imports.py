"""Check the import contracts of pyproject.toml: ``python tools/lint_imports.py [CHECKOUT]``."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from importlinter.cli import lint_imports

sys.path.insert(0, str(Path(__file__).parent))
from installed_tree import installed_tree

checkout = Path(*sys.argv[1:2]).resolve()
with installed_tree(checkout) as folder:
    package = folder / "icl_patch"
    os.chdir(folder)  # the linter looks here first, before anything that is installed
    sys.path.insert(0, str(folder))
    if find_spec("icl_patch").origin != str(package / "__init__.py"):
        sys.exit(f"expected to check {package}, found {find_spec('icl_patch').origin}")
    status = lint_imports(
        config_filename=str(checkout / "pyproject.toml"), no_cache=True, no_logo=True
    )
sys.exit(status)
