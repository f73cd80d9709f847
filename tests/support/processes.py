"""Another Python for what one process does once."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """In one thread, with what this process has on its path, and the tests' own modules."""
    path = os.pathsep.join(filter(None, [str(TESTS), *sys.path]))
    return subprocess.run(
        [sys.executable, "-P", *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
