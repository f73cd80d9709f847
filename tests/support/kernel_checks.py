"""What the Triton kernels must do, on the CPU where they are interpreted, else on the GPU.

Not collected by itself: ``test_kernels.py`` runs it in Triton's interpreter,
``test_kernels_gpu.py`` on a GPU.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import attention, expert_products, interpreter, linear_cases, row_ops
from support.linear_cases import LAYOUTS, Case, check_linear, check_rows_without_a_patch
from support.numeric import (
    NARROW,
    UNIT,
    by_columns,
    every_narrow,
    in_gaps,
    normal,
    poisoned,
    same_bits,
    seeded,
)
from support.row_ops import unit
from torch import Tensor

from icl_patch import kernels
from icl_patch.kernels.ops.coefficients import plan_coefficients
from icl_patch.kernels.ops.linear import blocks, launch_linear
from icl_patch.kernels.ops.recording import launch_record
from icl_patch.kernels.runtime import launching
from icl_patch.kernels.runtime.config import Config, config_for, gpu_name
from icl_patch.kernels.runtime.launching import INTERPRETED

if INTERPRETED:
    interpreter.prepare()
DEVICE = "cpu" if INTERPRETED else "cuda"
linear_case = partial(linear_cases.linear_case, device=DEVICE)
# bf16 stands for both narrow ones in the interpreter, which is slow; fp16 there:
# test_both_kernels_serve_every_dtype, test_one_rounding
SOME = {name: dtype for name, dtype in NARROW.items() if name != "fp16" or not INTERPRETED}
every_float = pytest.mark.parametrize("dtype", SOME.values(), ids=SOME)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN."""
    empty = torch.empty

    def filled(*size: object, **options: object) -> Tensor:
        out = empty(*size, **options)
        written_by_kernels = out.is_floating_point() and out.device.type == DEVICE
        return out.fill_(torch.nan) if written_by_kernels else out

    monkeypatch.setattr(torch, "empty", filled)


# patched_linear

SIZES = [(1, 70, 130), (2, 1, 63), (3, 65, 1), (5, 33, 200)]
SIZES += [(16, 40, 129), (17, 31, 70), (40, 66, 64)]
RANKS = [1, 2, 3, 1, 4, 5, 1]


@pytest.mark.parametrize("own_factors", [False, True], ids=["fp32-factors", "own-factors"])
@every_layout
@every_float
def test_patched_linear(dtype: torch.dtype, layout: str, own_factors: bool) -> None:
    # in the interpreter one size for each
    number = 2 * LAYOUTS.index(layout) + own_factors + 8 * (dtype == torch.float32)
    for seed, (sizes, rank) in enumerate(zip(SIZES, RANKS, strict=True)):
        if INTERPRETED and seed != number % len(SIZES):
            continue
        factor_dtype = dtype if own_factors else torch.float32
        case = linear_case(layout, sizes, rank, dtype, factor_dtype, seed % 3 > 0, seed)
        check_linear(case, kernels.patched_linear(**case.arguments), dtype)
        no_patch = replace(case, row_u=0 * case.row_u)
        check_linear(no_patch, kernels.patched_linear(**case.plain), dtype)


# ranks, several segments of the coefficients of which the last is not full, and nothing
FURTHER = [
    *(("row-rank", (17, 12, 70), rank) for rank in (1, 2, 3, 16)),
    *(("row-rank", (rows, 12, 70), rank) for rows, rank in ((2, 3), (2, 64), (1, 64))),
    ("row", (2, 16, 4500), 1),
    *((of, sizes, 2) for of in LAYOUTS for sizes in ((0, 7, 9), (3, 0, 9), (3, 7, 0), (20, 7, 0))),
]


@pytest.mark.parametrize(("layout", "sizes", "rank"), FURTHER)
def test_further_sizes(layout: str, sizes: tuple[int, int, int], rank: int) -> None:
    case = linear_case(layout, sizes, rank, torch.bfloat16, seed=rank)
    out = kernels.patched_linear(**case.arguments, out_dtype=torch.float32)
    check_linear(case, out, torch.float32)


# in the interpreter, of many rows the pool in one dtype
STRIDED = [
    (dtype, layout, rows)
    for dtype in SOME.values()
    for layout in LAYOUTS
    for rows in (3, 18)
    if not INTERPRETED or rows == 3 or (dtype, layout) == (torch.bfloat16, "pool")
]


@pytest.mark.parametrize(("dtype", "layout", "rows"), STRIDED)
def test_strides(dtype: torch.dtype, layout: str, rows: int) -> None:
    case = linear_case(layout, (rows, 35, 70), 2, dtype)
    for stride in (poisoned, by_columns, in_gaps):
        changed = {name: stride(getattr(case, name)) for name in ("z", "weight", "u", "v")}
        strided = replace(
            case, **changed, bias=(poisoned if stride is by_columns else stride)(case.bias)
        )
        assert not strided.weight.is_contiguous()
        check_linear(strided, kernels.patched_linear(**strided.arguments), dtype)
    repeated = replace(case, z=case.z[:1].expand(rows, -1))
    check_linear(repeated, kernels.patched_linear(**repeated.arguments), dtype)


@pytest.mark.parametrize("out_dtype", NARROW.values(), ids=NARROW)
@every_float
def test_one_rounding(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Of the fp32 sum with the patch in it."""
    case = linear_case("row", (3, 33, 100), 1, dtype)
    exact = kernels.patched_linear(**case.arguments, out_dtype=torch.float32)
    check_linear(case, exact, torch.float32)
    out = kernels.patched_linear(**case.arguments, out_dtype=out_dtype)
    if INTERPRETED and out_dtype == torch.bfloat16:
        assert ((out.float() - exact).abs() <= unit(out_dtype) * exact.abs()).all()
    else:
        assert same_bits(out, exact.to(out_dtype))


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        (dtype, rows)
        for dtype in SOME.values()
        for rows in (6, 20)
        if not INTERPRETED or (rows == 20) == (dtype == torch.bfloat16)
    ],
)
def test_index_minus_one_gives_the_bits_of_the_plain_map(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the row before the first of the pool get read."""
    monkeypatch.setattr(interpreter, "tensors_begin_behind_guards", True)
    case = linear_case("pool", (rows, 33, 70), 2, dtype)
    check_rows_without_a_patch(kernels.patched_linear, case)


# One order of summation


def rows_keep_their_bits(case: Case, counts: list[int]) -> bool:
    """Whether the rows of the whole batch come out the same again, alone, in smaller batches and in
    other places.
    """

    def run(of: Case) -> Tensor:
        return kernels.patched_linear(**of.arguments, out_dtype=torch.float32)

    whole = run(case)
    return all(
        same_bits(run(case.rows(part)), whole[part])
        for count in (*counts, len(whole))
        for start in {0, len(whole) - count}
        for part in [slice(start, start + count)]
    )


@every_float
def test_a_row_does_not_see_its_batch(dtype: torch.dtype) -> None:
    case = linear_case("row", (16, 9, 130), 1, dtype)
    assert rows_keep_their_bits(case, list(range(1, 16)) if not INTERPRETED else [11])
    # so that the coefficients are summed here in one launch, there in two
    ranked = linear_case("row-rank", (16, 9, 130), 4, dtype)
    assert rows_keep_their_bits(ranked, [1])
    many = linear_case("row", (40, 9, 100), 1, dtype)
    assert rows_keep_their_bits(many, [1, 17] if not INTERPRETED else [17])
    check_linear(many, kernels.patched_linear(**many.arguments), dtype)


@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (3, 2)])
@every_float
def test_coefficients_have_the_same_bits_wherever_they_are_summed(
    dtype: torch.dtype, rows: int, rank: int
) -> None:
    k = 2200 if INTERPRETED else 4300  # segments are of 2048
    case = linear_case("row-rank", (rows, 7, k), rank, dtype)
    coeff = coefficients(case.z, case.v)
    exact = torch.einsum("mk,mrk->mr", case.z.double(), case.row_v)
    assert (coeff - exact).abs().max() <= 64 * UNIT[torch.float32] * k
    for n in (20, 5000):  # steps of 256 and of 128 elements
        config = config_for("", dtype, n)
        configs = (replace(config, fused=limit) for limit in (4096, 0))
        inside, before = (
            launch_linear(**case.arguments, out_dtype=torch.float32, config=each)
            for each in configs
        )
        assert same_bits(inside, before)
    # Older interpreters round the product of a fused multiply-add.
    orders = [
        documented_order(case.z.unsqueeze(1), case.v, fused)
        for fused in ((True, False) if INTERPRETED else (True,))
    ]
    assert any(same_bits(coeff, order) for order in orders)


def coefficients(z: Tensor, v: Tensor) -> Tensor:
    return plan_coefficients(z, v, None)(z, v, None)


def documented_order(z: Tensor, v: Tensor, fused: bool) -> Tensor:
    """Lanes of 64, segments of 32, neighbours first."""
    products = z.double() * v.double() if fused else z.float() * v.float()
    products = F.pad(products, (0, -z.shape[-1] % 2048)).unflatten(-1, (-1, 32, 64))
    total = torch.zeros_like(products[..., 0, 0, :], dtype=torch.float32)
    for segment in products.unbind(-3):
        partial = torch.zeros_like(total)
        for chunk in segment.unbind(-2):
            partial = (partial + chunk).float()
        total = total + partial
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return total.squeeze(-1)


@pytest.mark.parametrize("dot", [False, True], ids=["fma", "dot"])
@every_narrow
def test_both_kernels_serve_every_dtype(dtype: torch.dtype, dot: bool) -> None:
    case = linear_case("row", (3, 33, 200), 1, dtype)
    config = Config(dot=dot, block_m=16, block_n=16, block_k=64, num_warps=4, num_stages=2)
    check_linear(case, launch_linear(**case.arguments, config=config), dtype)


@pytest.mark.parametrize("sums", [2, 4, 16])
def test_running_sums_take_parts_of_each_step_and_are_added_in_pairs(sums: int) -> None:
    """With one product in each part the sums are exact, and the order of the pairs shows. A
    recording and its replay add in the same one.
    """
    config = Config(True, 16, 16, 256, 2, 3, sums=sums)
    parts = normal(seeded(0), 20, sums, dtype=torch.bfloat16).to(DEVICE)
    weight = torch.zeros(20, 600, dtype=torch.bfloat16, device=DEVICE)
    for part in range(sums):  # in the first or the second step
        weight[:, 256 * (part % 2) + part * 256 // sums] = parts[:, part]
    total = parts.float()
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    ones = torch.ones(3, 600, dtype=torch.bfloat16, device=DEVICE)
    out = launch_linear(ones, weight, out_dtype=torch.float32, config=config)
    assert same_bits(out, total.T.expand(3, -1))
    z = normal(seeded(sums), 6, 600, dtype=torch.bfloat16).to(DEVICE)
    weight = normal(seeded(1), 20, 600, dtype=torch.bfloat16).to(DEVICE)
    v, _, coeff = kernels.read_direction(z[3:])
    y_pair, u = launch_record(z, [weight], [None], coeff, config=config)
    assert same_bits(launch_linear(z[3:], weight, u, v, config=config), y_pair[3:])
    assert same_bits(launch_linear(z[:3], weight, config=config), y_pair[:3])
    assert same_bits(launch_linear(z[1:2], weight, config=config), y_pair[1:2])


@pytest.mark.parametrize("layout", ["row", "shared", "pool"])
@every_float
def test_the_low_rank_term_alone(dtype: torch.dtype, layout: str) -> None:
    """On the plain map before its rounding it has the bits of the whole, whichever way the
    coefficients are summed there.
    """
    for rows in (3, 18) if layout == "pool" else (3,):
        # more than a block has, or not
        many = rows == 3 and layout == "pool" and dtype == torch.bfloat16
        n = 600 if many or not INTERPRETED else 70
        case = linear_case(layout, (rows, n, 70), 2, dtype)
        plain = kernels.patched_linear(**case.plain, out_dtype=torch.float32)
        parts = {"u": in_gaps(case.u), "v": case.v, "index": case.index}
        for out_dtype in {torch.float32, dtype}:
            out = kernels.add_low_rank(in_gaps(plain), case.z, **parts, out_dtype=out_dtype)
            assert same_bits(out, kernels.patched_linear(**case.arguments, out_dtype=out_dtype))
    if layout == "pool":
        nowhere = torch.full((len(plain),), -1, device=DEVICE)
        nothing = kernels.add_low_rank(plain, case.z, case.u[:0], case.v[:0], index=nowhere)
        assert same_bits(nothing, plain)
    if layout == "shared":
        assert kernels.add_low_rank(plain[:0], case.z[:0], case.u, case.v).shape == (0, n)


# record_linear, read_direction


RECORDED = [
    pytest.param(dtype, rows, id=f"{name}-{rows}")
    for name, dtype in SOME.items()
    for rows in (1, 3, 8, 18)
    if not INTERPRETED or rows in ((1, 8) if name == "fp32" else (3, 18))
]


@pytest.mark.parametrize(("dtype", "rows"), RECORDED)
def test_record_linear(dtype: torch.dtype, rows: int) -> None:
    """Both streams, and a replay has their bits; ``u`` is the difference of the sums in fp32."""
    case = linear_case("row", (2 * rows, 35, 130), 1, dtype, seed=rows)
    z_ctx, z = case.z.chunk(2)
    v, _, coeff = kernels.read_direction(z)
    for weight, bias in ((case.weight, None), (by_columns(case.weight), case.bias)):
        y_pair, u = kernels.record_linears(poisoned(case.z), [weight], [bias], coeff)
        exact = (z_ctx.double() - z.double()) @ weight.double().T
        size = (case.z.double().abs() @ weight.double().abs().T).amax()
        assert ((u - exact).abs() <= 64 * UNIT[torch.float32] * size).all()
        plain = replace(case, bias=bias, row_u=0 * case.row_u)
        check_linear(plain.rows(slice(rows)), y_pair[:rows], dtype)
        replayed = kernels.patched_linear(z, weight, u, v, bias)
        with_context = kernels.patched_linear(z_ctx, weight, bias=bias)
        assert same_bits(torch.cat([with_context, replayed]), y_pair)
        assert not same_bits(kernels.patched_linear(z, weight, bias=bias), replayed)


@every_float
def test_two_maps_of_one_input_share_a_launch(dtype: torch.dtype) -> None:
    """And have the bits of their own launches: of other widths, with a bias or without, an odd one
    behind them, or one of another layout.
    """
    config = Config(dtype != torch.float32, 16, 16, 64, 2, 3)
    cases = [linear_case("row", (4, n, 130), 1, dtype, seed=n) for n in (17, 33, 5, 7)]
    z, weights = cases[0].z, [case.weight for case in cases]
    weights[3] = by_columns(weights[3])
    _, _, coeff = kernels.read_direction(z[2:])
    for biases in ([case.bias for case in cases], [None] * 4):
        maps = zip(weights, biases, strict=True)
        own = [x for w, b in maps for x in launch_record(z, [w], [b], coeff, config=config)]
        found = launch_record(z, weights, biases, coeff, config=config)
        assert all(same_bits(x, y) for x, y in zip(found, own, strict=True))


# Norms, the gated product and the direction


@every_narrow
def test_row_ops(dtype: torch.dtype) -> None:
    """As ops, which these kernels serve; of a row of 2100 elements two segments."""
    row_ops.check_all(dtype, (1, 70, 2100) if dtype == torch.float32 else (70,), DEVICE)


@every_float
def test_the_coefficients_of_a_direction_are_those_of_a_linear_op(dtype: torch.dtype) -> None:
    for k in (1, 63, 2500):
        hidden = normal(seeded(k), 6, k, dtype=dtype).to(DEVICE)
        z_pair, _, v, _, coeff = kernels.norm_pair(hidden, hidden[0], 1e-5)
        assert same_bits(coeff, coefficients(z_pair[3:], v.unsqueeze(1)))
        v, _, coeff = kernels.read_direction(hidden)
        assert same_bits(coeff, coefficients(hidden, v.unsqueeze(1)))


def test_the_kernels_round_where_the_modules_do() -> None:
    """Their bits differ from those of one rounding at the end."""
    x, scale = (normal(seeded(s), 8, 300, dtype=torch.float16).to(DEVICE) for s in (0, 1))
    first, last = (
        kernels.rms_norm(x, scale.float(), 1e-5, cast_first=cast) for cast in (True, False)
    )
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert (first == (normed.half().float() * scale.float()).half()).float().mean() > 0.95
    assert (last == (normed * scale.float()).half()).float().mean() > 0.95
    assert 0.2 < (first == last).float().mean() < 0.9
    modules = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
    for activation, module in modules.items():
        out, act = kernels.gated_product(x, scale, activation), module(x.float())
        assert (out == act.half() * scale).float().mean() > 0.97
        assert (out == (act * scale.float()).half()).float().mean() < 0.9


def test_no_rows() -> None:
    """Where nothing was read, nothing is recorded; the other ops: test_row_ops."""
    empty = torch.ones(0, 7, device=DEVICE)
    _, _, coeff = kernels.read_direction(empty)
    recorded = kernels.record_linears(empty, [torch.ones(3, 7, device=DEVICE)], [None], coeff)
    assert all(x.shape == (0, 3) for x in recorded)


# As operators


def test_signs_that_are_still_to_be_changed() -> None:
    """The imaginary part of a conjugate is a view of numbers with the other sign."""
    case = linear_case("row", (3, 7, 9))
    z = torch.complex(case.z, case.z).conj().imag
    assert z.is_neg()
    out, expected = (kernels.patched_linear(x, case.weight) for x in (z, -case.z))
    assert same_bits(out, expected)


# expert_linear


@every_float
def test_expert_linear(dtype: torch.dtype) -> None:
    sizes = expert_products.SMALL if INTERPRETED else expert_products.SIZES
    expert_products.check_products(kernels.expert_linear, dtype, sizes, DEVICE, cut=INTERPRETED)


def test_where_there_is_no_such_expert_the_output_is_0() -> None:
    """Nothing is read from beyond the matrices, and the other slots are not touched."""
    of = expert_products.case((3, 2, 4, 33, 70), torch.float32, False, True, DEVICE)
    out = kernels.expert_linear(*of[:4])
    for number in (-1, 4, 1 << 40):
        wrong = of.expert.clone()
        wrong[1, 0] = number
        found = kernels.expert_linear(of.x, of.weight, wrong, of.bias)
        assert not found[1, 0].any()
        found[1, 0] = out[1, 0]
        assert same_bits(found, out)


def operator_calls() -> list[tuple[str, tuple]]:
    case = linear_case("pool", (3, 5, 70), 2)
    pair = normal(seeded(2), 6, 70, dtype=torch.float32).to(DEVICE)
    wide = torch.ones(3, 1, device=DEVICE)
    experts = expert_products.case((3, 2, 4, 5, 7), torch.float32, True, True, DEVICE)[:4]
    factors = (case.z, case.u, case.v, case.index, torch.float16)
    attended = attention.problem((2, 4, 2, 9, 8, 6), torch.float32, DEVICE)
    return [
        ("patched_linear", (*case.arguments.values(), torch.float16)),
        ("patched_linear", (case.z, case.weight, None, None, None, None, None)),
        ("record_linears", (pair, [case.weight] * 3, [case.bias] * 3, wide)),
        ("add_low_rank", (torch.ones(3, 5, device=DEVICE), *factors)),
        ("read_direction", (pair,)),
        ("norm_pair", (pair, pair[0], 1e-5, 1.0, False)),
        ("rms_norm", (pair, pair, 1e-5, 0.0, True)),
        ("gated_product", (pair, pair, "silu")),
        ("expert_linear", (*experts, torch.float16)),
        *(("decode_attention", (*attended[:3], mask, 0.5)) for mask in (attended[3], None)),
    ]


@pytest.mark.parametrize("number", range(11))
def test_opcheck(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    name, arguments = operator_calls()[number]
    torch.library.opcheck(getattr(torch.ops.icl_patch, f"triton_{name}").default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16][INTERPRETED:], ids=str)
def test_a_compiled_graph_launches_for_the_rows_it_has(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for those that it was traced with: 1 row, then 8 for all others. On a GPU with
    multiply-adds too.
    """
    monkeypatch.undo()
    monkeypatch.setattr(launching, "_launches", {})
    run, launched = launching.Launch._run, list[dict]()

    def noting(self: launching.Launch, *tensors: object) -> None:
        if self.kernel.__name__ == "_linear_kernel":
            names = self.kernel.arg_names[-len(self.rest) :]
            launched.append(self.options | dict(zip(names, self.rest, strict=True)))
        run(self, *tensors)

    monkeypatch.setattr(launching.Launch, "_run", noting)
    weight = normal(seeded(0), 20, 70, dtype=dtype).to(DEVICE)

    def step(z: Tensor, pair: Tensor, u: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        z_pair, _, _, _, coeff = kernels.norm_pair(pair, pair[0], 1e-5)
        y_pair, recorded = kernels.record_linears(z_pair, [weight], [None], coeff)
        one = kernels.patched_linear(z, weight, u, z)
        pool = kernels.patched_linear(z, weight, u[:, None], z[:, None], index=index)
        added = kernels.add_low_rank(one, z, u, z)
        gated = kernels.gated_product(y_pair.chunk(2)[1], added, "gelu_tanh")
        experts = kernels.expert_linear(z, weight[None], index[:, None])
        return kernels.rms_norm(gated, u, 1e-5), recorded, pool, experts

    def are_configured_for(rows: int) -> set[bool]:
        """Whether the linear maps were launched as the table says for so many rows."""
        config = config_for(gpu_name(torch.device(DEVICE)), dtype, 20)
        expected = {
            "M": rows,
            "DOT": config.dot,
            "BLOCK_K": config.block_k,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }
        found = {
            (expected | {"BLOCK_M": blocks(config, rows, product["RECORD"])[0]}).items()
            <= product.items()
            for product in launched
        }
        assert len(launched) == 3
        launched.clear()
        return found

    backend = "aot_eager" if INTERPRETED else "inductor"
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for rows in (1, 8, 17):
        sizes = ((rows, 70), (2 * rows, 70), (rows, 20))
        inputs = [normal(seeded(rows), *size, dtype=dtype).to(DEVICE) for size in sizes]
        inputs.append(torch.zeros(rows, dtype=torch.int64, device=DEVICE))
        with torch.compiler.set_stance("default" if rows < 17 else "fail_on_recompile"):
            outputs = compiled(*inputs)
        assert are_configured_for(rows) == {True}
        assert rows > 1 or all(map(same_bits, outputs, step(*inputs)))
        launched.clear()


# Attention of one token a row


# in the interpreter each shape in one dtype; more than 1024 keys there: the next test
ATTENDED = [
    (dtype, shape)
    for place, shape in enumerate(attention.SHAPES)
    for number, dtype in enumerate(SOME.values())
    if not INTERPRETED or ((place + number) % 2 and shape[3] <= 1024)
]


@pytest.mark.parametrize(("dtype", "shape"), ATTENDED, ids=str)
def test_decode_attention(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    query, key, value, mask = attention.problem(shape, dtype, DEVICE)
    for seen in (torch.ones_like(mask), mask):
        given = None if seen.all() else seen
        y = kernels.decode_attention(query, key, value, given, max(shape[4], 1) ** -0.5)
        attention.check_attention(y, query, key, value, seen)


@every_float
def test_attention_does_not_depend_on_padding_or_room(dtype: torch.dtype) -> None:
    """Nor on other rows, strides, or what is hidden."""
    groups = 1 if INTERPRETED else 2
    shape = (3, 3 * groups, groups, 1300, 16, 16)
    query, key, value, _ = attention.problem(shape, dtype, DEVICE)
    spans = [(0, 300), (1100, 1300), (64, 65)]  # behind the first 1024 of the mask too
    mask = torch.zeros(3, 1300, dtype=torch.bool, device=DEVICE)
    for row, (first, stop) in enumerate(spans):
        mask[row, first:stop] = True
    y = kernels.decode_attention(query, key, value, mask, 0.3)
    hidden = ~mask[:, None, :, None]
    poison = key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)
    assert same_bits(kernels.decode_attention(query, *poison, mask, 0.3), y)
    for row, (first, stop) in enumerate(spans):
        some = (x[row : row + 1, :, first:stop] for x in (key, value))
        alone = kernels.decode_attention(query[row : row + 1], *some, None, 0.3)
        assert same_bits(alone, y[row : row + 1])
    lone = kernels.decode_attention(query, key[:, :, :1], value[:, :, :1], None, 0.3)
    assert same_bits(lone, value[:, :, 0].repeat_interleave(3, 1))  # a softmax of one number is 1


@every_float
def test_attention_to_an_infinite_value(dtype: torch.dtype) -> None:
    query, key, value, _ = attention.problem((1, 2, 1, 9, 16, 16), dtype, DEVICE)
    value[0, 0, 3, 2], value[0, 0, 4, 5] = torch.inf, -torch.inf
    y = kernels.decode_attention(query, key, value, None, 0.3)
    assert (y[..., 2] == torch.inf).all() and (y[..., 5] == -torch.inf).all()
    assert y.isfinite().sum() == 2 * 14
