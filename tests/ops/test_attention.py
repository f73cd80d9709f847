"""Attention of one token a row and rotary positions, in the implementation that runs here."""

import pytest
import torch
from support.attention import SHAPES, check_attention, check_written, new_token, problem
from support.inversion import needs_native
from support.numeric import (
    UNIT,
    every_dtype,
    every_narrow,
    normal,
    numbers_of_threads,
    poisoned_memory,
    same_bits,
    seeded,
)

from icl_patch import ops


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_dtype
def test_decode_attention(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    query, key, value, mask = problem(shape, dtype)
    for seen in (torch.ones_like(mask), mask):
        with poisoned_memory():
            y = ops.decode_attention(query, key, value, None if seen.all() else seen)
        check_attention(y, query, key, value, seen)


@needs_native
@every_narrow
def test_a_row_depends_on_nothing_but_what_it_sees(dtype: torch.dtype) -> None:
    query, key, value, mask = problem((3, 6, 2, 700, 64, 64), dtype)
    y = ops.decode_attention(query, key, value, mask)
    for _ in numbers_of_threads(1, 2, 3):
        assert same_bits(ops.decode_attention(query, key, value, mask), y)
    for row in (0, 1):
        one = slice(row, row + 1)
        seen = [x[one][:, :, mask[row]] for x in (key, value)]
        assert same_bits(ops.decode_attention(query[one], *seen), y[one])
    hidden = key.masked_fill(~mask[:, None, :, None], torch.nan)
    assert same_bits(ops.decode_attention(query, hidden, value, mask), y)


@every_narrow
def test_extremes(dtype: torch.dtype) -> None:
    one = torch.ones(1, 1, 4, dtype=dtype)
    key = torch.tensor([[-3e4], [3e4], [3e4]], dtype=dtype).expand(3, 4)[None, None]
    value = torch.tensor([[9.0], [1.0], [2.0]], dtype=dtype)[None, None]
    assert ops.decode_attention(one, key, value).item() == 1.5  # the others' weight is 0
    alone = ops.decode_attention(one, key[:, :, :1], value[:, :, :1])
    assert alone.item() == 9  # a softmax of one number is exactly 1
    key = key.clone()
    key[0, 0, 0, 0] = torch.nan
    assert ops.decode_attention(one, key, value).isnan().all()


@every_dtype
def test_attention_of_both_streams(dtype: torch.dtype) -> None:
    """The attention, and behind it each head's value in the token's column."""
    for shape in SHAPES:
        query, key, value, mask = problem(shape, dtype)
        columns, heads = key.shape[2], query.shape[1]
        for slot in {0, columns // 2, columns - 1} if columns else ():
            with poisoned_memory():
                y = ops.attention_pair(query, key, value, torch.tensor([slot]), mask)
            own = value[:, :, slot].repeat_interleave(heads // value.shape[1], 1)
            assert same_bits(y, torch.cat([ops.decode_attention(query, key, value, mask), own]))
    strided = value.transpose(2, 3).contiguous().transpose(2, 3)
    last = torch.tensor([columns - 1])
    assert same_bits(ops.attention_pair(query, key, strided, last, mask), y)


@every_dtype
def test_attention_that_writes_the_token(dtype: torch.dtype) -> None:
    """The bits of two copies and the attention after them; rows that do not see the token, or see
    nothing, are written too. The parts of the native sum have 256 keys.
    """
    for shape in SHAPES:
        query, key, value, mask = problem(shape, dtype)
        columns = key.shape[2]
        for slot in {0, 255, 256, columns // 2, columns - 1} & {*range(columns)}:
            hidden = mask.clone()
            hidden[:1, slot] = False
            for seen in (None, mask, hidden):
                with poisoned_memory():
                    check_written(
                        ops.write_and_attend, ops.attention_pair, query, key, value, slot, seen
                    )


def test_a_mistake_writes_nothing() -> None:
    query, key, value, mask = problem((2, 4, 2, 9, 8, 6), torch.float32)
    own_key, own_value = new_token(key, value)
    good = [query.unsqueeze(2), key, value, own_key, own_value, torch.tensor([4]), mask]
    before = key.clone(), value.clone()
    wrong = {0: query, 3: own_key[:1], 4: own_value[:, :-1], 5: torch.tensor([9]), 6: mask[:1]}
    for place, x in wrong.items():
        given = [*good[:place], x, *good[place + 1 :]]
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="expected "):
                ops.write_and_attend(*given)
    assert same_bits(key, before[0]) and same_bits(value, before[1])


@needs_native
def test_registration_and_compilation() -> None:
    query, key, value, mask = problem((2, 4, 2, 9, 8, 6), torch.bfloat16)
    operator = torch.ops.icl_patch.decode_attention
    torch.library.opcheck(operator, (query, key, value, 0.5, mask))
    pair = torch.ops.icl_patch.attention_pair
    torch.library.opcheck(pair, (query, key, value, torch.tensor([3]), 0.5, mask))
    writing = torch.ops.icl_patch.write_and_attend
    new = new_token(key, value)
    given = (query.unsqueeze(2), key, value, *new, torch.tensor([3]))
    torch.library.opcheck(writing, (*given, 0.5, mask))
    compiled = torch.compile(ops.write_and_attend, fullgraph=True, backend="aot_eager")
    copies = [x.clone() for x in given]
    with torch.no_grad():
        assert same_bits(compiled(*copies, mask), ops.write_and_attend(*given, mask))
        assert all(map(same_bits, copies, given))
    compiled = torch.compile(ops.decode_attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = ops.decode_attention(query, key, value, mask)
        assert same_bits(compiled(query, key, value, mask), expected)
    meta = [x.to("meta") for x in (query, key, value)]
    assert ops.decode_attention(*meta).shape == (2, 4, 6)


# rows, query heads, key heads, tokens, width, rows of angles
ROTATED = [(1, 9, 3, 1, 64, 1), (3, 5, 2, 4, 10, 3), (2, 4, 4, 2, 128, 1), (0, 2, 1, 1, 6, 1)]


@pytest.mark.parametrize("shape", ROTATED, ids=str)
@every_dtype
def test_rotary_embedding(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Two by two as complex numbers in fp64, and with the roundings of torch's operators."""
    rows, heads, groups, tokens, width, angles = shape
    rng = seeded(width)
    # heads beside each other in memory, as a model has them
    query, key = (
        normal(rng, rows, tokens, count, width, dtype=dtype).transpose(1, 2)
        for count in (heads, groups)
    )
    cos, sin = (normal(rng, angles, tokens, width // 2, dtype=dtype) for _ in range(2))
    wide = torch.complex(cos.double(), sin.double()).unsqueeze(1)
    cos, sin = (torch.cat([x, x], -1) for x in (cos, sin))
    for _ in numbers_of_threads(1, 2):
        with poisoned_memory():
            both = ops.rotary_embedding(query, key, cos, sin)
        for x, y in zip((query, key), both, strict=True):
            first, second = x.double().chunk(2, -1)
            turned = torch.complex(first, second) * wide
            expected = torch.cat([turned.real, turned.imag], -1)
            assert y.shape == x.shape and y.dtype == dtype
            size = (first.abs() + second.abs()).repeat(1, 1, 1, 2) * wide.abs().repeat(1, 1, 1, 2)
            assert ((y.double() - expected).abs() <= 3 * UNIT[dtype] * size + 1e-12).all()
            half = x.roll(width // 2, -1) * sin.new_tensor([-1.0, 1.0]).repeat_interleave(
                width // 2
            )
            assert same_bits(y, x * cos.unsqueeze(1) + half * sin.unsqueeze(1))
