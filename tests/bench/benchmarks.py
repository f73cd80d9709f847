"""Cases of ``bench/cases/linear.py`` on the CPU under pytest-benchmark: ``make bench``; not part of
``make test``, which collects ``test_*.py``.

``icl-patch bench`` times the calls of a case in turns; pytest-benchmark times them one after the
other, for those who compare runs with its tools (``--benchmark-compare``).
"""

import pytest
import torch

pytest.importorskip("pytest_benchmark")

from icl_patch.bench.cases import linear

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Not here: the tests' own limit to one thread is lifted, to what torch begins with."""


@pytest.mark.parametrize("call", ["patched_linear", "F.linear", "unfused"])
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize("matrix", ["Gemma-3-1B up", "Gemma-3-4B up"])
def test_linear(
    benchmark: pytest.FixtureRequest, matrix: str, dtype: torch.dtype, rows: int, call: str
) -> None:
    comparison = linear.comparison(matrix, dtype, rows, 1, CPU)
    benchmark.group = f"{matrix} {dtype} M={rows}"
    comparison.check(call, comparison.calls[call]())
    benchmark.extra_info["nbytes"] = comparison.nbytes.get(call)
    benchmark.pedantic(comparison.calls[call], rounds=9, iterations=1, warmup_rounds=1)
