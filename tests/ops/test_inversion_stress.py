"""A million adversarial rows through the RMSNorm inversion, thousands of them against 120 digits;
``pytest -m stress``.
"""

from collections.abc import Callable

import pytest
import torch
from support.inversion import ROOT_ULP, check_against_the_oracle, check_rows, needs_native, sweep
from support.numeric import FLOATS, normal, seeded
from support.rows import ROWS

from icl_patch import ops
from icl_patch.ops import reference

pytestmark = [pytest.mark.stress, needs_native]

SIZES = [1, 2, 3, 5, 8, 9, 16, 31, 64, 100, 171, 300]
ROWS_OF_A_KIND = 400  # times 18 families, 4 dtypes, 12 sizes and 3 radii: 1,036,800


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def write(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    return write


@pytest.mark.parametrize("family", ROWS)
def test_a_million_rows(family: str, say: Callable[[str], None]) -> None:
    evaluations = []
    for _, m, g, rms, eps in sweep(list(FLOATS.values()), SIZES, [family], ROWS_OF_A_KIND):
        result = ops.invert_rmsnorm(g, m, rms, eps)
        check_rows(m, g, rms, eps, result)
        evaluations.append(result.evaluations)
    counts = torch.cat(evaluations).double()
    assert len(counts) * len(ROWS) >= 1_000_000
    searched = counts[counts > 0]
    mean, p99, most = (
        (float(x) for x in (searched.mean(), searched.quantile(0.99), searched.max()))
        if len(searched)
        else (0, 0, 0)
    )
    say(
        f"\n{family:14} {len(counts):7} rows, {len(searched):6} searched: evaluations mean"
        f" {mean:.2f}, p99 {p99:.0f}, max {most:.0f}"
    )


@pytest.mark.parametrize("n", [1151, 5376, 16385, 65536])
def test_long_rows(n: int) -> None:
    for family, m, g, rms, eps in sweep(
        [torch.float32, torch.bfloat16, torch.float64], [n], list(ROWS), 4
    ):
        if family != "single":
            check_rows(m, g, rms, eps, ops.invert_rmsnorm(g, m, rms, eps))


@pytest.mark.parametrize("family", ROWS)
def test_thousands_of_rows_against_the_oracle(family: str) -> None:
    count, checked = 60 if family == "near_hard" else 20, 0
    for seed, n in enumerate((2, 9, 20)):
        for dtype in (torch.float32, torch.float64):
            checked += check_against_the_oracle(
                ops.invert_rmsnorm, family, count, n, dtype, seed + 10
            )
    assert checked * len(ROWS) >= 5_000


@pytest.mark.parametrize("family", ROWS)
def test_the_update_against_plain_torch(family: str) -> None:
    """All of it, in fp64 and in single precision; beside the hard case y is known to √ulp."""
    for _, m, g, _, eps in sweep([torch.float32, torch.float64], SIZES, [family], 40):
        h = normal(seeded(len(g)), *g.shape, dtype=g.dtype)
        result, expected = ops.stable_scale(g, m, h, eps), reference.stable_scale(g, m, h, eps)
        assert torch.equal(result.status, expected.status)
        assert (result.evaluations <= 32).all()
        size = (expected.u.double().abs() + h.double().abs()).norm(dim=1, keepdim=True)
        assert ((result.u.double() - expected.u.double()).abs() <= ROOT_ULP * size).all()
