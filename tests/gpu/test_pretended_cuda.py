"""The tests of a CUDA device where there is none, on one that is pretended: all but the kernels,
the compiler and the clock.
"""

import re

import pytest
import torch
from support.processes import TESTS, run_python

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


FILES = ["gpu/test_generation_gpu.py", "gpu/test_gpu.py", "bench/test_bench_generation.py"]
# Every operator passes through Python here, which is slow: of most tests one case.
CHOSEN = (
    "float32 and shared and default or cannot_be_captured or between"
    " or every_way_of and llama or fitted_on_two"
    " or two_devices and llama and stable or offloaded and cpu and llama and exact or many_rows"
)
MORE = (
    "float32 and (streams and compiled or bits_of_its_replay and False)"
    " or bfloat16 and prefix and gemma3 or matches and gemma3 and stable or every_way_says and qwen"
)


@pytest.mark.parametrize(
    ("chosen", "least"), [(CHOSEN, 8), pytest.param(MORE, 5, marks=pytest.mark.stress)]
)
def test_on_a_pretended_device(chosen: str, least: int) -> None:
    options = "-m pytest -p support.pretend_cuda -p no:cacheprovider -m gpu -k"
    files = (TESTS / name for name in FILES)
    done = run_python(*options.split(), chosen, *files, ICL_PATCH_OPS="torch")
    others = "".join(rf"(, \d+ {of})?" for of in ("skipped", "deselected", "warnings?"))
    passed = re.search(rf"^(\d+) passed{others} in", done.stdout, re.M)
    assert done.returncode == 0 and passed is not None and int(passed[1]) >= least, (
        done.stdout + done.stderr
    )
