"""Rows for the RMSNorm inversion: adversarial families, each a pair (m, g)."""

from collections.abc import Callable

import torch
from support.numeric import ULP, normal, seeded
from torch import Tensor

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
    """Beside the boundary between a root and none: ``φ(0) = 1 ± tiny`` for C = 1, g = 0 or tiny at
    the minimum.
    """
    m, g = gaussian(rng, rows, n)
    lowest = m.abs().argmin(1, keepdim=True)
    e = (m.abs() - m.abs().gather(1, lowest)) * (m.abs() + m.abs().gather(1, lowest))
    g.scatter_(1, lowest, 0.0)
    phi = torch.where(e > 0, m * g / torch.where(e > 0, e, 1.0), 0.0).square().sum(1, keepdim=True)
    off = torch.tensor([0, *(s * 10.0**-x for x in (15, 13, 12, 8, 3) for s in (1, -1))]).double()
    at_lowest = torch.tensor([0, 1e-30, 1e-15, 1e-8, 1e-4], dtype=torch.float64)
    row = torch.arange(rows).unsqueeze(1)
    g *= (n * (1 + off[row % 11]) / torch.where(phi > 0, phi, 1.0)).sqrt()
    return m, g.scatter(1, lowest, at_lowest[(row // 11) % 5])


def zeros(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Of m, and there half of g has the other zero."""
    m, g = gaussian(rng, rows, n)
    m[some(rng, 0.3, rows, n)] = 0
    g[some(rng, 0.5, rows, n) & (m == 0)] = -0.0
    return m, g * 10 ** uniform(rng, -3, 3, rows, 1)


def all_zero(rng: torch.Generator, rows: int, n: int) -> Rows:
    m, g = gaussian(rng, rows, n)
    row = torch.arange(rows).unsqueeze(1)
    return torch.where(row % 3 == 0, -0.0, m), torch.where(row % 3 == 1, 0.0, g)


def ties(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Few values of |m|, some of them one ulp of fp32 apart."""
    values = torch.tensor([0.5, 0.5, 1, 1 + 2**-23], dtype=torch.float64)
    m = signs(rng, rows, n) * values[torch.randint(4, (rows, n), generator=rng)]
    return m, normal(rng, rows, n) * 10 ** uniform(rng, -4, 1, rows, 1)


def plateaus(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Clusters one ulp wide, decades apart."""
    ulps = torch.randint(3, (rows, n), generator=rng)
    m = signs(rng, rows, n) * 10.0 ** torch.randint(-4, 4, (rows, n), generator=rng)
    m *= 1 + 2**-23 * ulps
    return m, normal(rng, rows, n) * 10 ** uniform(rng, -8, 4, rows, n)


def clusters(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Values of |m| one ulp of fp64 apart, and a root of that size: ``a² - min a²`` would have lost
    every digit of it.
    """
    m = signs(rng, rows, n) * 0.7 * (1 + ULP * torch.randint(4, (rows, n), generator=rng).double())
    return m, normal(rng, rows, n) * 10 ** uniform(rng, -17, -14, rows, 1)


def nested(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Plateaus within plateaus: without the geometric step Newton climbs them one at a time."""
    m = (10 ** uniform(rng, -30, 36, rows, n)).sort(1).values
    g = m * torch.arange(1, n + 1) ** uniform(rng, -3, 3, rows, 1)
    g *= 10 ** uniform(rng, -1, 1, rows, 1)
    g[:, 0] *= 10 ** uniform(rng, -30, 0, rows)
    return m, g.clamp(max=3e38)


def from_zero(rng: torch.Generator, rows: int, n: int) -> Rows:
    """m = g = 0 in one place: the root lies anywhere from 0 on, and nothing but a value of φ bounds
    it from below.
    """
    m, g = nested(rng, rows, n)
    m[:, 0] = g[:, 0] = 0
    phi = torch.where(m > 0, g / torch.where(m > 0, m, 1.0), 0.0).square().sum(1, keepdim=True)
    excess = 10 ** uniform(rng, -14, 3, rows, 1)
    return m, (g * (n * (1 + excess) / torch.where(phi > 0, phi, 1.0)).sqrt()).clamp(max=3e38)


def graded(rng: torch.Generator, rows: int, n: int) -> Rows:
    m, g = (signs(rng, rows, n) * 10 ** uniform(rng, -6, 6, rows, n) for _ in range(2))
    return m, g


def full_range(rng: torch.Generator, rows: int, n: int) -> Rows:
    m, g = (signs(rng, rows, n) * 2 ** uniform(rng, -126, 127, rows, n) for _ in range(2))
    return m, g


def ends(rng: torch.Generator, rows: int, n: int) -> Rows:
    """Rows of denormal numbers, rows of the largest, and rows of both."""
    size = torch.tensor([2.0**-140, 1e38, 1.0], dtype=torch.float64)[torch.arange(rows) % 3, None]
    m, g = (x.clamp(-3, 3) * size for x in gaussian(rng, rows, n))
    m[2::3, 0], g[2::6, 0] = 2.0**-149, 3.4e38
    m[2::3, -1], g[2::3, -1] = 3.4e38, 2.0**-149
    return m, g


def trained(rng: torch.Generator, rows: int, n: int) -> Rows:
    """As in a trained model: scales from 0.01 to 30, one of thousands, and in every third row a
    target that is thousands of times larger there.
    """
    m = 0.01 * 3000 ** uniform(rng, 0, 1, rows, n)
    m[:, 0] *= 1000
    y = normal(rng, rows, n)
    y[:, 0] *= 0.01
    y[::3, 0] = n**0.5
    return m, m * y + normal(rng, rows, n)  # g = m ⊙ Norm(h) + delta


FAMILIES = (gaussian, sparse, near_hard, zeros, all_zero, ties, plateaus, clusters, nested)
FAMILIES += (from_zero, graded, full_range, ends, trained)
ROWS: dict[str, Callable[[torch.Generator, int, int], Rows]] = {x.__name__: x for x in FAMILIES}
# (C, eps) by their r² = C²/(C² + eps): 1, about 1/2, about 1e-6.
RADII = [(1.0, 0.0), (1e-3, 1e-6), (1e-3, 1.0)]


def rows_of(
    family: str, count: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Rows:
    """(m, g) of fp32 numbers, of fp64 ones as wide, or of the finite ones of a narrower dtype."""
    m, g = ROWS[family](seeded(seed), count, n)
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return m.clamp(-largest, largest).to(dtype), g.clamp(-largest, largest).to(dtype)
