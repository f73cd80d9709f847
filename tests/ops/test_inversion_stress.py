"""A million adversarial rows through the RMSNorm inversion: ``pytest -m stress``."""

import pytest
import torch
from support.inversion import ROOT_ULP, check_rows, needs_native, sweep
from support.numeric import FLOATS, normal, seeded
from support.rows import ROWS

from icl_patch import ops
from icl_patch.ops import reference

pytestmark = [pytest.mark.stress, needs_native]

SIZES = [1, 2, 3, 5, 8, 9, 16, 31, 64, 100, 171, 300]
ROWS_OF_A_KIND = 520  # times 14 families, 4 dtypes, 12 sizes and 3 radii: 1,048,320


@pytest.mark.parametrize("family", ROWS)
def test_a_million_rows(family: str) -> None:
    for m, g, rms, eps in sweep(list(FLOATS.values()), SIZES, [family], ROWS_OF_A_KIND):
        check_rows(m, g, rms, eps, ops.invert_rmsnorm(g, m, rms, eps))


@pytest.mark.parametrize("n", [1151, 5376, 16385, 65536])
def test_long_rows(n: int) -> None:
    for m, g, rms, eps in sweep([torch.float32, torch.bfloat16, torch.float64], [n], ROWS, 4):
        check_rows(m, g, rms, eps, ops.invert_rmsnorm(g, m, rms, eps))


@pytest.mark.parametrize("family", ROWS)
def test_the_update_against_plain_torch(family: str) -> None:
    """All of it, in fp64 and in single precision; beside the hard case y is known to √ulp."""
    for m, g, _, eps in sweep([torch.float32, torch.float64], SIZES, [family], 40):
        h = normal(seeded(len(g)), *g.shape, dtype=g.dtype)
        result, expected = ops.stable_scale(g, m, h, eps), reference.stable_scale(g, m, h, eps)
        assert torch.equal(result.status, expected.status)
        assert (result.evaluations <= 32).all()
        size = (expected.u.double().abs() + h.double().abs()).norm(dim=1, keepdim=True)
        assert ((result.u.double() - expected.u.double()).abs() <= ROOT_ULP * size).all()
