"""The native patched linear: against fp64, and a row's bits against everything that must not change
them.
"""

from collections.abc import Callable

import pytest
import torch
from support import op_calls
from support.linear_cases import LAYOUTS, Case, linear_case
from support.numeric import (
    NARROW,
    UNIT,
    by_columns,
    every_narrow,
    in_gaps,
    negated,
    normal,
    numbers_of_threads,
    poisoned,
    same_bits,
    seeded,
)
from torch import Tensor

from icl_patch import ops
from icl_patch.ops import native

pytestmark = pytest.mark.skipif(not native.serves("cpu"), reason="needs the native library")

both_layouts = pytest.mark.parametrize("transposed", [False, True], ids=["NK", "KN"])
SHAPES = [(1, 1), (3, 5), (4, 16), (7, 33), (64, 64), (129, 257), (513, 1023)]


def patched_linear(*arguments: Tensor | None, **named: Tensor | torch.dtype | None) -> Tensor:
    return torch.ops.icl_patch.patched_linear(*arguments, **named)


def case(
    kind: str, rows: int, n: int, k: int, dtype: torch.dtype, transposed: bool = False
) -> Case:
    """Arguments with factors of a layout, or none."""
    made = linear_case("row" if kind == "none" else kind, (rows, n, k), 3, dtype)
    if transposed:
        made.weight = by_columns(made.weight)
    if kind == "none":
        made.u, made.v, made.row_u = None, None, 0 * made.row_u
    return made


@both_layouts
@every_narrow
@pytest.mark.parametrize("kind", ["none", *LAYOUTS])
def test_against_the_formula(kind: str, dtype: torch.dtype, transposed: bool) -> None:
    """The fp32 sum is within a few roundings of its terms, and any other output is that sum rounded
    once.
    """
    for n, k in SHAPES:
        of = case(kind, 35, n, k, dtype, transposed)
        want, size = of.expected()
        for rows in (1, 2, 3, 5, 16, 35):
            arguments = of.rows(slice(rows)).arguments
            wide = patched_linear(**arguments, out_dtype=torch.float32)
            assert wide.dtype == torch.float32
            error = (wide.double() - want[:rows]).abs()
            assert (error <= 16 * UNIT[torch.float32] * size[:rows]).all()
            for out_dtype in (None, torch.bfloat16, torch.float16):
                out = patched_linear(**arguments, out_dtype=out_dtype)
                assert same_bits(out, wide.to(out_dtype or dtype))


@both_layouts
@every_narrow
def test_a_row_does_not_see_the_others(dtype: torch.dtype, transposed: bool) -> None:
    for n, k in SHAPES:
        of = case("row-rank", 37, n, k, dtype, transposed)
        together = patched_linear(**of.arguments)
        for rows in (slice(0, 1), slice(3, 5), slice(7, 10), slice(9, 16), slice(12, 36)):
            assert same_bits(patched_linear(**of.rows(rows).arguments), together[rows])


@both_layouts
@every_narrow
def test_recording_has_the_bits_of_the_replay(dtype: torch.dtype, transposed: bool) -> None:
    for n, k in SHAPES:
        of = case("row", 2 * 19, n, k, dtype, transposed)
        all_z, weight, all_v, bias = of.z, of.weight, of.v, of.bias
        wide_ctx, wide = all_z.double().chunk(2)
        exact = (wide_ctx - wide) @ weight.double().T
        size = (wide_ctx.abs() + wide.abs()) @ weight.double().abs().T
        for rows in (1, 2, 3, 8, 19):
            z_ctx, z, v = all_z[:rows], all_z[19 : 19 + rows], all_v[:rows]
            y, u = torch.ops.icl_patch.record_linear(torch.cat([z_ctx, z]), weight, v, bias)
            assert same_bits(y[:rows], patched_linear(z_ctx, weight, None, None, bias))
            assert same_bits(y[rows:], patched_linear(z, weight, u, v, bias))
            assert u.dtype == torch.float32
            error = (u.double() - exact[:rows]).abs()
            assert (error <= 16 * UNIT[torch.float32] * size[:rows]).all()


@every_narrow
def test_strides_and_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    z, weight, u, v, bias, _ = case("row-rank", 5, 515, 1000, dtype).arguments.values()
    plain = patched_linear(z, weight, u, v, bias)
    spread = [in_gaps(x) for x in (z, u, v, bias)]
    assert same_bits(patched_linear(spread[0], poisoned(weight), *spread[1:]), plain)
    transposed = u.transpose(0, 1).contiguous().transpose(0, 1)
    assert same_bits(patched_linear(z, weight, transposed, v, bias), plain)
    for _ in numbers_of_threads(2, 3):
        assert same_bits(patched_linear(z, weight, u, v, bias), plain)
    assert all(same_bits(patched_linear(z, weight, u, v, bias), plain) for _ in range(100))


def test_a_poisoned_row_stays_alone() -> None:
    z, weight, u, v, bias, _ = case("row", 6, 67, 130, torch.float32).arguments.values()
    clean = patched_linear(z, weight, u, v, bias)
    z[2, 129] = torch.nan
    dirty = patched_linear(z, weight, u, v, bias)
    others = torch.arange(6) != 2
    assert dirty[2].isnan().all() and same_bits(dirty[others], clean[others])


def test_signs_that_are_still_to_be_changed_in_lists() -> None:
    z, weight = (normal(seeded(s), 4, 9, dtype=torch.float32) for s in (0, 1))
    v, bias = ops.read_direction(z[2:]).v, z[0, :4]
    native = torch.ops.icl_patch
    plain, changed = (
        native.linear_maps(z, [weight, of(weight)], [of(bias), None])
        + native.record_linears(z, [weight, weight], v, [None, of(bias)])
        for of in (torch.clone, negated)
    )
    assert all(map(same_bits, changed, plain))


def test_nothing_to_do() -> None:
    z, weight, bias = case("none", 0, 9, 17, torch.float32).plain.values()
    assert patched_linear(z, weight, None, None, bias).shape == (0, 9)
    assert patched_linear(z.new_ones(3, 17), weight[:0]).shape == (3, 0)
    none_to_sum = patched_linear(z.new_ones(3, 0), weight[:, :0], None, None, bias)
    assert same_bits(none_to_sum, bias.expand(3, 9))


def test_a_compiled_graph_takes_the_path_of_the_rows_it_has() -> None:
    """And not of those that it was traced with. 1 row has a graph of its own, and all other numbers
    share one in each path.
    """
    weight = normal(seeded(0), 20, 33, dtype=torch.float32)
    ran: list[str] = []

    def step(z: Tensor, u: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        y = ops.patched_linear(z, weight, u, z)
        pool = ops.patched_linear(z, weight, u[:, None], z[:, None], index=index)
        recorded = ops.record_linear(torch.cat([z, -z]), weight)[0]
        return ops.rms_norm(y, u, 1e-5), ops.norm_pair(recorded, u[0], 1e-5).z_pair, pool

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
        return lambda *inputs: (ran.append(graph.code), graph(*inputs))[1]

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows in (1, 2, 16, 17, 64, 8):
        z, u = (normal(seeded(rows), rows, k, dtype=torch.float32) for k in (33, 20))
        index = torch.arange(rows) - 1
        stance = "default" if rows in (1, 2, 17) else "fail_on_recompile"
        with torch.compiler.set_stance(stance):
            outputs = compiled(z, u, index)
        for op in ("patched_linear", "record_linear"):
            assert (f"icl_patch.{op}" in ran[-1]) == (rows <= 16)
        assert all(map(same_bits, outputs, step(z, u, index)))


def test_compiled_code_follows_gemv_products() -> None:
    weight, z = (normal(seeded(s), 70, 130, dtype=torch.float32) for s in (0, 1))
    compiled = torch.compile(
        lambda z: ops.patched_linear(z, weight), fullgraph=True, backend="eager"
    )
    alone = torch.cat([ops.patched_linear(row[None], weight) for row in z])
    plain = torch.nn.functional.linear(z, weight)
    assert not same_bits(plain, alone)
    for _ in range(2):
        assert same_bits(compiled(z), plain)
        with ops.gemv_products(), ops.gemv_products():
            assert same_bits(compiled(z), alone)
        assert ops.product_path(z, 70) == "gemm"


@pytest.mark.parametrize("name", op_calls.CALLS)
def test_registered_and_traced_on_real_tensors(name: str) -> None:
    op_calls.check_registered(name)
    op_calls.check_traced(name)


def test_compiled_graphs_have_the_kernels() -> None:
    op_calls.check_compiled()


def check_products() -> None:
    """What an instruction set computes, added up in its own width; :mod:`test_inversion_native`
    calls it on each.
    """
    for transposed, dtype in zip((False, True, False), NARROW.values(), strict=True):
        test_against_the_formula("row", dtype, transposed)
        test_a_row_does_not_see_the_others(dtype, transposed)
        test_recording_has_the_bits_of_the_replay(dtype, transposed)
