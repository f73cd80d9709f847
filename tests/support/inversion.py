"""What the tests of the RMSNorm inversion share: both implementations, and the equations checked on
many rows.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields

import pytest
import torch
from support.numeric import ULP, by_columns, in_gaps, poisoned, same_bits, seeded
from support.rows import RADII, ROWS, rows_of, uniform
from torch import Tensor

from icl_patch import ops
from icl_patch.ops import InversionStatus as Status
from icl_patch.ops import native, reference

Invert = Callable[..., ops.RMSNormInverse]
ROOT_ULP = 8 * ULP**0.5  # beside the hard case y is known to the root of a rounding only

needs_native = pytest.mark.skipif(not native.cpu_instructions, reason=native.describe())
IMPLEMENTATIONS = [
    pytest.param(ops.invert_rmsnorm, id="native", marks=needs_native),
    pytest.param(reference.invert_rmsnorm, id="torch"),
]
# Of the same numbers, in other places.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: by_columns(x) if x.dim() == 2 else x,
    "strided": in_gaps,
    "sliced": poisoned,
    "negated": lambda x: torch._neg_view(-x),
}
every_implementation = pytest.mark.parametrize("invert", IMPLEMENTATIONS)


def check_rows(m: Tensor, g: Tensor, c: Tensor, eps: float, result: ops.RMSNormInverse) -> None:
    """The Lagrange conditions, which s ≥ 0 makes sufficient: ``‖y‖² = N``, ``m m' = e + s`` and
    ``m' y = g``; in few evaluations, or in those of the bisection.
    """
    single_precision = result.hidden.dtype == torch.float32
    rounding, lost = (2.0**-24, 2.0**-149) if single_precision else (ULP, 2.0**-1074)
    m, g, c, hidden, new_scale = (
        x.double() for x in (m.expand(g.shape), g, c, result.hidden, result.new_scale)
    )
    hard, unreachable = result.status == Status.HARD, result.status == Status.UNREACHABLE
    assert (result.status <= Status.UNREACHABLE).all()
    assert all(x.isfinite().all() for x in (hidden, result.shift, new_scale))
    few = (result.evaluations <= 32) | (result.evaluations == reference.BISECTION_STEPS)
    assert few.all()
    assert not result.shift[hard].any() and not result.evaluations[hard].any()
    assert (result.shift >= 0).all() and (result.shift > 0)[result.status == Status.EASY].all()

    mean_square = hidden.square().mean(1)
    assert ((mean_square.sqrt() / c - 1).abs() <= (2 if single_precision else 16) * rounding).all()
    norm = (mean_square + eps).sqrt().unsqueeze(1)
    out_of_reach = (m == 0) & (g != 0) & (new_scale == 0)
    assert torch.equal(out_of_reach.any(1), unreachable)
    error = (new_scale * (hidden / norm) - g).abs() - new_scale.abs() * lost / norm
    assert (error <= (8 if single_precision else 16) * rounding * g.abs())[~out_of_reach].all()

    a = m.abs()
    e = (a - a.amin(1, keepdim=True)) * (a + a.amin(1, keepdim=True))
    shifted = e + result.shift.unsqueeze(1)
    free = ~(hard.unsqueeze(1) & (e == 0)) & (m != 0)
    assert ((m * new_scale - shifted).abs() <= 8 * ULP * shifted)[free].all()


def sweep(
    dtypes: list[torch.dtype], sizes: list[int], families: Iterable[str], rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """``rows`` rows of every family, dtype, size and radius, those of one dtype, size and eps
    together: m, g, rms, eps. The time of a call hardly depends on the number of its rows.
    """
    found = defaultdict(list)
    for seed, (family, dtype, n, (c, eps)) in enumerate(
        itertools.product(families, dtypes, sizes, RADII)
    ):
        m, g = rows_of(family, rows, n, dtype, seed)
        rms = c * 2 ** uniform(seeded(seed), -1, 1, rows)
        if family == "near_hard" and eps == 0:  # only for this radius are they near
            rms = torch.full((rows,), c)
        found[dtype, n, eps].append((m, g, rms.to(dtype)))
    for (_, _, eps), parts in found.items():
        m, g, rms = (torch.cat(part) for part in zip(*parts, strict=True))
        yield m, g, rms, eps


def mixed_rows(
    n: int, per_family: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows of every family of n coordinates, shuffled."""
    parts = [rows_of(family, per_family, n, dtype, seed) for family in ROWS]
    m, g = (torch.cat(part) for part in zip(*parts, strict=True))
    order = torch.randperm(len(m), generator=seeded(seed))
    return m[order], g[order]


def same_rows(
    x: ops.RMSNormInverse | ops.StableScale,
    y: ops.RMSNormInverse | ops.StableScale,
    rows: Tensor | None = None,
) -> bool:
    """Whether all parts have the same bits; with ``rows``, those of y."""
    pairs = ((getattr(x, field.name), getattr(y, field.name)) for field in fields(x))
    return all(same_bits(a, b if rows is None else b[rows]) for a, b in pairs)
