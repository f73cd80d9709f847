"""The ops against references that share no code with them: the materialised matrix in fp64, the secular equation in 60 digits."""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from mpmath import mp, mpf
from torch import Tensor

from icl_patch import ops, reference
from icl_patch.ops import InversionStatus as Status

FLOATS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Half the spacing of the dtype's numbers at 1: the largest relative error of one rounding.
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ULP = 2.0**-52

every_dtype = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def bits(x: Tensor) -> Tensor:
    """The numbers as integers: tells -0 from 0, and a NaN equals itself."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(bits(x), bits(y))


# patched_linear


@dataclass
class Case:
    """Arguments of ``patched_linear``, and the factors that each row should get as (M, R, ·) in fp64."""

    z: Tensor
    weight: Tensor
    u: Tensor
    v: Tensor
    bias: Tensor | None
    index: Tensor | None
    row_u: Tensor
    row_v: Tensor

    @property
    def arguments(self) -> dict:
        return {name: getattr(self, name) for name in ("z", "weight", "u", "v", "bias", "index")}


LAYOUTS = ("row", "row-rank", "shared", "pool")
POOL = 5


def linear_case(
    layout: str,
    sizes: tuple[int, int, int],
    rank: int = 2,
    dtype: torch.dtype = torch.float32,
    factor_dtype: torch.dtype = torch.float32,
    bias: bool = True,
    seed: int = 0,
) -> Case:
    rows, n, k = sizes
    generator = seeded(seed)
    leading = {"row": (rows,), "row-rank": (rows, rank), "shared": (1, rank), "pool": (POOL, rank)}[layout]
    z, weight = normal(generator, rows, k, dtype=dtype), normal(generator, n, k, dtype=dtype)
    u, v = normal(generator, *leading, n, dtype=factor_dtype), normal(generator, *leading, k, dtype=factor_dtype)
    added = normal(generator, n, dtype=dtype) if bias else None
    if layout == "pool":
        index = torch.randint(-1, POOL, (rows,), generator=generator)
        index[1::3] = -1
        row_u, row_v = (torch.stack([f[i] if i >= 0 else 0 * f[0] for i in index]) if rows else f[:0] for f in (u, v))
        return Case(z, weight, u, v, added, index, row_u.double(), row_v.double())
    row_u, row_v = (f.unsqueeze(1) if layout == "row" else f.expand(rows, -1, -1) for f in (u, v))
    return Case(z, weight, u, v, added, None, row_u.double(), row_v.double())


def accumulation_unit(*tensors: Tensor) -> float:
    return UNIT[torch.float64] if any(x.dtype == torch.float64 for x in tensors) else UNIT[torch.float32]


def check_linear(case: Case, out: Tensor, out_dtype: torch.dtype) -> None:
    """Against ``(W + Σ_r u_r v_rᵀ) z + b`` with a matrix for every row; the bounds are those of the roundings the op is allowed."""
    z, weight = case.z.double(), case.weight.double()
    bias = torch.zeros((), dtype=torch.float64) if case.bias is None else case.bias.double()
    length = case.z.shape[1] + case.row_u.shape[1] + 2
    change = torch.einsum("mrn,mrk->mnk", case.row_u, case.row_v)
    expected = torch.einsum("mnk,mk->mn", weight + change, z) + bias
    assert (out.dtype, out.shape) == (out_dtype, expected.shape)

    unit = max(UNIT[out_dtype], accumulation_unit(case.z, case.u, case.v))
    tiny = torch.finfo(out_dtype).smallest_normal * UNIT[out_dtype]
    magnitude = torch.einsum("mr,mrn->mn", torch.einsum("mk,mrk->mr", z.abs(), case.row_v.abs()), case.row_u.abs())
    plain_magnitude = z.abs() @ weight.abs().T + bias.abs()
    # The last summand is the reference's own error, which only counts in fp64.
    term_error = length * (accumulation_unit(case.z, case.u, case.v) * magnitude + 2.0**-53 * (magnitude + plain_magnitude))
    plain_error = UNIT[case.z.dtype] * (z @ weight.T + bias).abs() + length * accumulation_unit(case.z) * plain_magnitude
    assert ((out.double() - expected).abs() <= 1.01 * (unit * expected.abs() + plain_error + term_error) + 2 * tiny).all()
    # Tighter: on top of the plain output the change is accumulated in fp32 and the sum rounded once.
    on_plain = F.linear(case.z, case.weight, case.bias).double() + torch.einsum("mnk,mk->mn", change, z)
    assert ((out.double() - on_plain).abs() <= 1.01 * (unit * on_plain.abs() + term_error) + tiny).all()


SIZES = list(itertools.product((0, 1, 3, 17), (1, 63, 100), (1, 63, 100)))


@pytest.mark.parametrize("own_factors", [False, True], ids=["fp32-factors", "own-factors"])
@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
def test_patched_linear(dtype: torch.dtype, layout: str, own_factors: bool) -> None:
    for seed, sizes in enumerate(SIZES):
        rank = 1 + seed % 4
        case = linear_case(layout, sizes, rank, dtype, dtype if own_factors else torch.float32, seed % 3 > 0, seed)
        check_linear(case, ops.patched_linear(**case.arguments), dtype)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_patched_linear_ranks(layout: str, rank: int) -> None:
    case = linear_case(layout, (17, 63, 100), rank, seed=rank)
    check_linear(case, ops.patched_linear(**case.arguments), torch.float32)


@pytest.mark.parametrize("mistake", ["rank", "index", "coefficient", "rounding"])
def test_the_check_can_fail(mistake: str) -> None:
    """The bounds above are narrow enough for the errors a kernel would make."""
    dtype = torch.bfloat16
    case = linear_case("pool", (17, 63, 100), 2, dtype)
    arguments = case.arguments
    if mistake == "rank":
        arguments |= {"u": case.u[:, :1], "v": case.v[:, :1]}
    elif mistake == "index":
        arguments["index"] = case.index.clamp(min=0)
    elif mistake == "coefficient":
        arguments["v"] = case.v.to(dtype)
    out = ops.patched_linear(**arguments)
    if mistake == "rounding":
        plain = F.linear(case.z, case.weight, case.bias)
        out = plain + torch.einsum("mrn,mr->mn", case.row_u, torch.einsum("mrk,mk->mr", case.row_v, case.z.double())).to(dtype)
    with pytest.raises(AssertionError):
        check_linear(case, out, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
def test_patched_linear_strides(dtype: torch.dtype, layout: str) -> None:
    case = linear_case(layout, (7, 63, 100), 3, dtype)

    def in_columns(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    def in_gaps(x: Tensor) -> Tensor:
        wide = torch.full([2 * size for size in x.shape], torch.nan, dtype=x.dtype)
        view = wide[tuple(slice(None, None, 2) for _ in x.shape)]
        return view.copy_(x)

    for stride in (in_columns, in_gaps):
        strided = replace(case, **{name: stride(getattr(case, name)) for name in ("z", "weight", "u", "v")})
        assert not strided.z.is_contiguous()
        assert not strided.weight.is_contiguous()
        check_linear(strided, ops.patched_linear(**strided.arguments), dtype)
    repeated = replace(case, z=case.z[:1].expand(7, -1))
    check_linear(repeated, ops.patched_linear(**repeated.arguments), dtype)


@pytest.mark.parametrize("out_dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
def test_out_dtype(dtype: torch.dtype, layout: str, out_dtype: torch.dtype) -> None:
    case = linear_case(layout, (5, 63, 100), 2, dtype)
    out = ops.patched_linear(**case.arguments, out_dtype=out_dtype)
    check_linear(case, out, out_dtype)
    plain = F.linear(case.z, case.weight, case.bias)
    if case.index is not None:
        assert same_bits(out[case.index < 0], plain[case.index < 0].to(out_dtype))
    else:
        assert same_bits(out, ops.add_low_rank(plain, case.z, case.u, case.v, out_dtype=out_dtype))


@pytest.mark.parametrize("layout", LAYOUTS[:3])
@every_dtype
def test_patched_linear_is_add_low_rank_on_linear(dtype: torch.dtype, layout: str) -> None:
    for seed, sizes in enumerate(SIZES):
        case = linear_case(layout, sizes, 1 + seed % 4, dtype, bias=seed % 2 > 0, seed=seed)
        plain = F.linear(case.z, case.weight, case.bias)
        out = ops.patched_linear(**case.arguments)
        assert same_bits(out, ops.add_low_rank(plain, case.z, case.u, case.v))
        if out.numel() > 100:
            assert not torch.equal(out, plain)


@every_dtype
def test_index_minus_one_gives_the_bits_of_linear(dtype: torch.dtype) -> None:
    """Not ``plain + 0``: a NaN or infinity in the pool, or a -0 in the output, would show."""
    case = linear_case("pool", (17, 63, 100), 2, dtype)
    case.weight[:5], case.bias[:5] = 0, -0.0
    case.z[1] = torch.nan
    case.z[4, :2] = -0.0
    plain = F.linear(case.z, case.weight, case.bias)
    for value in (1.0, torch.nan, torch.inf):
        u, v = torch.full_like(case.u, value), torch.full_like(case.v, value)
        out = ops.patched_linear(case.z, case.weight, u, v, case.bias, index=case.index)
        unpatched = case.index < 0
        assert unpatched[[1, 4]].all()
        assert not unpatched.all()
        assert same_bits(out[unpatched], plain[unpatched])
        assert not (out[~unpatched] == plain[~unpatched]).any()
        all_plain = ops.patched_linear(case.z, case.weight, u, v, case.bias, index=torch.full_like(case.index, -1))
        assert same_bits(all_plain, plain)


@pytest.mark.parametrize("integer", [torch.int64, torch.int32, torch.int16, torch.int8], ids=str)
def test_index_of_any_integer_dtype(integer: torch.dtype) -> None:
    case = linear_case("pool", (17, 63, 100))
    out = ops.patched_linear(**case.arguments | {"index": case.index.to(integer)})
    assert same_bits(out, ops.patched_linear(**case.arguments))


def test_an_unsigned_index_is_no_mask() -> None:
    case = linear_case("pool", (POOL, 7, 9))
    index = torch.tensor([1, 4, 1, 2, 3])
    out = ops.patched_linear(**case.arguments | {"index": index.to(torch.uint8)})
    assert same_bits(out, ops.patched_linear(**case.arguments | {"index": index}))


def test_an_empty_pool_patches_no_row() -> None:
    case = linear_case("pool", (3, 7, 9))
    out = ops.patched_linear(**case.arguments | {"u": case.u[:0], "v": case.v[:0], "index": torch.full((3,), -1)})
    assert same_bits(out, F.linear(case.z, case.weight, case.bias))


@pytest.mark.parametrize("layout", ["row", "row-rank", "pool"])
@every_dtype
def test_a_row_does_not_see_the_factors_of_others(dtype: torch.dtype, layout: str) -> None:
    case = linear_case(layout, (17, 63, 100), 3, dtype)
    out = ops.patched_linear(**case.arguments)
    keep = 6 if case.index is None else int(case.index.max())
    chosen = torch.arange(17) == 6 if case.index is None else case.index == keep
    assert 0 < chosen.sum() < 17
    for value in (0.0, 1e30, torch.nan):
        u, v = torch.full_like(case.u, value), torch.full_like(case.v, value)
        u[keep], v[keep] = case.u[keep], case.v[keep]
        other = ops.patched_linear(**case.arguments | {"u": u, "v": v})
        assert same_bits(other[chosen], out[chosen])
        patched = ~chosen if case.index is None else ~chosen & (case.index >= 0)
        assert (other[patched] != out[patched]).any(1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout: str) -> None:
    case = linear_case(layout, (4, 3, 5), 2, torch.float64, torch.float64)
    inputs = [x.requires_grad_() for x in (case.z, case.weight, case.u, case.v, case.bias)]
    assert torch.autograd.gradcheck(lambda *x: ops.patched_linear(*x, index=case.index), inputs)
    if layout != "pool":
        assert torch.autograd.gradcheck(lambda z, w, u, v, b: ops.add_low_rank(F.linear(z, w, b), z, u, v), inputs)


def test_gradients_of_the_pool_go_to_the_rows_used() -> None:
    case = linear_case("pool", (4, 3, 5), 2, torch.float64, torch.float64)
    case.u.requires_grad_()
    ops.patched_linear(case.z, case.weight, case.u, case.v, index=torch.tensor([2, -1, 2, 4])).sum().backward()
    assert (case.u.grad != 0).any((1, 2)).tolist() == [False, False, True, False, True]


FLOATING = "expected {} in fp64, fp32, bf16 or fp16, got torch.{}"
LINEAR_ERRORS: dict[str, tuple[dict, type, str]] = {
    "z has one dimension": ({"z": torch.ones(5)}, ValueError, "expected z with 2 dimensions, got (5,)"),
    "z has three": ({"z": torch.ones(1, 3, 5)}, ValueError, "expected z with 2 dimensions, got (1, 3, 5)"),
    "z of integers": ({"z": torch.ones(3, 5, dtype=torch.int64)}, TypeError, FLOATING.format("z", "int64")),
    "weight has one dimension": ({"weight": torch.ones(5)}, ValueError, "expected weight with 2 dimensions, got (5,)"),
    "weight too wide": ({"weight": torch.ones(4, 6)}, ValueError, "expected weight (N, 5), got (4, 6)"),
    "weight dtype": (
        {"weight": torch.ones(4, 5, dtype=torch.bfloat16)},
        TypeError,
        "expected weight in z's dtype torch.float32, got torch.bfloat16",
    ),
    "weight device": ({"weight": torch.ones(4, 5, device="meta")}, ValueError, "expected weight on cpu, got meta"),
    "bias shape": ({"bias": torch.ones(5)}, ValueError, "expected bias (4,), got (5,)"),
    "bias dtype": ({"bias": torch.ones(4, dtype=torch.float16)}, TypeError, "expected bias in"),
    "bias device": ({"bias": torch.ones(4, device="meta")}, ValueError, "expected bias on cpu, got meta"),
    "u rows": ({"u": torch.ones(2, 4)}, ValueError, "expected u (3, 4), (3, R, 4) or (1, R, 4), got (2, 4)"),
    "u width": ({"u": torch.ones(3, 5)}, ValueError, "expected u (3, 4), (3, R, 4) or (1, R, 4), got (3, 5)"),
    "v width": ({"v": torch.ones(3, 4)}, ValueError, "expected v (3, 5), (3, R, 5) or (1, R, 5), got (3, 4)"),
    "shared without rank": ({"u": torch.ones(1, 4)}, ValueError, "expected u (3, 4), (3, R, 4) or (1, R, 4), got (1, 4)"),
    "a vector": ({"u": torch.ones(4)}, ValueError, "expected u (3, 4), (3, R, 4) or (1, R, 4), got (4,)"),
    "a pool without index": ({"u": torch.ones(2, 1, 4)}, ValueError, "expected u (3, 4), (3, R, 4) or (1, R, 4), got (2, 1, 4)"),
    "ranks differ": (
        {"u": torch.ones(3, 2, 4), "v": torch.ones(3, 1, 5)},
        ValueError,
        "expected u and v with the same rows and rank, got (3, 2, 4) and (3, 1, 5)",
    ),
    "layouts differ": (
        {"u": torch.ones(1, 1, 4)},
        ValueError,
        "expected u and v with the same rows and rank, got (1, 1, 4) and (3, 5)",
    ),
    "u of integers": ({"u": torch.ones(3, 4, dtype=torch.int32)}, TypeError, FLOATING.format("u", "int32")),
    "v complex": ({"v": torch.ones(3, 5, dtype=torch.complex64)}, TypeError, FLOATING.format("v", "complex64")),
    "v device": ({"v": torch.ones(3, 5, device="meta")}, ValueError, "expected v on cpu, got meta"),
}
POOLED = {"u": torch.ones(2, 1, 4), "v": torch.ones(2, 1, 5)}
LINEAR_ERRORS |= {
    "pool without rank": ({"index": torch.zeros(3, dtype=torch.int64)}, ValueError, "expected u (P, R, 4), got (3, 4)"),
    "index shape": (
        POOLED | {"index": torch.zeros(2, dtype=torch.int64)},
        ValueError,
        "expected index (3,) of integers, got (2,) torch.int64",
    ),
    "index of floats": (POOLED | {"index": torch.zeros(3)}, ValueError, "expected index (3,) of integers, got (3,) torch.float32"),
    "index of bools": (
        POOLED | {"index": torch.zeros(3, dtype=torch.bool)},
        ValueError,
        "expected index (3,) of integers, got (3,) torch.bool",
    ),
    "index too large": (POOLED | {"index": torch.tensor([0, 2, -1])}, ValueError, "expected index from -1 to 1, got -1 to 2"),
    "index too small": (POOLED | {"index": torch.tensor([0, 1, -2])}, ValueError, "expected index from -1 to 1, got -2 to 1"),
    "index device": (
        POOLED | {"index": torch.zeros(3, dtype=torch.int64, device="meta")},
        ValueError,
        "expected index on cpu, got meta",
    ),
}


def check_refused(error: type, message: str, call: Callable[[], object]) -> None:
    """The error itself, not a subclass, with the message somewhere in it."""
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert type(raised.value) is error


@pytest.mark.parametrize("mistake", LINEAR_ERRORS)
def test_patched_linear_refuses(mistake: str) -> None:
    good = {"z": torch.ones(3, 5), "weight": torch.ones(4, 5), "u": torch.ones(3, 4), "v": torch.ones(3, 5), "bias": torch.ones(4)}
    ops.patched_linear(**good)
    changes, error, message = LINEAR_ERRORS[mistake]
    check_refused(error, message, lambda: ops.patched_linear(**good | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"y": torch.ones(4)}, ValueError, "expected y with 2 dimensions, got (4,)"),
        ({"y": torch.ones(3, 4, dtype=torch.int64)}, TypeError, FLOATING.format("y", "int64")),
        ({"y": torch.ones(2, 4)}, ValueError, "expected y and z with the same number of rows, got (2, 4) and (3, 5)"),
        ({"y": torch.ones(3, 5)}, ValueError, "expected u (3, 5), (3, R, 5) or (1, R, 5), got (3, 4)"),
        ({"y": torch.ones(3, 4, device="meta")}, ValueError, "meta"),
        ({"z": torch.ones(5)}, ValueError, "expected z with 2 dimensions, got (5,)"),
        ({"v": torch.ones(3, 4)}, ValueError, "expected v (3, 5), (3, R, 5) or (1, R, 5), got (3, 4)"),
    ],
)
def test_add_low_rank_refuses(changes: dict, error: type, message: str) -> None:
    good = {"y": torch.ones(3, 4), "z": torch.ones(3, 5), "u": torch.ones(3, 4), "v": torch.ones(3, 5)}
    ops.add_low_rank(**good)
    check_refused(error, message, lambda: ops.add_low_rank(**good | changes))


# read_direction, rms_normalize


@every_dtype
def test_read_direction(dtype: torch.dtype) -> None:
    z = normal(seeded(0), 2, 5, 63, dtype=dtype)
    z[1, 2] = 0
    v, norm2 = ops.read_direction(z)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert v.dtype == norm2.dtype == wide
    exact = z.double().square().sum(-1)
    assert ((norm2.double() - exact).abs() <= 64 * UNIT[wide] * exact).all()
    product = (v.double() * z.double()).sum(-1)
    assert product[1, 2] == norm2[1, 2] == 0
    assert not v[1, 2].any()
    product[1, 2] = 1
    assert ((product - 1).abs() <= 64 * UNIT[wide]).all()
    expected = z.double() / exact.clamp(min=1e-300).unsqueeze(-1)
    assert ((v.double() - expected).abs() <= 64 * UNIT[wide] * expected.abs()).all()
    fine, _ = ops.read_direction(z, torch.float64)
    assert fine.dtype == torch.float64
    assert ((fine - expected).abs() <= 64 * UNIT[torch.float64] * expected.abs()).all()


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-22, 1e-18, 1e17, 1e20, 1e38])
def test_read_direction_is_right_or_says_so(size: float) -> None:
    """Where ``‖z‖²`` leaves fp32 the norm must be 0, which callers look at; a direction that is a little off would pass unseen."""
    z = normal(seeded(1), 4, 63, dtype=torch.float32).clamp(-3, 3) * size
    v, norm2 = ops.read_direction(z)
    product = (v.double() * z.double()).sum(-1)
    refused = (norm2 == 0) & ~v.any(-1)
    assert (refused | ((product - 1).abs() <= 64 * UNIT[torch.float32])).all()


@every_dtype
def test_rms_normalize(dtype: torch.dtype) -> None:
    x = normal(seeded(0), 2, 3, 63, dtype=dtype)
    x[0, 1] *= 1e-3
    x[1, 1] = 0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for eps in (1e-6, 1e-2, 0.5):
        out = ops.rms_normalize(x, eps)
        expected = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
        assert (out.dtype, out.shape) == (wide, x.shape)
        assert ((out.double() - expected).abs() <= 16 * UNIT[wide] * expected.abs()).all()
        assert not out[1, 1].any()
    x[1, 1] = 1
    rms = ops.rms_normalize(x, 0.0).double().square().mean(-1).sqrt()
    assert ((rms - 1).abs() <= 16 * UNIT[wide]).all()


# invert_rmsnorm

Rows = tuple[Tensor, Tensor]


def uniform(generator: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)


def signs(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.where(torch.rand(*shape, generator=generator) < 0.5, -1.0, 1.0).double()


def some(generator: torch.Generator, share: float, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator) < share


def gaussian(rng: torch.Generator, rows: int, n: int) -> Rows:
    return 1 + 0.5 * normal(rng, rows, n), normal(rng, rows, n)


def sparse(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Most of g is 0, at the minimum of m² too: the secular equation need not have a root."""
    m, g = gaussian(rng, rows, n)
    g[some(rng, 0.7, rows, n)] = 0
    return m, g.scatter(1, m.abs().argmin(1, keepdim=True), 0.0)


def near_hard(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Beside the boundary between a root and none: ``φ(0) = 1 ± tiny`` for C = 1, g = 0 or tiny at the minimum."""
    m, g = gaussian(rng, rows, n)
    lowest = m.abs().argmin(1, keepdim=True)
    e = (m.abs() - m.abs().gather(1, lowest)) * (m.abs() + m.abs().gather(1, lowest))
    g.scatter_(1, lowest, 0.0)
    phi = torch.where(e > 0, m * g / torch.where(e > 0, e, 1.0), 0.0).square().sum(1, keepdim=True)
    off = torch.tensor([0, 1e-15, -1e-15, 1e-13, -1e-13, 1e-12, -1e-12, 1e-8, -1e-8, 1e-3, -1e-3], dtype=torch.float64)
    at_lowest = torch.tensor([0, 1e-30, 1e-15, 1e-8, 1e-4], dtype=torch.float64)
    row = torch.arange(rows).unsqueeze(1)
    g *= (n * (1 + off[row % 11]) / torch.where(phi > 0, phi, 1.0)).sqrt()
    return m, g.scatter(1, lowest, at_lowest[(row // 11) % 5])


def zeros(rng: torch.Generator, rows: int, n: int) -> Rows:
    m, g = gaussian(rng, rows, n)
    m[some(rng, 0.3, rows, n)] = 0
    return m, g * 10 ** uniform(rng, -3, 3, rows, 1)


def zeros_of_both(rng: torch.Generator, rows: int, n: int) -> Rows:
    m, g = zeros(rng, rows, n)
    return m, torch.where(m == 0, -0.0, g)


def all_zero(rng: torch.Generator, rows: int, n: int) -> Rows:
    m, g = gaussian(rng, rows, n)
    row = torch.arange(rows).unsqueeze(1)
    return torch.where(row % 3 == 0, 0.0, m), torch.where(row % 3 == 1, 0.0, g)


def negative_zero(rng: torch.Generator, rows: int, n: int) -> Rows:
    m, g = gaussian(rng, rows, n)
    m[:, 0] = -0.0
    g[::2, 0] = -0.0
    return m, g


def ties(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Few values of |m|, some of them one ulp of fp32 apart."""
    values = torch.tensor([0.5, 0.5, 1, 1 + 2**-23], dtype=torch.float64)
    m = signs(rng, rows, n) * values[torch.randint(4, (rows, n), generator=rng)]
    return m, normal(rng, rows, n) * 10 ** uniform(rng, -4, 1, rows, 1)


def plateaus(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Clusters one ulp wide, decades apart."""
    ulps = torch.randint(3, (rows, n), generator=rng)
    m = signs(rng, rows, n) * 10.0 ** torch.randint(-4, 4, (rows, n), generator=rng) * (1 + 2**-23 * ulps)
    return m, normal(rng, rows, n) * 10 ** uniform(rng, -8, 4, rows, n)


def clusters(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Values of |m| one ulp of fp64 apart, and a root of that size: ``a² - min a²`` would have lost every digit of it."""
    m = signs(rng, rows, n) * 0.7 * (1 + ULP * torch.randint(4, (rows, n), generator=rng).double())
    return m, normal(rng, rows, n) * 10 ** uniform(rng, -17, -14, rows, 1)


def nested(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Plateaus within plateaus: without the geometric step Newton climbs them one at a time."""
    m = (10 ** uniform(rng, -30, 36, rows, n)).sort(1).values
    g = m * torch.arange(1, n + 1) ** uniform(rng, -3, 3, rows, 1) * 10 ** uniform(rng, -1, 1, rows, 1)
    g[:, 0] *= 10 ** uniform(rng, -30, 0, rows)
    return m, g.clamp(max=3e38)


def graded(rng: torch.Generator, rows: int, n: int) -> Rows:
    m, g = (signs(rng, rows, n) * 10 ** uniform(rng, -6, 6, rows, n) for _ in range(2))
    return m, g


def full_range(rng: torch.Generator, rows: int, n: int) -> Rows:
    m, g = (signs(rng, rows, n) * 2 ** uniform(rng, -126, 127, rows, n) for _ in range(2))
    return m, g


def denormal(rng: torch.Generator, rows: int, n: int) -> Rows:
    return normal(rng, rows, n) * 2.0**-140, normal(rng, rows, n) * 2 ** uniform(rng, -149, -120, rows, 1)


def huge(rng: torch.Generator, rows: int, n: int) -> Rows:
    return normal(rng, rows, n).clamp(-3, 3) * 1e38, normal(rng, rows, n).clamp(-3, 3) * 1e38


def both_ends(rng: torch.Generator, rows: int, n: int) -> Rows:
    """The smallest denormal beside the largest number."""
    m, g = gaussian(rng, rows, n)
    m[:, 0], g[::2, 0] = 2.0**-149, 3.4e38
    m[:, -1], g[:, -1] = 3.4e38, 2.0**-149
    return m, g


def single(rng: torch.Generator, rows: int, n: int) -> Rows:
    m, g = graded(rng, rows, 1)
    return m, g


ROWS: dict[str, Callable[[torch.Generator, int, int], Rows]] = {
    maker.__name__: maker
    for maker in (
        gaussian, sparse, near_hard, zeros, zeros_of_both, all_zero, negative_zero, ties, plateaus, clusters, nested, graded,
        full_range, denormal, huge, both_ends, single,
    )
}  # fmt: skip
# (C, eps) by their r² = C²/(C² + eps): 1, about 1/2, about 1e-6.
RADII = [(1.0, 0.0), (1e-3, 1e-6), (1e-3, 1.0)]


def rows_of(family: str, count: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Rows:
    """(m, g) of fp32 numbers, or of fp64 ones as wide."""
    m, g = ROWS[family](seeded(seed), count, n)
    return m.to(dtype), g.to(dtype)


@dataclass
class Exact:
    """One row solved in 60 digits: the squares are exact, and so is their difference's every digit that matters."""

    status: Status
    shift: mpf
    y: list[mpf]  # coordinates off the pole only, where the solution is unique
    size: mpf  # sqrt(N), ‖y‖
    e: list[mpf]
    p: list[mpf]
    borderline: bool  # no fp64 arithmetic can tell whether there is a root

    @property
    def condition(self) -> mpf:
        """Relative change of the shift for one of φ: without bound where the pole holds next to nothing of the norm."""
        slope = mp.fsum(p**2 / (e + self.shift) ** 3 for p, e in zip(self.p, self.e, strict=True) if p)
        return self.size**2 / (2 * self.shift * slope) if self.shift else mpf(0)

    def residual(self, shift: float) -> mpf:
        return mp.fsum((p / (e + mpf(shift))) ** 2 for p, e in zip(self.p, self.e, strict=True) if p) / self.size**2 - 1


def solve(m: list[float], g: list[float], c: float, eps: float) -> Exact:
    """Bisection on the paper's eq. (8) with ``s = min m² - μ``, first for the exponent of s and then for 33 digits."""
    with mp.workdps(60):
        squares = [mpf(x) ** 2 for x in m]
        e = [x - min(squares) for x in squares]
        p = [abs(mpf(a) * mpf(b)) for a, b in zip(m, g, strict=True)]
        target = len(m) * mpf(c) ** 2 / (mpf(c) ** 2 + mpf(eps))
        terms = [(a, b) for a, b in zip(p, e, strict=True) if a]

        def phi(s: mpf) -> mpf:
            return mp.fsum((a / (b + s)) ** 2 for a, b in terms)

        pole_is_empty = all(b for _, b in terms)
        at_zero = phi(mpf(0)) if pole_is_empty else mp.inf
        hard = at_zero <= target
        shift = mpf(0) if hard else _bisect(lambda s: phi(s) > target, mp.sqrt(mp.fsum(a**2 for a, _ in terms) / target))
        unreachable = any(a == 0 and b != 0 for a, b in zip(m, g, strict=True)) and (not hard or at_zero == target)
        status = Status.UNREACHABLE if unreachable else Status.HARD if hard else Status.EASY
        y = [mp.sign(a) * mp.sign(b) * k / (d + shift) if k else mpf(0) for a, b, k, d in zip(m, g, p, e, strict=True)]
        borderline = pole_is_empty and abs(at_zero / target - 1) < 1e-14
        return Exact(status, shift, y, mp.sqrt(target), e, p, borderline)


def _bisect(left_of_root: Callable[[mpf], bool], upper: mpf) -> mpf:
    high = mp.frexp(upper)[1] + 1
    low = high - 8000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left_of_root(mp.ldexp(1, middle)) else (low, middle)
    a, b = mp.ldexp(1, low), mp.ldexp(1, high)
    for _ in range(110):
        middle = (a + b) / 2
        a, b = (middle, b) if left_of_root(middle) else (a, middle)
    return b


def check_row(exact: Exact, m: list[float], g: list[float], c: float, eps: float, result: ops.RMSNormInverse, row: int) -> None:
    """One row against the oracle; the shift, and y at the pole, only as far as the sums' rounding determines them."""
    single_precision = result.hidden.dtype == torch.float32
    n, rounding = len(m), 2.0**-24 if single_precision else ULP
    status, shift = Status(int(result.status[row])), float(result.shift[row])
    hidden = [mpf(x) for x in result.hidden[row].double().tolist()]
    new_scale = [mpf(x) for x in result.new_scale[row].tolist()]
    assert status is exact.status or exact.borderline

    with mp.workdps(60):
        mean_square = mp.fsum(x**2 for x in hidden) / n
        assert abs(mp.sqrt(mean_square) / mpf(c) - 1) <= 2 * rounding

        norm = mp.sqrt(mean_square + mpf(eps))
        lost = mpf(2) ** (-149 if single_precision else -1074)  # what underflows in hidden
        for m_k, g_k, scale_k, h_k in zip(m, g, new_scale, hidden, strict=True):
            if status is Status.UNREACHABLE and m_k == 0:
                continue
            assert abs(scale_k * h_k / norm - mpf(g_k)) <= 8 * rounding * abs(mpf(g_k)) + abs(scale_k) * lost / norm

        if status is Status.HARD:
            assert shift == 0
        elif not exact.borderline:
            assert abs(exact.residual(shift)) <= 32 * ULP
        # How far rounding in the sums moves the shift; where that is no small change, the pole's share of y is known to √ulp only.
        shift_error = 32 * ULP * exact.condition
        is_sharp = shift_error < 1e-3 and not exact.borderline
        if is_sharp and status is not Status.HARD:
            assert abs(mpf(shift) / exact.shift - 1) <= shift_error
        for k in range(n):
            if exact.status is Status.HARD and exact.e[k] == 0:
                continue  # not unique; the norm above holds its size
            moved = shift_error * exact.shift / (exact.e[k] + exact.shift) * abs(exact.y[k]) if is_sharp and exact.shift else 0
            y_error = moved + (2 * rounding + 32 * ULP) * abs(exact.y[k]) + (0 if is_sharp else 1e-7 * exact.size)
            assert abs(hidden[k] / mp.sqrt(mpf(c) ** 2 + mpf(eps)) - exact.y[k]) <= y_error + lost / norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", ROWS)
def test_inversion_against_the_oracle(family: str, dtype: torch.dtype) -> None:
    count = 55 if family == "near_hard" else 9
    m, g = rows_of(family, count, 9, dtype)
    for c, eps in RADII if family != "near_hard" else RADII[:1]:
        rms = torch.full((count,), c, dtype=dtype) * (1 if family == "near_hard" else uniform(seeded(1), 0.5, 2, count).to(dtype))
        newton, bisection = (ops.invert_rmsnorm(g, m, rms, eps, method=method) for method in ("newton", "bisection"))
        for row in range(count):
            values = (m[row].double().tolist(), g[row].double().tolist(), float(rms[row]), eps)
            exact = solve(*values)
            check_row(exact, *values, newton, row)
            check_row(exact, *values, bisection, row)


def test_the_families_contain_what_they_should() -> None:
    """The oracle test would prove little on rows that are all alike."""
    seen: dict[str, set[Status]] = {}
    for family in ROWS:
        m, g = rows_of(family, 45, 9)
        seen[family] = {Status(status) for status in ops.invert_rmsnorm(g, m, torch.ones(45)).status.tolist()}
    for family in ("sparse", "near_hard", "zeros_of_both"):
        assert seen[family] == {Status.EASY, Status.HARD}
    assert {Status.HARD, Status.UNREACHABLE} <= seen["zeros"]
    assert {Status.EASY, Status.HARD} <= seen["all_zero"]
    assert seen["gaussian"] == seen["graded"] == seen["full_range"] == {Status.EASY}


@pytest.mark.parametrize("mistake", ["root", "hard", "radius", "scale", "pole"])
def test_the_oracle_can_refuse(mistake: str) -> None:
    """Plausible wrong answers: a root next door, no hard case, the norm's eps forgotten, Δm off, the wrong side of the pole."""
    m, g = rows_of("sparse" if mistake == "hard" else "gaussian", 9, 9, torch.float64)
    eps, rms = 0.1, torch.ones(9, dtype=torch.float64)
    right = ops.invert_rmsnorm(g, m, rms, eps)
    row = int((right.status == (Status.HARD if mistake == "hard" else Status.EASY)).nonzero()[0])
    hidden, shift, new_scale, status = (x.clone() for x in (right.hidden, right.shift, right.new_scale, right.status))
    if mistake == "root":
        shift *= 1 + 1e-9
    elif mistake == "hard":
        status[:] = Status.EASY
    elif mistake == "radius":
        hidden = ops.invert_rmsnorm(g, m, rms, 0.0).hidden
    elif mistake == "scale":
        new_scale *= 1 + 1e-13
    else:
        hidden[row, m[row].abs().argmin()] *= -1
        new_scale[row, m[row].abs().argmin()] *= -1
    wrong = ops.RMSNormInverse(hidden, shift, new_scale, status, right.evaluations)
    values = (m[row].tolist(), g[row].tolist(), 1.0, eps)
    check_row(solve(*values), *values, right, row)
    with pytest.raises(AssertionError):
        check_row(solve(*values), *values, wrong, row)


def objective(y: Tensor, m: Tensor, g: Tensor) -> Tensor:
    return (m * y - g).square().sum(-1)


@pytest.mark.parametrize("family", ["gaussian", "sparse", "near_hard", "zeros", "all_zero", "ties", "plateaus"])
def test_no_feasible_point_is_better(family: str) -> None:
    """Small steps test for a minimum, large ones and flips of sign for the global one."""
    count, n, eps = 40, 4, 0.01
    rng = seeded(2)
    m, g = rows_of(family, count, n, torch.float64)
    rms = uniform(rng, 0.5, 2, count)
    result = ops.invert_rmsnorm(g, m, rms, eps)
    y = result.hidden / (rms.square() + eps).sqrt().unsqueeze(1)
    radius = y.norm(dim=1, keepdim=True)
    step = radius * 10 ** uniform(rng, -3, 1, 400, count, 1) * normal(rng, 400, count, n)
    other = torch.where(some(rng, 0.5, 400, count, 1), y, signs(rng, 400, count, n) * y) + step
    other *= radius / other.norm(dim=-1, keepdim=True)
    found, best = objective(y, m, g), objective(other, m, g)
    assert (best - found >= -1e-13 * (best + g.square().sum(-1))).all()


@pytest.mark.parametrize("n", [1, 2, 3, 16, 64, 257])
def test_inversion_of_thousands_of_rows(n: int) -> None:
    """Few evaluations, the radius, the equation and no number that is not finite, on every row of every family."""
    for family, (c, eps) in itertools.product(ROWS, RADII):
        m, g = rows_of(family, 100, n, seed=n)
        result = ops.invert_rmsnorm(g, m, torch.full((100,), c), eps)
        assert result.evaluations.max() <= 32
        assert (result.status <= Status.UNREACHABLE).all()
        assert all(x.isfinite().all() for x in (result.hidden, result.shift, result.new_scale))
        assert (result.shift >= 0).all()
        hidden = result.hidden.double()
        mean_square = hidden.square().mean(1)
        assert ((mean_square.sqrt() / torch.tensor(c).double() - 1).abs() <= 2.0**-23).all()
        norm = (mean_square + eps).sqrt().unsqueeze(1)
        error = (result.new_scale * (hidden / norm) - g).abs() - result.new_scale.abs() * 2.0**-149 / norm
        reachable = (m != 0) | (result.status != Status.UNREACHABLE).unsqueeze(1)
        assert (error <= 2.0**-21 * g.abs().double())[reachable].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_methods_agree(dtype: torch.dtype) -> None:
    for family, (c, eps) in itertools.product(ROWS, RADII):
        m, g = rows_of(family, 60, 12, dtype, seed=5)
        rms = torch.full((60,), c, dtype=dtype)
        newton, bisection = (ops.invert_rmsnorm(g, m, rms, eps, method=method) for method in ("newton", "bisection"))
        assert torch.equal(newton.status, bisection.status)
        difference = (newton.hidden.double() - bisection.hidden.double()).norm(dim=1) / newton.hidden.double().norm(dim=1)
        assert difference.max() <= (1e-7 if family == "near_hard" else 2.0**-22 if dtype == torch.float32 else 1e-12)
        hard = newton.status == Status.HARD
        assert not newton.shift[hard].any() and not bisection.shift[hard].any()
        assert newton.evaluations[~hard].min() > 0 if (~hard).any() else True
        assert not newton.evaluations[hard].any()
        assert (bisection.evaluations[~hard] == 64).all()


def test_fallback_gives_the_direction_of_the_missing_norm() -> None:
    m = torch.tensor([[0.5, -0.5, 2.0, 0.5]]).double()
    g = torch.tensor([[0.0, 0.0, 1.0, 0.0]]).double()
    fallback = torch.tensor([[3.0, -4.0, 100.0, 0.0]]).double()
    result = ops.invert_rmsnorm(g, m, torch.ones(1), fallback=fallback)
    # Off the pole y = g m / (m² - 0.25) = 2/3.75; the rest of the norm, 4, lies along (3, -4, ·, 0)/5.
    rest = (4 - (2 / 3.75) ** 2) ** 0.5
    torch.testing.assert_close(result.hidden, torch.tensor([[0.6 * rest, -0.8 * rest, 2 / 3.75, 0.0]]).double())
    assert result.status == Status.HARD
    without = ops.invert_rmsnorm(g, m, torch.ones(1))
    torch.testing.assert_close(without.hidden, torch.tensor([[rest, 0.0, 2 / 3.75, 0.0]]).double())
    for useless in (torch.zeros(1, 4), torch.full((1, 4), torch.nan), torch.tensor([[0.0, torch.inf, 0.0, 0.0]])):
        assert same_bits(ops.invert_rmsnorm(g, m, torch.ones(1), fallback=useless.double()).hidden, without.hidden)


def test_fallback_may_not_leave_a_coordinate_unreachable() -> None:
    """Through m_k = 0 only y_k ≠ 0 reaches g_k, so a fallback that is 0 there is not followed."""
    m = torch.tensor([[0.0, 0.0, 2.0]])
    g = torch.tensor([[1.0, -2.0, 0.5]])
    fallback = torch.tensor([[1.0, 0.0, 1.0]])
    result = ops.invert_rmsnorm(g, m, torch.ones(1), fallback=fallback)
    assert result.status == Status.HARD
    torch.testing.assert_close((result.new_scale * result.hidden).float(), g)
    followed = ops.invert_rmsnorm(g, m, torch.ones(1), fallback=torch.tensor([[1.0, 3.0, 1.0]]))
    torch.testing.assert_close(followed.hidden[0, 1] / followed.hidden[0, 0], torch.tensor(3.0))
    torch.testing.assert_close((followed.new_scale * followed.hidden).float(), g)


def one_row(m: list[float], g: list[float], c: float) -> Status:
    result = ops.invert_rmsnorm(torch.tensor([g]).float(), torch.tensor(m).float(), torch.tensor([c]).float())
    return Status(int(result.status))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_statuses(bad: float) -> None:
    assert one_row([1, 2], [1, 1], 1) is Status.EASY
    assert one_row([1, 2], [0, 1], 1) is Status.HARD
    assert one_row([0, 2], [1, 1], 1) is Status.HARD
    assert one_row([0, 2], [1, 9], 1) is Status.UNREACHABLE
    assert one_row([0, 2], [0, 9], 1) is Status.EASY
    assert one_row([bad, 2], [1, 1], 1) is Status.NONFINITE
    assert one_row([1, 2], [1, bad], 1) is Status.NONFINITE
    assert one_row([1, 2], [1, bad], bad) is Status.NONFINITE
    for c in (0.0, -1.0, bad):
        assert one_row([1, 2], [1, 1], c) is Status.BAD_RADIUS


def test_a_search_cut_short_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    m, g = rows_of("graded", 40, 12)
    monkeypatch.setattr(reference, "MAX_EVALUATIONS", 2)
    result = reference.invert_rmsnorm(g, m, torch.ones(40))
    stopped = result.status == Status.NO_CONVERGENCE
    assert 0 < stopped.sum() < 40
    assert (result.evaluations[stopped] == 2).all()


POISON: dict[str, tuple[str, float, Status]] = {
    "g-nan": ("g", torch.nan, Status.NONFINITE),
    "g-inf": ("g", torch.inf, Status.NONFINITE),
    "m-nan": ("m", torch.nan, Status.NONFINITE),
    "m-inf": ("m", -torch.inf, Status.NONFINITE),
    "rms-zero": ("rms", 0.0, Status.BAD_RADIUS),
    "rms-negative": ("rms", -1.0, Status.BAD_RADIUS),
    "rms-nan": ("rms", torch.nan, Status.BAD_RADIUS),
    "rms-inf": ("rms", torch.inf, Status.BAD_RADIUS),
    "fallback-nan": ("fallback", torch.nan, Status.HARD),
}


@pytest.mark.parametrize("method", ["newton", "bisection"])
@pytest.mark.parametrize("poison", POISON)
def test_a_poisoned_row_leaves_the_others_alone(poison: str, method: str) -> None:
    name, value, status = POISON[poison]
    parts = [rows_of(family, 3, 48) for family in ("sparse", "gaussian", "zeros", "full_range")]
    arguments = {
        "m": torch.cat([m for m, _ in parts]),
        "g": torch.cat([g for _, g in parts]),
        "rms": torch.rand(12, generator=seeded(4)) + 0.5,
    }
    arguments["fallback"] = normal(seeded(3), 12, 48, dtype=torch.float32)
    arguments["g"][1] *= 1e-3  # no root: the fallback is looked at

    def invert(m: Tensor, g: Tensor, rms: Tensor, fallback: Tensor) -> ops.RMSNormInverse:
        return ops.invert_rmsnorm(g, m, rms, 1e-6, fallback, method)

    clean = invert(**arguments)
    assert clean.status[1] == Status.HARD
    if name == "rms":
        arguments["rms"][1] = value
    else:
        arguments[name][1, 5] = value
        arguments[name][1, int(arguments["m"][1].abs().nan_to_num(9).argmin())] = value
    result = invert(**arguments)
    assert result.status[1] == status
    assert result.evaluations[1] == 0
    others = torch.arange(12) != 1
    for part in ("hidden", "shift", "new_scale", "status", "evaluations"):
        assert torch.equal(getattr(result, part)[others], getattr(clean, part)[others])
    row = {part: getattr(result, part)[1] for part in ("hidden", "shift", "new_scale")}
    if status is Status.NONFINITE:
        assert all(x.isnan().all() for x in row.values())
    elif status is Status.BAD_RADIUS:
        assert not row["hidden"].any() and row["shift"] == 0
        assert torch.equal(row["new_scale"], arguments["m"][1].double())
    else:
        assert all(x.isfinite().all() for x in row.values())


@pytest.mark.parametrize("method", ["newton", "bisection"])
@pytest.mark.parametrize("n", [1, 7, 48, 129, 1000])
def test_a_row_does_not_see_its_batch(n: int, method: str) -> None:
    parts = [rows_of(family, 5, n) for family in ("gaussian", "sparse", "zeros", "graded", "full_range", "plateaus")]
    m, g = (torch.cat(part) for part in zip(*parts, strict=True))
    rms, eps = torch.rand(30, generator=seeded(0)) + 0.5, 1e-6
    together = ops.invert_rmsnorm(g, m, rms, eps, method=method)

    def check(result: ops.RMSNormInverse, rows: Tensor) -> None:
        for part in ("hidden", "shift", "new_scale", "status", "evaluations"):
            assert torch.equal(getattr(result, part), getattr(together, part)[rows])

    for rows in (torch.arange(30).flip(0), torch.arange(13), *torch.arange(0, 30, 3).split(1)):
        check(ops.invert_rmsnorm(g[rows], m[rows], rms[rows], eps, method=method), rows)
    one_scale = ops.invert_rmsnorm(g[:5], m[3], rms[:5], eps, method=method)
    per_row = ops.invert_rmsnorm(g[:5], m[3].expand(5, n).clone(), rms[:5], eps, method=method)
    assert same_bits(one_scale.hidden, per_row.hidden) and same_bits(one_scale.new_scale, per_row.new_scale)
    in_columns = ops.invert_rmsnorm(g.T.contiguous().T, m.T.contiguous().T, rms, eps, method=method)
    assert torch.equal(in_columns.status, together.status)
    torch.testing.assert_close(in_columns.hidden, together.hidden, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_low_precision_inputs_are_taken_at_their_value(dtype: torch.dtype) -> None:
    m, g = rows_of("gaussian", 9, 48, dtype)
    rms = (torch.rand(9, generator=seeded(0)) + 0.5).to(dtype)
    result = ops.invert_rmsnorm(g, m, rms, 1e-6, fallback=g)
    wide = ops.invert_rmsnorm(g.double(), m.double(), rms.double(), 1e-6, fallback=g.double())
    assert result.hidden.dtype == torch.float32
    assert wide.hidden.dtype == result.shift.dtype == result.new_scale.dtype == torch.float64
    assert (result.status.dtype, result.evaluations.dtype) == (torch.int8, torch.int32)
    assert torch.equal(result.hidden, wide.hidden.float())
    assert torch.equal(result.shift, wide.shift) and torch.equal(result.new_scale, wide.new_scale)


@pytest.mark.parametrize("power", [-400, -60, 60, 400])
def test_wide_fp64_rows_are_inverted_like_scaled_ones(power: int) -> None:
    """``g → βg, m → βm`` leaves y alone: m² and β²s fit fp64, and p² and (p/s)³ may not be let overflow on the way."""
    beta = 2.0**power
    for family in ("gaussian", "sparse", "zeros", "ties", "graded"):
        m, g = rows_of(family, 20, 9, torch.float64)
        plain = ops.invert_rmsnorm(g, m, torch.ones(20).double(), 0.1)
        scaled = ops.invert_rmsnorm(beta * g, beta * m, torch.ones(20).double(), 0.1)
        assert torch.equal(scaled.status, plain.status)
        torch.testing.assert_close(scaled.hidden, plain.hidden, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(scaled.new_scale / beta, plain.new_scale, rtol=1e-12, atol=0)
        torch.testing.assert_close(scaled.shift / beta / beta, plain.shift, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("dtype", "g", "m", "c"),
    [
        (torch.float64, [1e160, 2e160], [1.0, 3.0], 1.0),
        (torch.float64, [1.0, 2.0], [1e155, 3e155], 1.0),
        (torch.float64, [1e300, 1e-300], [1e-300, 1e300], 1.0),
        (torch.float32, [0.0, 200.0], [1.0, 3.0], 3e38),
    ],
    ids=["large-g", "large-m", "wide", "large-rms"],
)
def test_overflow_is_not_silent(dtype: torch.dtype, g: list[float], m: list[float], c: float) -> None:
    """A row whose answer is no number may have a status that says so, but not one that says all is well."""
    result = ops.invert_rmsnorm(torch.tensor([g], dtype=dtype), torch.tensor(m, dtype=dtype), torch.tensor([c], dtype=dtype))
    finite = all(x.isfinite().all() for x in (result.hidden, result.shift, result.new_scale))
    assert finite or result.status >= Status.NONFINITE


@pytest.mark.parametrize("method", ["newton", "bisection"])
@every_dtype
def test_inversion_of_nothing(dtype: torch.dtype, method: str) -> None:
    for scale in (torch.ones(7, dtype=dtype), torch.ones(0, 7, dtype=dtype)):
        target = torch.ones(0, 7, dtype=dtype)
        result = ops.invert_rmsnorm(target, scale, torch.ones(0, dtype=dtype), 1e-6, target, method)
        assert result.hidden.shape == result.new_scale.shape == (0, 7)
        assert result.shift.shape == result.status.shape == result.evaluations.shape == (0,)
        assert result.hidden.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target": torch.ones(5)}, ValueError, "expected target with 2 dimensions, got (5,)"),
        ({"target": torch.ones(3, 0)}, ValueError, "expected target (B, n) with n ≥ 1, got n = 0"),
        ({"target": torch.ones(3, 5, dtype=torch.int32)}, TypeError, FLOATING.format("target", "int32")),
        ({"scale": torch.ones(4)}, ValueError, "expected scale (5,) or (3, 5), got (4,)"),
        ({"scale": torch.ones(1, 5)}, ValueError, "expected scale (5,) or (3, 5), got (1, 5)"),
        ({"scale": torch.ones(5, dtype=torch.int64)}, TypeError, FLOATING.format("scale", "int64")),
        ({"scale": torch.ones(5, device="meta")}, ValueError, "expected scale on cpu, got meta"),
        ({"rms": torch.ones(3, 1)}, ValueError, "expected rms (3,), got (3, 1)"),
        ({"rms": torch.tensor(1.0)}, ValueError, "expected rms (3,), got ()"),
        ({"rms": torch.ones(3, dtype=torch.bool)}, TypeError, FLOATING.format("rms", "bool")),
        ({"fallback": torch.ones(5)}, ValueError, "expected fallback (3, 5), got (5,)"),
        ({"fallback": torch.ones(3, 5, dtype=torch.int64)}, TypeError, FLOATING.format("fallback", "int64")),
        ({"eps": -1e-6}, ValueError, "expected a finite eps ≥ 0, got -1e-06"),
        ({"eps": float("nan")}, ValueError, "expected a finite eps ≥ 0, got nan"),
        ({"eps": float("inf")}, ValueError, "expected a finite eps ≥ 0, got inf"),
        ({"method": "regula falsi"}, ValueError, "expected method 'newton' or 'bisection', got 'regula falsi'"),
    ],
)
def test_invert_rmsnorm_refuses(changes: dict, error: type, message: str) -> None:
    good = {"target": torch.ones(3, 5), "scale": torch.ones(5), "rms": torch.ones(3)}
    ops.invert_rmsnorm(**good)
    check_refused(error, message, lambda: ops.invert_rmsnorm(**good | changes))
