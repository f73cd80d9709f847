"""Check the package as it is installed, as a tree of links, in which ``triton_kernels/`` and
``bench/`` are ``icl_patch.kernels`` and ``icl_patch.bench``.

    python tools/lint.py imports [CHECKOUT]    # the import contracts of pyproject.toml
    python tools/lint.py types                 # mypy
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

kind, *checkouts = sys.argv[1:]
checkout = Path(*checkouts).resolve()
config = str(checkout / "pyproject.toml")
with TemporaryDirectory() as folder:
    package = Path(folder).resolve() / "icl_patch"
    package.mkdir()
    for path in (checkout / "icl_patch").iterdir():
        (package / path.name).symlink_to(path)
    for name, source in (("kernels", "triton_kernels"), ("bench", "bench")):
        (package / name).symlink_to(checkout / source)
    os.chdir(package.parent)  # both look here first, before anything that is installed
    if kind == "types":
        cache = str(checkout / ".mypy_cache")
        command = [sys.executable, "-P", "-m", "mypy", "--config-file", config]
        sys.exit(subprocess.run([*command, "--cache-dir", cache], check=False).returncode)
    from importlinter.cli import lint_imports

    sys.path.insert(0, str(package.parent))
    sys.exit(lint_imports(config_filename=config, no_cache=True, no_logo=True))
