"""Attention of one token a row and rotary positions, in the implementation that runs here."""

import pytest
import torch
from support.attention import (
    SHAPES,
    check_attention,
    check_rotary,
    check_written,
    new_token,
    problem,
)
from support.inversion import needs_native
from support.numeric import (
    every_dtype,
    every_narrow,
    numbers_of_threads,
    poisoned_memory,
    same_bits,
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


@needs_native
def test_compilation() -> None:
    query, key, value, mask = problem((2, 4, 2, 9, 8, 6), torch.bfloat16)
    given = (query.unsqueeze(2), key, value, *new_token(key, value), torch.tensor([3]))
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
    for _ in numbers_of_threads(1, 2):
        with poisoned_memory():
            check_rotary(ops.rotary_embedding, dtype, shape)
