"""The CUDA driver of the inversion where there is no GPU: its blocks run as fibers, every line of
the kernel included.
"""

import ctypes

import pytest
import torch
from support.compiled import compiled, needs_compiler
from support.inversion import ROOT_ULP
from support.numeric import ULP, normal, seeded
from support.rows import ROWS, rows_of
from torch import Tensor

from icl_patch.ops import InversionStatus as Status
from icl_patch.ops import reference

pytestmark = needs_compiler
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # in the order of DType
# bytes of shared memory: two long rows fit there, or one, or it is read again each time
PLENTY, ENOUGH, LITTLE = 1 << 18, 100_000, 1 << 10


@pytest.fixture(scope="module")
def driver() -> ctypes.CDLL:
    """It takes 16 seconds to compile."""
    return compiled("cuda_on_cpu", "-O1", "-ffp-contract=off")


def apart(x: Tensor, column: int) -> Tensor:
    """x with a number in every ``column``-th place, and NaN between and behind them."""
    spread = torch.full((x.numel() * max(column, 1),), torch.nan, dtype=x.dtype)
    spread[column * torch.arange(x.numel())] = x.flatten()
    return spread


class Driver:
    """Calls the driver with tensors; outputs start as NaN."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.call = library.invert_rows
        self.call.restype = ctypes.c_char_p

    def __call__(
        self,
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
        rows, n = target.shape
        result = reference.RMSNormInverse(
            torch.full(
                (rows, n),
                torch.nan,
                dtype=torch.float64 if target.dtype == torch.float64 else torch.float32,
            ),
            torch.full((rows,), torch.nan, dtype=torch.float64),
            torch.full((rows, n), torch.nan, dtype=torch.float64),
            torch.full((rows,), 99, dtype=torch.int8),
            torch.full((rows,), 99, dtype=torch.int32),
        )
        spread = [
            x if x is None else apart(x, column) for x in (target, scale.expand(rows, n), fallback)
        ]
        given = [*spread[:2], rms, spread[2]]
        pointers = [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in given]
        out = [
            ctypes.c_void_p(x.data_ptr())
            for x in (
                result.hidden,
                result.shift,
                result.new_scale,
                result.status,
                result.evaluations,
            )
        ]
        dtype = ctypes.c_int(DTYPES.index(target.dtype))
        sizes = (
            ctypes.c_int64(rows),
            ctypes.c_int64(n),
            ctypes.c_bool(update),
            dtype,
            ctypes.c_int64(column),
        )
        error = self.call(
            *sizes,
            *pointers,
            ctypes.c_double(eps),
            ctypes.c_int(shared_memory),
            *out,
        )
        assert error is None
        return result


OTHER_SUMS = 16 * 4100 * ULP  # of so many terms in another order, on rows that multiply that


def check_same(
    got: reference.RMSNormInverse, want: reference.RMSNormInverse, tolerance: float
) -> None:
    assert torch.equal(got.status, want.status)
    for name in ("hidden", "new_scale"):
        ours, theirs = getattr(got, name).double(), getattr(want, name).double()
        assert torch.equal(ours.isnan(), theirs.isnan())
        size = theirs.norm(dim=1, keepdim=True) if name == "hidden" else theirs.abs()
        assert (
            ((ours - theirs).abs() <= tolerance * size)
            .nan_to_num(1)
            .logical_or(theirs.isnan())
            .all()
        )


@pytest.mark.parametrize("family", ROWS)
def test_every_family_in_a_warp(driver: ctypes.CDLL, family: str) -> None:
    for dtype, n in ((torch.float64, 9), (torch.float32, 33)):
        m, g = rows_of(family, 11, n, dtype)
        rms = torch.ones(len(m), dtype=dtype)
        want = reference.invert_rmsnorm(g, m, rms, 1e-6)
        got = Driver(driver)(g, m, rms, 1e-6)
        assert torch.equal(got.status, want.status)
        difference = (got.hidden.double() - want.hidden.double()).norm(
            dim=1
        ) / want.hidden.double().norm(dim=1)
        assert difference.max() <= (
            ROOT_ULP
            if family == "near_hard"
            else OTHER_SUMS
            if dtype == torch.float64
            else 2.0**-22
        )
        assert got.evaluations.max() <= 32


@pytest.mark.parametrize(
    ("n", "shared_memory"),
    [
        (1, PLENTY),
        (31, PLENTY),
        (256, PLENTY),
        (257, PLENTY),
        (2049, PLENTY),
        (4097, PLENTY),
        (4097, ENOUGH),
        (4097, LITTLE),
    ],
)
def test_every_way_of_keeping_a_row(driver: ctypes.CDLL, n: int, shared_memory: int) -> None:
    """A warp, 256 and 512 threads, registers, shared memory and neither; a hard, an easy, a bad and
    a NaN row.
    """
    m, g = (1 + 0.4 * normal(seeded(n), 5, n)), normal(seeded(n + 1), 5, n)
    lowest = m[1].abs().argmin()
    g[1] *= 1e-3
    g[1, lowest] = 0
    g[3, n // 2] = torch.nan
    rms = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0]).double()
    want = reference.invert_rmsnorm(g, m, rms, 1e-6, m)
    assert want.status.tolist()[2:4] == [Status.BAD_RADIUS, Status.NONFINITE]
    once, again = (
        Driver(driver)(g, m, rms, 1e-6, m, shared_memory=shared_memory) for _ in range(2)
    )
    check_same(once, want, OTHER_SUMS)
    # whatever the order of the turns
    assert torch.equal(once.hidden.nan_to_num(), again.hidden.nan_to_num())


@pytest.mark.parametrize(("n", "shared_memory"), [(7, PLENTY), (300, PLENTY), (4100, LITTLE)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_the_whole_update(
    driver: ctypes.CDLL, dtype: torch.dtype, n: int, shared_memory: int
) -> None:
    rng = seeded(n)
    delta, h = (normal(rng, 4, n, dtype=dtype) for _ in range(2))
    scale = 1 + 0.4 * normal(rng, n, dtype=dtype)
    scale[n // 3] = 0
    delta[1], h[2] = 0, 0
    want = reference.stable_scale(delta, scale, h, 1e-6)
    got = Driver(driver)(delta, scale, None, 1e-6, h, update=True, shared_memory=shared_memory)
    assert torch.equal(got.status, want.status)
    tolerance = OTHER_SUMS if dtype == torch.float64 else 2.0**-22
    assert (got.hidden - want.u).norm() <= tolerance * (want.u + h).norm()
    assert ((got.new_scale - want.new_scale).abs() <= OTHER_SUMS * want.new_scale.abs()).all()
    assert not got.hidden[1].any() and torch.equal(got.new_scale[1], scale.double())


@pytest.mark.parametrize(
    ("dtype", "n", "shared_memory"),
    [
        *((dtype, 259, PLENTY) for dtype in DTYPES),
        (torch.bfloat16, 4097, PLENTY),
        (torch.float16, 4097, LITTLE),
    ],
    ids=str,
)
def test_every_dtype_and_columns_apart(
    driver: ctypes.CDLL, dtype: torch.dtype, n: int, shared_memory: int
) -> None:
    """The bits of what the numbers are in fp32 or fp64, wherever they lie."""
    rng = seeded(n)
    g, h = (normal(rng, 2, n, dtype=dtype) for _ in range(2))
    m, rms = (1 + 0.4 * normal(rng, n)).to(dtype), torch.tensor([1.0, 2.0]).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # beyond 4096 numbers the emulated threads take seconds
    for update in (False, True) if n < 4096 else (True,):
        given = [x if x is None else x.to(wide) for x in (g, m, None if update else rms)]
        plain = Driver(driver)(*given, 1e-6, h.to(wide), update=update, shared_memory=shared_memory)
        for column in (1, 3):
            got = Driver(driver)(
                g,
                m,
                None if update else rms,
                1e-6,
                h,
                update=update,
                shared_memory=shared_memory,
                column=column,
            )
            assert all(
                torch.equal(getattr(got, name), getattr(plain, name)) for name in vars(plain)
            )
        assert plain.status.tolist() == [Status.EASY] * 2


def test_one_number_for_all_columns(driver: ctypes.CDLL) -> None:
    """As an expanded tensor is given: with stride 0."""
    g, m, rms = torch.full((2, 33), 0.3), torch.full((33,), 1.2), torch.ones(2)
    plain, got = (Driver(driver)(g, m, rms, 1e-6, column=column) for column in (1, 0))
    assert all(torch.equal(getattr(got, name), getattr(plain, name)) for name in vars(plain))
    assert plain.status.tolist() == [Status.EASY] * 2
