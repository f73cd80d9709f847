"""The norm behind an output matrix, for both streams of a recording: against the ops that it stands
for, the formula in fp64, and a replay; and its CUDA kernel where there is no GPU.
"""

import itertools

import pytest
import torch
from support.compiled import needs_compiler
from support.inversion import LAYOUTS, needs_native
from support.norm_recording import EPS, FORMS, on_fibers, random_rows, replayed
from support.numeric import (
    UNIT,
    every_narrow,
    normal,
    numbers_of_threads,
    poisoned_memory,
    same_bits,
    seeded,
    within_roundings,
)
from torch import Tensor

from icl_patch import ops
from icl_patch.ops import InversionStatus as Status
from icl_patch.ops.stable_update import reference_record_norm

every_form = pytest.mark.parametrize("form", FORMS)
SIZES = ((1, 1, 1), (0, 5, 3), (3, 63, 100), (4, 1000, 257))


def recorded(given: tuple[Tensor, ...], form: str) -> ops.NormRecord:
    offset, cast_first = FORMS[form]
    return ops.record_norm(
        *given, EPS, out_dtype=given[3].dtype, scale_offset=offset, cast_first=cast_first
    )


def parts(found: ops.NormRecord) -> tuple[Tensor, ...]:
    y_pair, u, (v, inverse_norm2, _), new_scale, status = found
    return y_pair, u, v, inverse_norm2, new_scale, status


@needs_native
@every_narrow
@every_form
def test_it_has_the_bits_of_the_ops_one_after_the_other(form: str, dtype: torch.dtype) -> None:
    """Of each output, where delta or h is 0 and with a NaN too; in whatever layout."""
    for rows, d, k in SIZES:
        given = random_rows(rows, d, k, dtype)
        with poisoned_memory():
            found = recorded(given, form)
        offset, cast_first = FORMS[form]
        expected = reference_record_norm(*given, EPS, dtype, offset, cast_first)
        assert all(map(same_bits, parts(found), expected))
        assert same_bits(found.y_pair, replayed(given, found, form))
        if rows > 2:
            assert found.status.tolist() == [Status.EASY] * (rows - 1) + [Status.NONFINITE]
            assert not found.u[0].any() and found.direction.inverse_norm2[1] == 0
        for lay in LAYOUTS.values():
            assert all(map(same_bits, parts(recorded(tuple(map(lay, given)), form)), parts(found)))


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_both_streams_end_alike(form: str, dtype: torch.dtype) -> None:
    """``m' ⊙ Norm(y + (h·v) u) = delta + m ⊙ Norm(y)``, so with delta the change of the norm's
    output both streams' are the same; and a wrong patch's are not.
    """
    offset, _ = FORMS[form]
    rng = seeded(3)
    y_pair, h, weight = (normal(rng, *size, dtype=dtype) for size in ((6, 640), (3, 96), (640,)))
    m, wide = offset + weight.double(), y_pair.double()
    context, plain = (m * wide / (wide.square().mean(1, True) + EPS).sqrt()).chunk(2)
    delta = (context - plain).to(dtype)
    found = recorded((y_pair, h, delta, weight), form)
    assert not found.status.any()
    # a rounding of delta, of both norms' inputs, and of new_scale, which is fp32 for all
    size = delta.abs().double() + 2 * found.new_scale.abs().amax(1, True)
    assert within_roundings(found.y_pair[:3].float(), context.float(), 8, context.abs())
    assert within_roundings(found.y_pair[3:].float(), context.float(), 16, size)
    assert not within_roundings(1.001 * found.y_pair[3:].float(), context.float(), 16, size)


@needs_native
def test_a_row_sees_neither_its_batch_nor_the_threads() -> None:
    given = random_rows(7, 3000, 1100, torch.bfloat16)
    together = recorded(given, "gemma")
    for _ in numbers_of_threads(1, 3):
        assert all(map(same_bits, parts(recorded(given, "gemma")), parts(together)))
    y_pair, h, delta, weight = given
    for row in (0, 4):
        one = slice(row, row + 1)
        pair = torch.cat([y_pair[one], y_pair[7:][one]])
        alone = recorded((pair, h[one], delta[one], weight), "gemma")
        assert same_bits(alone.y_pair, together.y_pair[[row, 7 + row]])
        assert same_bits(alone.u, together.u[one])


@needs_native
def test_operator() -> None:
    """What torch.compile and fake tensors see of it."""
    for form, dtype in itertools.product(FORMS.values(), (torch.float32, torch.bfloat16)):
        given = random_rows(2, 24, 9, dtype)
        for out_dtype in (None, dtype):
            torch.library.opcheck(
                torch.ops.icl_patch.record_norm.default, (*given, EPS, out_dtype, *form)
            )


# The CUDA kernel on fibers; its sums, bit for bit, beside Triton's: support/interpreter_checks.py


ON_FIBERS = [(d, 1 << 18) for d in (1, 129, 1025, 2049, 4097)] + [(1100, 1 << 10)]


@needs_compiler
@needs_native
@every_form
@pytest.mark.parametrize(("d", "shared_memory"), ON_FIBERS)
def test_the_cuda_kernel(d: int, shared_memory: int, form: str) -> None:
    """A warp, 256 and 512 threads, the row in registers and in shared memory or in neither: the
    native op's numbers, and the bits of another layout.
    """
    for dtype in (torch.bfloat16, torch.float32) if d < 2000 else (torch.float16,):
        given = random_rows(3 if d < 2000 else 1, d, 2 * d + 3, dtype)
        found, expected = on_fibers(given, form, shared_memory=shared_memory), recorded(given, form)
        assert torch.equal(found.status, expected.status)
        few = 4 * UNIT[torch.float32]
        for got, want in zip(parts(found)[1:5], parts(expected)[1:5], strict=True):
            size = want.abs().nan_to_num().amax(-1, keepdim=True) if want.dim() > 1 else want.abs()
            assert ((got - want).abs() <= few * size).logical_or(want.isnan()).all()
            assert torch.equal(got.isnan(), want.isnan())
        y, want = (replayed(given, of, form).float() for of in (found, expected))
        for of in (found.y_pair.float(), y):
            near = (of - want).abs() <= 8 * UNIT[dtype] * want.abs().nan_to_num().amax(1, True)
            assert near.logical_or(want.isnan()).all()
        spread = on_fibers(given, form, shared_memory=shared_memory, column=3)
        assert all(map(same_bits, parts(spread), parts(found)))
