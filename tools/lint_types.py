"""Check the types of the package, its kernels among it, by mypy: ``python tools/lint_types.py``."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from installed_tree import installed_tree

checkout = Path.cwd()
command = [sys.executable, "-P", "-m", "mypy", "--config-file", str(checkout / "pyproject.toml")]
with installed_tree(checkout) as folder:
    cache = ["--cache-dir", str(checkout / ".mypy_cache")]
    sys.exit(subprocess.run([*command, *cache], cwd=folder, check=False).returncode)
