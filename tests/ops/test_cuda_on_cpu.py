"""The CUDA driver of the inversion where there is no GPU: its blocks run as fibers, every line of
the kernel included.
"""

import ctypes
import functools
from collections.abc import Callable

import pytest
import torch
from support.compiled import DTYPES, address, apart, compiled, needs_compiler
from support.inversion import check_rows
from support.numeric import ULP, normal, seeded
from support.rows import ROWS, rows_of
from torch import Tensor

from icl_patch.ops import InversionStatus as Status
from icl_patch.ops import reference
from icl_patch.ops.stable_update import reference_stable_scale

pytestmark = needs_compiler
# bytes of shared memory: two long rows fit there, or one (of fp32), or it is read again each time
PLENTY, ENOUGH, JUST_ENOUGH, LITTLE = 1 << 18, 100_000, 50_000, 1 << 10
Invert = Callable[..., reference.RMSNormInverse]


@pytest.fixture(scope="module")
def invert() -> Invert:
    """It takes 16 seconds to compile."""
    return functools.partial(invert_rows, compiled("cuda_on_cpu", "-O1", "-ffp-contract=off"))


def invert_rows(
    library: ctypes.CDLL,
    target: Tensor,
    scale: Tensor,
    rms: Tensor | None,
    eps: float = 0.0,
    fallback: Tensor | None = None,
    *,
    update: bool = False,
    shared_memory: int = PLENTY,
    column: int = 1,
) -> reference.RMSNormInverse:
    """Calls the driver with tensors; outputs start as NaN."""
    library.invert_rows.restype = ctypes.c_char_p
    rows, n = target.shape
    hidden, wide = torch.promote_types(target.dtype, torch.float32), torch.float64
    floats = (((rows, n), hidden), ((rows,), wide), ((rows, n), wide))
    outputs = [torch.full(size, torch.nan, dtype=dtype) for size, dtype in floats]
    outputs += [torch.full((rows,), 99, dtype=dtype) for dtype in (torch.int8, torch.int32)]
    target_, scale_, fallback_ = (
        x if x is None else apart(x, column) for x in (target, scale.expand(rows, n), fallback)
    )
    error = library.invert_rows(
        *map(ctypes.c_int64, (rows, n)),
        ctypes.c_bool(update),
        ctypes.c_int(DTYPES.index(target.dtype)),
        ctypes.c_int64(column),
        *map(address, (target_, scale_, rms, fallback_)),
        ctypes.c_double(eps),
        ctypes.c_int(shared_memory),
        *map(address, outputs),
    )
    assert error is None
    return reference.RMSNormInverse(*outputs)


OTHER_SUMS = 16 * 4100 * ULP  # of so many terms in another order, on rows that multiply that


def check_same(
    got: reference.RMSNormInverse, want: reference.RMSNormInverse, tolerance: float
) -> None:
    assert torch.equal(got.status, want.status)
    for name in ("hidden", "new_scale"):
        ours, theirs = getattr(got, name).double(), getattr(want, name).double()
        assert torch.equal(ours.isnan(), theirs.isnan())
        size = theirs.norm(dim=1, keepdim=True) if name == "hidden" else theirs.abs()
        assert ((ours - theirs).abs() <= tolerance * size).logical_or(theirs.isnan()).all()


@pytest.mark.parametrize("family", ROWS)
def test_every_family_in_a_warp(invert: Invert, family: str) -> None:
    for dtype, n in ((torch.float64, 9), (torch.float32, 33)):
        m, g = rows_of(family, 11, n, dtype)
        rms = torch.ones(len(m), dtype=dtype)
        check_rows(m, g, rms, 1e-6, invert(g, m, rms, 1e-6))


KEEPING = [(torch.float64, n, PLENTY) for n in (1, 31, 256, 257, 2049, 4097)]
KEEPING += [(torch.float64, 4097, ENOUGH), (torch.float64, 4097, LITTLE)]
KEEPING += [(torch.float32, n, PLENTY) for n in (1, 129, 1025, 2049, 3073, 4097)]
KEEPING += [(torch.float32, 4097, JUST_ENOUGH), (torch.float32, 4097, LITTLE)]


@pytest.mark.parametrize(("dtype", "n", "shared_memory"), KEEPING, ids=str)
def test_every_way_of_keeping_a_row(
    invert: Invert, dtype: torch.dtype, n: int, shared_memory: int
) -> None:
    """A warp, 256 and 512 threads, inputs and terms in registers, in shared memory and in neither;
    a hard, an easy, a bad and a NaN row.
    """
    m, g = ((x + 0.4 * normal(seeded(n + x), 5, n)).to(dtype) for x in (1, 0))
    lowest = m[1].abs().argmin()
    g[1] *= 1e-3
    g[1, lowest] = 0
    g[3, n // 2] = torch.nan
    rms = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0]).to(dtype)
    want = reference.invert_rmsnorm(g, m, rms, 1e-6, m)
    assert want.status.tolist()[2:4] == [Status.BAD_RADIUS, Status.NONFINITE]
    once, again = (invert(g, m, rms, 1e-6, m, shared_memory=shared_memory) for _ in range(2))
    check_same(once, want, OTHER_SUMS if dtype == torch.float64 else 2.0**-22)
    # whatever the order of the turns
    assert torch.equal(once.hidden.nan_to_num(), again.hidden.nan_to_num())


@pytest.mark.parametrize(("n", "shared_memory"), [(7, PLENTY), (300, PLENTY), (4100, LITTLE)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_the_whole_update(invert: Invert, dtype: torch.dtype, n: int, shared_memory: int) -> None:
    rng = seeded(n)
    delta, h = (normal(rng, 4, n, dtype=dtype) for _ in range(2))
    scale = 1 + 0.4 * normal(rng, n, dtype=dtype)
    scale[n // 3] = 0
    delta[1], h[2] = 0, 0
    want = reference_stable_scale(delta, scale, h, 1e-6)
    got = invert(delta, scale, None, 1e-6, h, update=True, shared_memory=shared_memory)
    assert torch.equal(got.status, want.status)
    tolerance = OTHER_SUMS if dtype == torch.float64 else 2.0**-22
    assert (got.hidden - want.u).norm() <= tolerance * (want.u + h).norm()
    assert ((got.new_scale - want.new_scale).abs() <= OTHER_SUMS * want.new_scale.abs()).all()
    assert not got.hidden[1].any() and torch.equal(got.new_scale[1], scale.double())


OF_DTYPES = [(dtype, 259, PLENTY) for dtype in DTYPES]
OF_DTYPES += [(torch.bfloat16, 4097, PLENTY), (torch.float16, 4097, LITTLE)]


@pytest.mark.parametrize(("dtype", "n", "shared_memory"), OF_DTYPES, ids=str)
def test_every_dtype_and_columns_apart(
    invert: Invert, dtype: torch.dtype, n: int, shared_memory: int
) -> None:
    """The bits of what the numbers are in fp32 or fp64, wherever they lie."""
    rng = seeded(n)
    g, h = (normal(rng, 2, n, dtype=dtype) for _ in range(2))
    m, rms = (1 + 0.4 * normal(rng, n)).to(dtype), torch.tensor([1.0, 2.0]).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # beyond 4096 numbers the emulated threads take seconds
    for update in (False, True) if n < 4096 else (True,):
        given, options = (g, m, None if update else rms, h), {"shared_memory": shared_memory}
        *own, fallback = (x if x is None else x.to(wide) for x in given)
        plain = invert(*own, 1e-6, fallback, update=update, **options)
        for column in (1, 3):
            got = invert(*given[:3], 1e-6, h, update=update, column=column, **options)
            assert all(map(torch.equal, vars(got).values(), vars(plain).values()))
        assert plain.status.tolist() == [Status.EASY] * 2


def test_one_number_for_all_columns(invert: Invert) -> None:
    """As an expanded tensor is given: with stride 0."""
    g, m, rms = torch.full((2, 33), 0.3), torch.full((33,), 1.2), torch.ones(2)
    plain, got = (invert(g, m, rms, 1e-6, column=column) for column in (1, 0))
    assert all(map(torch.equal, vars(got).values(), vars(plain).values()))
    assert plain.status.tolist() == [Status.EASY] * 2
