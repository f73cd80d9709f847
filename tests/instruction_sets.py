"""Scripts run on one of the CPU drivers' instruction sets: which, is settled when the library is loaded."""

import os
import subprocess
import sys
from pathlib import Path

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512_bf16")


def run_on(instructions: str, script: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own; its stderr has ``expected ICL_PATCH_CPU=`` if the processor lacks the set."""
    environment = os.environ | {"ICL_PATCH_CPU": instructions, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    return subprocess.run([sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True, check=False)
