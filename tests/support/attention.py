"""Attention of one token a row: problems, and the formula in fp64."""

from collections.abc import Callable

import torch
from support.numeric import UNIT, in_gaps, negated, normal, same_bits, seeded
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


def new_token(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A key (B, G, 1, D) and a value (B, G E) for the cache."""
    (rows, groups, _, d), e = key.shape, value.shape[3]
    rng = seeded(d + e)
    both = normal(rng, rows, groups, 1, d), normal(rng, rows, groups * e)
    return both[0].to(key), both[1].to(value)


def check_written(
    write: Callable[..., Tensor],
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slot: int,
    mask: Tensor | None,
) -> None:
    """``write`` does what two copies into column ``slot`` and ``attend`` do, in contiguous tensors
    and in others, and attends as the formula in fp64. It does not read the column before, and may
    be run again. Behind the attention stand the values that are written, or others.
    """
    column, scale = torch.tensor([slot], device=key.device), max(query.shape[-1], 1) ** -0.5
    own_key, own_value = new_token(key, value)
    both_values = torch.cat([own_value, 2 * own_value.flip(0)])
    shared = query.shape[1] // key.shape[1]
    others = both_values[len(query) :].unflatten(1, (key.shape[1], -1)).repeat_interleave(shared, 1)
    expected = key.clone(), value.clone()
    for cache, own in zip(expected, (own_key, own_value), strict=True):
        cache.index_copy_(2, column, own.reshape(cache[:, :, :1].shape))
    for strided in (False, True):
        held = [key.clone(), value.clone(), *expected]
        given = [query.unsqueeze(2), own_key, own_value, both_values]
        if strided:  # tokens before heads, numbers in gaps
            held = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in held]
            given = [in_gaps(x) for x in given]
        y = attend(given[0].squeeze(2), *held[2:], column, mask, scale=scale)
        of_two = torch.cat([y[: len(query)], others])
        for x in held[:2]:
            x[:, :, slot] = torch.nan
        for own, wanted in ((given[2], y), (given[3], of_two)):
            found = write(given[0], *held[:2], given[1], own, column, mask, scale=scale)
            assert same_bits(found, wanted.flatten(1))
            assert all(map(same_bits, held[:2], expected))
    seen = torch.ones_like(expected[0][:, 0, :, 0]).bool() if mask is None else mask
    check_attention(y[: len(query)], query, *expected, seen)


def check_negated_caches(write: Callable[..., Tensor], device: str = "cpu") -> None:
    """They are views of numbers with the other sign: what is written there is too."""
    query, key, value, _ = problem((2, 4, 2, 9, 8, 6), torch.float32, device)
    given = *new_token(key, value), torch.tensor([3], device=device), None
    plain, changed = ([of(x) for x in (key, value)] for of in (torch.clone, negated))
    found, expected = (
        write(query.unsqueeze(2), *caches, *given, scale=0.3) for caches in (changed, plain)
    )
    assert same_bits(found, expected)
    assert all(map(same_bits, changed, plain)) and not same_bits(plain[0], key)


def check_rotary(
    rotate: Callable[..., tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: str = "cpu",
    cut: bool = False,
) -> None:
    """Two by two as complex numbers in fp64, and with the roundings of torch's operators (not where
    they are ``cut`` off). Heads of keys lie beside each other in memory, angles in gaps; these are
    of a row or of all.
    """
    rows, heads, groups, tokens, width, angles = shape
    rng = seeded(width)
    sizes = (rows, heads, tokens, width), (rows, tokens, groups, width)
    query, key = (normal(rng, *size, dtype=dtype).to(device) for size in sizes)
    cos, sin = (normal(rng, angles, tokens, width // 2, dtype=dtype) for _ in range(2))
    wide = torch.complex(cos.double(), sin.double()).unsqueeze(1).to(device)
    cos, sin = torch.cat([cos, cos, sin, sin], -1).to(device).chunk(2, -1)
    both = query, key.transpose(1, 2)
    for x, y in zip(both, rotate(*both, cos, sin), strict=True):
        first, second = x.double().chunk(2, -1)
        turned = torch.complex(first, second) * wide
        expected = torch.cat([turned.real, turned.imag], -1)
        assert y.shape == x.shape and y.dtype == dtype
        size = (first.abs() + second.abs()).repeat(1, 1, 1, 2) * wide.abs().repeat(1, 1, 1, 2)
        limit = (6 if cut else 3) * UNIT[dtype] * size + 1e-12
        assert ((y.double() - expected).abs() <= limit).all()
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        rounded = x * cos.unsqueeze(1) + half * sin.unsqueeze(1)
        assert cut or same_bits(y, rounded)
