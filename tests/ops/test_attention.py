"""Attention of one token a row and rotary positions, in the implementation that runs here."""

import pytest
import torch
from support.attention import (
    SHAPES,
    check_attention,
    check_negated_caches,
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
from torch import Tensor

from icl_patch import ops
from icl_patch.ops import reference


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
def test_the_specification_shows_what_is_no_number(dtype: torch.dtype) -> None:
    """Like the kernels, if a row sees it; what it does not see changes nothing."""
    query, key, value, mask = problem((3, 4, 2, 9, 8, 6), dtype)
    nothing, hidden = torch.full_like(key, torch.nan), ~mask[:, None, :, None]
    args = torch.where(hidden, nothing, key), torch.where(hidden, nothing[..., :6], value)
    y = reference.decode_attention(query, key, value, 0.3, mask)
    assert same_bits(reference.decode_attention(query, *args, 0.3, mask), y)
    assert not y[-1].any() and y.isfinite().all()
    key, query = key.clone(), query.clone()
    key[0, 1, 4] = query[1, 2] = query[2] = torch.nan  # row 0 sees key 4, row 2 sees none
    for attend in (reference.decode_attention, _attend):
        found = attend(query, key, value, 0.3, mask).isnan().all(-1)
        assert found.nonzero().tolist() == [[0, 2], [0, 3], [1, 2]]


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor) -> Tensor:
    return ops.decode_attention(query, key, value, mask, scale=scale)


def test_derivatives_beside_a_row_that_sees_no_key() -> None:
    """Of first and second order, backwards and forwards; keys that no row sees may be anything."""
    query, key, value, mask = problem((3, 4, 2, 5, 3, 2), torch.float64)
    assert not mask[-1].any() and mask[:2].any(1).all() and not mask[:2].all()
    key = key.masked_fill(~mask[:, None, :, None], torch.nan)
    given = [x.requires_grad_() for x in (query, value)]

    def attend(query: Tensor, value: Tensor) -> Tensor:
        return _attend(query, key, value, 0.3, mask)

    assert torch.autograd.gradcheck(attend, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, given)


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


def test_caches_of_negated_numbers() -> None:
    check_negated_caches(ops.write_and_attend)


@every_dtype
def test_autograd_notices_what_is_written(dtype: torch.dtype) -> None:
    """As for torch's operators in place: what was saved for a derivative must not have changed.
    Inference tensors have no derivatives.
    """
    query, keys, values, _ = problem((2, 4, 2, 9, 8, 6), dtype)
    given = query.unsqueeze(2), keys, values, *new_token(keys, values), torch.tensor([3])
    for cache in (keys, values):
        factor = torch.ones_like(cache, requires_grad=True)
        total = (factor * cache).sum()
        with torch.no_grad():
            y = ops.write_and_attend(*given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
    wanted = given[0].clone().requires_grad_()
    ops.write_and_attend(wanted, *given[1:]).sum().backward()
    assert wanted.grad.any()
    with torch.inference_mode():
        assert same_bits(ops.write_and_attend(*[x.clone() for x in given]), y)


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
