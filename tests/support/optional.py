"""Libraries that `make test` installs apart from the others."""

import sys
from pathlib import Path
from typing import Any

import pytest


def imported(name: str) -> Any:
    """peft or accelerate; a test without it skips."""
    sys.path.append(str(Path(__file__).parents[2] / "build" / "peft"))
    return pytest.importorskip(name, reason=f"needs {name}")
