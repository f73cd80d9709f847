"""The tests of a CUDA device where there is none, on one that is pretended: all but the kernels,
the compiler and the clock.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


FILES = [
    "gpu/test_generation_gpu.py",
    "gpu/test_gpu.py",
    "bench/test_bench_generation.py",
    "bench/test_bench.py",
    "gpu/test_static_gpu.py",
    "gpu/test_devices_gpu.py",
]
CHOSEN = (
    "float32 and (shared or streams and as) or models_bits or bfloat16 and prefix and gemma3"
    " or matches and gemma3 and stable or between or every_way_of or every_way_says and gemma"
    " or fitted_on_two or two_devices and llama or offloaded and exact and gemma3"
)


def test_on_a_pretended_device() -> None:
    places = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    options = "-P -m pytest -p support.pretend_cuda -p no:cacheprovider -m gpu -k"
    command = [sys.executable, *options.split(), CHOSEN]
    done = subprocess.run(
        [*command, *(str(TESTS / name) for name in FILES)],
        env=os.environ | {"ICL_PATCH_OPS": "torch", "PYTHONPATH": places},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.search(r"^(\d+) passed(, \d+ deselected)?(, \d+ warnings?)? in", done.stdout, re.M)
    assert done.returncode == 0 and passed is not None and int(passed[1]) >= 9, (
        done.stdout + done.stderr
    )
