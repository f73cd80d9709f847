"""The CPU cases of ``bench/cases/linear.py`` under pytest-benchmark: ``make bench``; not part of
``make test``, which collects ``test_*.py``.

The tables come from ``icl-patch bench``, which times the calls of a case in turns, with cold
weights, and keeps failures in the table; pytest-benchmark times them one after the other. This is
for those who compare runs with its tools (``--benchmark-compare``).
"""

import pytest
import torch

pytest.importorskip("pytest_benchmark")

from icl_patch.bench.cases import linear

CPU = torch.device("cpu")
SETTINGS = [
    linear.Setting(matrix, dtype, rows, 1)
    for matrix in ("Gemma-3-1B up", "Gemma-3-4B up")
    for dtype in linear.DTYPES
    for rows in (1, 2, 8)
]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Not here: the tests' own limit to one thread is lifted, to what torch begins with."""


@pytest.mark.parametrize("call", ["patched_linear", "F.linear", "unfused"])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_linear(benchmark: pytest.FixtureRequest, setting: linear.Setting, call: str) -> None:
    comparison = linear.comparison(setting, CPU)
    benchmark.group = setting.name
    comparison.check(call, comparison.calls[call]())
    benchmark.extra_info.update(setting.parameters, nbytes=comparison.nbytes.get(call))
    benchmark.pedantic(comparison.calls[call], rounds=9, iterations=1, warmup_rounds=1)
