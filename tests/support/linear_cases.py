"""Random arguments for the linear ops, in every layout of the factors."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from support.numeric import UNIT, in_gaps, normal, same_bits, seeded
from support.row_ops import unit
from torch import Tensor

LAYOUTS = ("row", "row-rank", "shared", "pool")
POOL = 5


@dataclass
class Case:
    """Arguments of ``patched_linear``, and the factors that each row should get as (M, R, ·) in
    fp64.
    """

    z: Tensor
    weight: Tensor
    u: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    index: Tensor | None
    row_u: Tensor
    row_v: Tensor

    @property
    def arguments(self) -> dict:
        return {name: getattr(self, name) for name in ("z", "weight", "u", "v", "bias", "index")}

    @property
    def plain(self) -> dict:
        return {name: getattr(self, name) for name in ("z", "weight", "bias")}

    def rows(self, some: slice) -> "Case":
        """The case of some rows alone."""
        own = ("z", "index", "row_u", "row_v")
        own += ("u", "v") if self.index is None and self.u is not None and len(self.u) > 1 else ()
        parts = {name: getattr(self, name) for name in own}
        return replace(self, **{name: x if x is None else x[some] for name, x in parts.items()})

    def expected(self) -> tuple[Tensor, Tensor]:
        """``(W + Σ_r u_r v_rᵀ) z + b`` in fp64, without a matrix for every row; and the sum of the
        absolute values of all that is added up.
        """
        parts = (self.z, self.weight, self.bias, self.row_u, self.row_v)
        wide = [None if x is None else x.double() for x in parts]
        return _total(*wide), _total(*(None if x is None else x.abs() for x in wide))


def _total(z: Tensor, weight: Tensor, bias: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
    coeff = torch.einsum("mk,mrk->mr", z, v)
    return z @ weight.T + (0 if bias is None else bias) + torch.einsum("mr,mrn->mn", coeff, u)


def check_linear(case: Case, out: Tensor, out_dtype: torch.dtype) -> None:
    """One rounding to out_dtype on top of sums in fp32."""
    expected, size = case.expected()
    assert (out.dtype, out.shape) == (out_dtype, expected.shape)
    # Matrix units cut off what falls below the running sum's last digit, 8 or 16 products at a
    # time: such errors do not cancel.
    sums = max(32, case.z.shape[1] / 256)
    bound = unit(out_dtype) * expected.abs() + sums * UNIT[torch.float32] * size
    least = torch.finfo(out_dtype).smallest_normal
    assert ((out.double() - expected).abs() <= 1.01 * bound + least).all()


def linear_case(
    layout: str,
    sizes: tuple[int, int, int],
    rank: int = 2,
    dtype: torch.dtype = torch.float32,
    factor_dtype: torch.dtype = torch.float32,
    bias: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Random arguments; ``row`` has rank 1."""
    rows, n, k = sizes
    generator = seeded(seed)
    sizes_of = {"row-rank": (rows, rank), "shared": (1, rank), "pool": (POOL, rank)}
    leading = sizes_of.get(layout, (rows,))
    z, weight = normal(generator, rows, k, dtype=dtype), normal(generator, n, k, dtype=dtype)
    u, v = (normal(generator, *leading, size, dtype=factor_dtype) for size in (n, k))
    added = normal(generator, n, dtype=dtype) if bias else None
    index = None
    if layout == "pool":
        index = torch.randint(-1, POOL, (rows,), generator=generator)
        index[1::3] = -1
        row_u, row_v = (
            torch.stack([f[i] if i >= 0 else 0 * f[0] for i in index]) if rows else f[:0]
            for f in (u, v)
        )
    else:
        row_u, row_v = (
            f.unsqueeze(1) if layout == "row" else f.expand(rows, -1, -1) for f in (u, v)
        )
    parts = (z, weight, u, v, added, index, row_u.double(), row_v.double())
    return Case(*(None if part is None else part.to(device) for part in parts))


def check_rows_without_a_patch(run: Callable[..., Tensor], case: Case) -> None:
    """Where the index is -1 a row has the bits of the plain map, not of ``plain + 0``:
    a NaN or infinity in the pool, or a -0 in the output, would show.
    """
    case.weight[:5], case.bias[:5] = 0, -0.0
    case.z[1] = torch.nan
    case.z[4, :2] = -0.0
    plain = run(**case.plain)
    unpatched = case.index < 0
    assert unpatched[[1, 4]].all() and not unpatched.all()
    for value in (1.0, torch.nan, torch.inf):
        factors = {"u": torch.full_like(case.u, value), "v": torch.full_like(case.v, value)}
        out = run(**case.arguments | factors)
        assert same_bits(out[unpatched], plain[unpatched])
        assert not (out[~unpatched] == plain[~unpatched]).any()
    out, pool = run(**case.arguments), case.index
    for integer in (torch.int64, torch.int32, torch.int16, torch.int8):
        given = in_gaps(pool.to(integer))
        assert same_bits(run(**case.arguments | {"index": given}), out)
    same = torch.full_like(pool, 2)
    given, expected = same[:1].expand(len(pool)), run(**case.arguments | {"index": same})
    assert same_bits(run(**case.arguments | {"index": given}), expected)
    nowhere = torch.full_like(case.index, -1)
    for patches in (len(case.u), 0):  # an empty pool patches no row either
        u, v = (x[:patches] for x in (case.u, case.v))
        assert same_bits(run(**case.plain, u=u, v=v, index=nowhere), plain)
