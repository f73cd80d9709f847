"""Attention of one token a row: problems, and the formula in fp64."""

import torch
from support.numeric import UNIT, normal, seeded
from torch import Tensor

# rows, query heads, key heads, keys, widths of keys and of values
SHAPES = [(1, 1, 1, 1, 1, 1), (2, 9, 3, 257, 64, 64), (3, 4, 4, 1030, 7, 5)]
SHAPES += [(1, 6, 1, 33, 80, 129), (2, 8, 2, 512, 128, 17), (2, 3, 3, 0, 8, 8), (0, 4, 2, 5, 8, 8)]
SHAPES += [(2, 38, 2, 70, 16, 16)]


def problem(
    shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value, and a mask of which the last row sees nothing if there are several."""
    rows, heads, groups, keys, d, e = shape
    rng = seeded(keys + d)
    mask = torch.rand(rows, keys, generator=rng) < 0.7
    mask[:, keys // 2 :] |= keys > 1
    if rows > 1:
        mask[-1] = False
    sizes = ((rows, heads, d), (rows, groups, keys, d), (rows, groups, keys, e))
    query, key, value = (normal(rng, *size, dtype=dtype).to(device) for size in sizes)
    return query, key, value, mask.to(device)


def by_formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The output in fp64, head by head over the keys that are seen, and the size of its terms."""
    rows, heads, _ = query.shape
    y = torch.zeros(rows, heads, value.shape[-1], dtype=torch.float64)
    size = torch.zeros_like(y)
    for row in range(rows):
        for head in range(heads if mask[row].any() else 0):
            group = head // (heads // key.shape[1])
            seen = [x[row, group][mask[row]].double().cpu() for x in (key, value)]
            weights = torch.softmax(scale * seen[0] @ query[row, head].double().cpu(), 0)
            y[row, head], size[row, head] = weights @ seen[1], weights @ seen[1].abs()
    return y, size


def check_attention(y: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> None:
    """With scores divided by √D, y is the formula's within roundings of its parts."""
    width, dtype = query.shape[-1], query.dtype
    expected, size = by_formula(query, key, value, mask, max(width, 1) ** -0.5)
    # the softmax's argument is a sum of D products, with errors in fp32 or wider
    wide = UNIT[torch.promote_types(dtype, torch.float32)] * (8 * width + key.shape[2] + 40)
    assert y.shape == expected.shape and y.dtype == dtype
    limit = (wide + UNIT[dtype]) * size + UNIT[dtype] * expected.abs() + 1e-12
    assert ((y.double().cpu() - expected).abs() <= limit).all()
