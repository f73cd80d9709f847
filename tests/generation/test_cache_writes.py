"""A step's writes into the cache, joined with the attention behind them; and when they are not."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.inversion import needs_native
from support.numeric import NARROW, normal, same_bits, seeded
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from icl_patch import ops
from icl_patch.generation.step_program import StepProgram

pytestmark = needs_native
HEADS, GROUPS, COLUMNS, D, E = 6, 2, 9, 8, 4


class Inputs:
    """A cache of some rows, and what a step finds."""

    def __init__(self, rows: int = 2, dtype: torch.dtype = torch.float32) -> None:
        self.rows = rows
        self.keys, self.values = (
            normal(seeded(n), rows, GROUPS, COLUMNS, n, dtype=dtype) for n in (D, E)
        )
        self.x = normal(seeded(1), rows, HEADS * D + GROUPS * (D + E), dtype=dtype)
        self.mask = torch.rand(rows, COLUMNS, generator=seeded(2)) < 0.7
        self.slot, self.other = torch.tensor([4]), torch.tensor([5])

    def token(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, H, 1, D), key (B, G, 1, D) and value (B, G, 1, E), of one product."""
        parts = (self.x + 1).split([HEADS * D, GROUPS * D, GROUPS * E], -1)
        heads = zip(parts, (HEADS, GROUPS, GROUPS), strict=True)
        query, key, value = (part.view(self.rows, 1, n, -1).transpose(1, 2) for part, n in heads)
        return query, key, value

    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same, with key and value in the cache."""
        query, key, value = self.token()
        self.write(key, value)
        return query, key, value

    def write(self, key: Tensor, value: Tensor, slot: Tensor | None = None) -> None:
        """The key into its column, and the value there or into another one."""
        self.keys.index_copy_(2, self.slot, key)
        self.values.index_copy_(2, self.slot if slot is None else slot, value)

    def attention(self, query: Tensor, slot: Tensor | None = None, **parts: Tensor) -> Tensor:
        """Of both streams over the cache, or over other parts."""
        slot = self.slot if slot is None else slot
        of = {"key": self.keys, "value": self.values, "mask": self.mask} | parts
        return ops.attention_pair(query[:, :, 0], slot=slot, scale=0.3, **of)


def check(inputs: Inputs, step: Callable[[Inputs], Tensor], *, runs: int = 1) -> str:
    """The program of a step gives its bits, and leaves its cache, for other numbers and columns;
    returns the program's source.
    """
    memory = inputs.keys, inputs.values, inputs.slot
    start = [x.clone() for x in memory]

    def reset(slot: int) -> None:
        for x, before in zip(memory, start, strict=True):
            x.copy_(before)
        inputs.slot.fill_(slot)

    with torch.no_grad():
        program = StepProgram(lambda: [step(inputs), inputs.keys], {"x": inputs.x}, ())
        for slot in (0, 3, 5):
            inputs.x.copy_(torch.randn(inputs.x.shape, generator=seeded(slot)))
            reset(slot)
            expected = [step(inputs), *(x.clone() for x in memory)]
            reset(slot)
            for _ in range(runs):
                found = program.leaf(made := program.function(), 0)
                assert same_bits(found, expected[0])
                assert all(map(same_bits, memory, expected[1:]))
                assert program.leaf(made, 1) is inputs.keys
    return program.source


def calls_of(source: str) -> list[str]:
    names = "index_copy|attention_pair|write_and_attend|clamp"
    return re.findall(rf"\b({names})[_0-9]*\(", source)


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_writes_and_attention_are_one_call(rows: int, dtype: torch.dtype) -> None:
    """Of one product's parts, over the columns that a mask shows or over all. It may run again, and
    its output is read as it is.
    """

    def step(inputs: Inputs) -> Tensor:
        query, _, _ = inputs.written()
        return inputs.attention(query).flatten(1) * 2

    def without_a_mask(inputs: Inputs) -> Tensor:
        query, key, value = inputs.token()
        inputs.values.index_copy_(-2, inputs.slot, value)
        inputs.keys.index_copy_(2, inputs.slot, key)
        return ops.attention_pair(query[:, :, 0], inputs.keys, inputs.values, inputs.slot) + 1

    for written in (step, without_a_mask):
        source = check(Inputs(rows, dtype), written, runs=2)
        assert calls_of(source) == ["write_and_attend"], source
    assert re.search(r"= write_and_attend_\d+\.view", source)


@pytest.mark.parametrize("heads", [HEADS, GROUPS])
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_both_streams(rows: int, heads: int) -> None:
    """Of 2B rows the first B attend and are written. The values of the last B are put behind them,
    by a copy for the heads that share them.
    """
    inputs = Inputs(rows)
    inputs.x = torch.cat([inputs.x, -inputs.x])
    inputs.rows = 2 * rows

    def step(inputs: Inputs, shown: int = rows, own: slice = slice(rows, None)) -> Tensor:
        query, key, value = inputs.token()
        inputs.write(key[:shown], value[:shown])
        query = query[:shown, :heads, 0]
        y = ops.decode_attention(query, inputs.keys, inputs.values, inputs.mask, scale=0.3)
        behind = value[own].expand(-1, -1, heads // GROUPS, -1)
        return torch.cat([y.unsqueeze(1), behind.reshape(shown, 1, heads, E)]).flatten(1) * 2

    assert calls_of(check(inputs, step, runs=2)) == ["write_and_attend"]
    if rows > 1:  # some of these are written
        assert "write_and_attend" not in check(inputs, partial(step, own=slice(1, 1 + rows)))
    inputs.x = inputs.x.flip(0)
    shown = slice(rows, None)  # the values before those that are written

    def before(inputs: Inputs) -> Tensor:
        query, key, value = inputs.token()
        inputs.write(key[shown], value[shown])
        y = ops.decode_attention(query[shown, :GROUPS, 0], inputs.keys, inputs.values)
        return torch.cat([y, value[:rows, :, 0]]) * 2

    assert "write_and_attend" not in check(inputs, before)


def test_several_layers() -> None:
    """Each has a cache of its own, or reads that of the layer before it."""
    inputs, second = Inputs(), Inputs()
    second.keys, second.values = -inputs.keys, -inputs.values
    second.slot, second.x = inputs.slot, inputs.x

    def step(inputs: Inputs) -> Tensor:
        y = [of.attention(of.written()[0]) for of in (inputs, second)]
        return torch.cat([*y, inputs.attention(inputs.token()[0] * 2)])

    assert calls_of(check(inputs, step)) == [*["write_and_attend"] * 2, "attention_pair"]


def but(
    write: Callable[[Inputs, Tensor, Tensor], Any] = Inputs.write,
    between: Callable[[Inputs, Tensor, Tensor], Any] = lambda *_: 0,
    attend: Callable[[Inputs, Tensor], Tensor] = Inputs.attention,
) -> Callable[[Inputs], Tensor]:
    """A step with other writes or another attention, or something between them, whose result is
    added.
    """

    def step(inputs: Inputs) -> Tensor:
        query, key, value = inputs.token()
        write(inputs, key, value)
        added = between(inputs, key, value)
        return attend(inputs, query) + added

    return step


def _narrow_cache(inputs: Inputs) -> Tensor:
    """The cache has another dtype than the attention."""
    query, key, value = inputs.token()
    held = [x.half() for x in (inputs.keys, inputs.values)]
    for cache, x in zip(held, (key, value), strict=True):
        cache.index_copy_(2, inputs.slot, x.half())
    wide = [x.float() for x in held]
    inputs.keys.copy_(wide[0])
    return inputs.attention(query, key=wide[0], value=wide[1])


def _new_cache(inputs: Inputs) -> Tensor:
    """Copies that the step makes hold the token."""
    query, key, value = inputs.token()
    held = inputs.keys.clone(), inputs.values.clone()
    for cache, x in zip(held, (key, value), strict=True):
        cache.index_copy_(2, inputs.slot, x)
    return inputs.attention(query, key=held[0], value=held[1])


APART: dict[str, Callable[[Inputs], Tensor]] = {
    "read between": but(between=lambda of, *_: of.keys.sum()),
    "written between": but(between=lambda of, *_: of.values[:, :, 2].mul_(2)[0, 0, 0]),
    "key changed after": but(between=lambda of, key, _: key.mul_(2)[0, 0, 0, 0]),
    "slot changed after": but(between=lambda of, *_: of.slot.add_(1) * 0),
    "another slot": but(attend=lambda of, query: of.attention(query, of.other)),
    "slot of another column": but(
        attend=lambda of, query: of.attention(query, of.slot.clamp(max=3))
    ),
    "slot of at least 4": but(attend=lambda of, query: of.attention(query, of.slot.clamp(4, 8))),
    "computed slot": but(attend=lambda of, query: of.attention(query, of.slot * 0)),
    "another slot, bounded": but(
        attend=lambda of, query: of.attention(query, of.other.clamp(max=8))
    ),
    "part of the cache": but(
        attend=lambda of, query: of.attention(
            query, key=of.keys[:, :, :7], value=of.values[:, :, :7], mask=of.mask[:, :7]
        )
    ),
    "expanded": but(
        attend=lambda of, query: of.attention(query, key=of.keys[:, :1].expand(-1, 2, -1, -1))
    ),
    "keys of another layer": but(attend=lambda of, query: of.attention(query, key=of.keys * 1)),
    "one stream": but(
        attend=lambda of, query: ops.decode_attention(query[:, :, 0], of.keys, of.values)
    ),
    "torch's attention": but(
        attend=lambda of, query: scaled_dot_product_attention(
            query, of.keys, of.values, enable_gqa=True
        )
    ),
    "keys alone": but(lambda of, key, _: of.keys.index_copy_(2, of.slot, key)),
    "values in another column": but(lambda of, key, value: of.write(key, value, of.other)),
    "added": but(
        lambda of, key, value: (
            of.keys.index_add_(2, of.slot, key),
            of.values.index_copy_(2, of.slot, value),
        )
    ),
    "along the heads": but(
        lambda of, key, value: (
            of.keys.index_copy_(1, of.slot // 9, key.expand(-1, -1, 9, -1)[:, :1]),
            of.values.index_copy_(2, of.slot, value),
        )
    ),
    "two columns": but(
        lambda of, *token: [
            cache.index_copy_(2, torch.cat([of.slot, of.slot + 1]), x.expand(-1, -1, 2, -1))
            for cache, x in zip((of.keys, of.values), token, strict=True)
        ]
    ),
    "a column without axes": but(
        lambda of, *token: [
            cache.index_copy_(2, of.slot[0], x)
            for cache, x in zip((of.keys, of.values), token, strict=True)
        ],
        attend=lambda of, query: of.attention(query, of.slot[0].clamp(max=8).view(1)),
    ),
    "a cache of the step": _new_cache,
    "two writes": but(
        lambda of, key, value: (
            of.write(key, value),
            of.keys.index_copy_(2, of.other, -key),
        )
    ),
    "attention before": lambda of: of.attention(of.token()[0]) + of.written()[1].sum(),
    "another dtype": _narrow_cache,
    "heads apart": but(  # other numbers lie between their values
        lambda of, key, value: of.write(key, torch.cat([value, value], -1)[..., :E])
    ),
    "one memory": but(  # the keys are the values
        lambda of, key, _: [of.keys.index_copy_(2, of.slot, key) for _ in range(2)],
        attend=lambda of, query: of.attention(query, value=of.keys),
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_stays_apart(name: str) -> None:
    """With the bits of the step: these are not two copies of the token and its attention."""
    source = check(Inputs(), APART[name])
    assert "write_and_attend" not in source, source
