"""What the Triton kernels must do, on the CPU where they are interpreted, else on the GPU; those of
``patched_linear``: :mod:`linear_kernel_checks`.

Neither is collected by itself: ``test_kernels.py`` runs them in Triton's interpreter,
``test_kernels_gpu.py`` on a GPU.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import attention, expert_products, op_calls, row_ops
from support.linear_cases import check_linear
from support.linear_kernel_checks import (
    DEVICE,
    SOME,
    all_of,
    bf16_heavy,
    coefficients,
    every_float,
    fp32_heavy,
    heavy,
    linear_case,
    poisoned_outputs,  # noqa: F401 for every test of this file too
)
from support.numeric import UNIT, by_columns, negated, normal, poisoned, same_bits, seeded
from support.op_calls import NATIVE
from torch import Tensor

from icl_patch import kernels
from icl_patch.kernels.ops.attention import plan_write_and_attend
from icl_patch.kernels.ops.experts import plan_experts
from icl_patch.kernels.ops.linear import blocks, launch_linear
from icl_patch.kernels.ops.linear_maps import launch_maps
from icl_patch.kernels.ops.recording import launch_record
from icl_patch.kernels.runtime import launching
from icl_patch.kernels.runtime.config import Config, config_for, gpu_name
from icl_patch.kernels.runtime.launching import INTERPRETED

# record_linear, read_direction


@pytest.mark.parametrize(
    ("dtype", "rows"),
    all_of(SOME.values(), (1, 3, 8, 18), light=[(torch.float32, 1), (torch.bfloat16, 3)]),
)
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
    recorded = kernels.record_linears(z[:0], [weight], [bias], coeff[:0])
    assert all(x.shape == (0, 35) for x in recorded)


@bf16_heavy
def test_maps_of_one_input_share_a_launch(dtype: torch.dtype) -> None:
    """And have the bits of their own launches: of other widths, with a bias or without, an odd one
    behind them, or one of another layout. Recorded maps by twos, others by threes.
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
        for i, y in enumerate(launch_maps(z, weights, biases, config=config)):
            assert same_bits(y, launch_linear(z, weights[i], bias=biases[i], config=config))


# Norms, the gated product and the direction


@pytest.mark.parametrize(
    ("dtype", "widths"),
    [
        (torch.float32, (2100,)),
        (torch.bfloat16, (70,)),
        heavy(torch.float32, (1, 70)),
        heavy(torch.float16, (70,)),
    ],
)
def test_row_ops(dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    """As ops, which these kernels serve; of a row of 2100 elements two segments."""
    if INTERPRETED and widths == (2100,):
        row_ops.check_rms_norm(dtype, "llama", widths)
        row_ops.check_norm_pair(dtype, "gemma", widths)
    else:
        row_ops.check_all(dtype, widths, DEVICE)


@bf16_heavy
def test_the_coefficients_of_a_direction_are_those_of_a_linear_op(dtype: torch.dtype) -> None:
    for k in (63, 2500) if INTERPRETED else (1, 63, 2500):
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


# As operators


def test_signs_that_are_still_to_be_changed() -> None:
    """In an argument, or in a list of which some may be absent."""
    case = linear_case("row", (4, 7, 9))
    _, _, coeff = kernels.read_direction(case.z[2:])
    weights = [case.weight] * 2
    plain, changed = (
        [
            kernels.patched_linear(of(case.z), case.weight, bias=of(case.bias)),
            *kernels.linear_maps(case.z, weights, [None, of(case.bias)]),
            *kernels.record_linears(of(case.z), weights, [of(case.bias), None], coeff),
        ]
        for of in (torch.clone, negated)
    )
    assert all(map(same_bits, changed, plain))
    attention.check_negated_caches(kernels.write_and_attend, DEVICE)


# expert_linear


@every_float
def test_expert_linear(dtype: torch.dtype) -> None:
    sizes = expert_products.SIZES
    if INTERPRETED:  # the larger one: the next test
        sizes = expert_products.SMALL[:1]
    expert_products.check_products(kernels.expert_linear, dtype, sizes, DEVICE, cut=INTERPRETED)


def test_where_there_is_no_such_expert_the_output_is_0() -> None:
    """Nothing is read from beyond the matrices, and the other slots are not touched."""
    of = expert_products.case((2, 2, 4, 17, 70), torch.float32, False, True, DEVICE)
    out = kernels.expert_linear(*of[:4])
    expert_products.check_formula(of, out, torch.float32)
    for number in (-1, 4, 1 << 40):
        wrong = of.expert.clone()
        wrong[1, 0] = number
        given = of.x, of.weight, wrong, of.bias
        found = plan_experts(*given, None)(*given)  # without a check on the host
        assert not found[1, 0].any()
        found[1, 0] = out[1, 0]
        assert same_bits(found, out)


LIGHT_CALLS = ("patched_linear, a pool", "expert_linear", "attention_pair")


@pytest.mark.parametrize(
    "name", [x if x in LIGHT_CALLS else heavy(x) for x in op_calls.CALLS if x not in NATIVE]
)
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    op_calls.check_registered(name, DEVICE)


def test_opcheck_of_maps_of_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = linear_case("row", (3, 5, 70))
    given = case.z, [case.weight] * 2, [case.bias, None]
    torch.library.opcheck(torch.ops.icl_patch.triton_linear_maps.default, given)


@pytest.mark.parametrize("dtype", [torch.float32, heavy(torch.bfloat16)][INTERPRETED:], ids=str)
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
    weight = normal(seeded(0), 9, 70, dtype=dtype).to(DEVICE)

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
        config = config_for(gpu_name(torch.device(DEVICE)), dtype, 9)
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
    compiled = torch.compile(step, fullgraph=True, dynamic=INTERPRETED or None, backend=backend)
    all_rows = (8, 17) if INTERPRETED else (1, 8, 17)  # each graph takes seconds there
    for rows in all_rows:
        sizes = ((rows, 70), (2 * rows, 70), (rows, 9))
        inputs = [normal(seeded(rows), *size, dtype=dtype).to(DEVICE) for size in sizes]
        inputs.append(torch.zeros(rows, dtype=torch.int64, device=DEVICE))
        with torch.compiler.set_stance("default" if rows < 17 else "fail_on_recompile"):
            outputs = compiled(*inputs)
        assert are_configured_for(rows) == {True}
        assert rows > all_rows[0] or all(map(same_bits, outputs, step(*inputs)))
        launched.clear()


# Attention of one token a row


# in the interpreter each shape in one dtype; more than 1024 keys there: the next test
ATTENDED = [
    heavy(dtype, shape) if number == place % 2 or place in (1, 2) else (dtype, shape)
    for place, shape in enumerate(attention.SHAPES)
    for number, dtype in enumerate(SOME.values())
]


@pytest.mark.parametrize(("dtype", "shape"), ATTENDED, ids=str)
def test_decode_attention(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    query, key, value, mask = attention.problem(shape, dtype, DEVICE)
    for seen in (torch.ones_like(mask), mask):
        given = None if seen.all() else seen
        scale = max(shape[4], 1) ** -0.5
        y = kernels.decode_attention(query, key, value, given, scale)
        attention.check_attention(y, query, key, value, seen)
        if (keys := key.shape[2]) and shape[0]:
            slot = torch.tensor([keys // 2], device=DEVICE)
            own = value[:, :, keys // 2].repeat_interleave(shape[1] // shape[2], 1)
            pair = kernels.attention_pair(query, key, value, slot, given, scale)
            assert same_bits(pair, torch.cat([y, own]))


# Columns at the ends of blocks, of 16 keys in fp32 with wide values, else of up to 64; 17 heads of
# queries share keys in two programs.
WRITTEN = [
    ("fp32", shape, (0, 15, 16)) for shape in ((2, 4, 2, 18, 16, 129), (1, 17, 1, 18, 16, 129))
]
WRITTEN += [
    heavy(name, attention.SHAPES[place], (31, 64, 256)) for place in (1, 3, 7) for name in SOME
]


@pytest.mark.parametrize(("dtype", "shape", "slots"), WRITTEN, ids=str)
def test_write_and_attend(dtype: str, shape: tuple[int, ...], slots: tuple[int, ...]) -> None:
    """The bits of two copies and the attention after them, wherever the column is in a block, and
    whoever sees it.
    """
    query, key, value, mask = attention.problem(shape, SOME[dtype], DEVICE)

    functions = kernels.write_and_attend, kernels.attention_pair
    columns = key.shape[2]
    for number, slot in enumerate(sorted({*slots, columns - 1} & {*range(columns)})):
        seen = mask.clone()
        seen[: number % 2, slot] = False
        if not number:
            seen[:, :3] = False  # blocks are counted from the first key that a row sees
        attention.check_written(*functions, query, key, value, slot, seen if number else None)
        attention.check_written(*functions, query, key, value, slot, seen)


def test_a_column_that_is_not_there_is_not_written() -> None:
    query, key, value, _ = attention.problem((2, 4, 2, 9, 8, 6), torch.float32, DEVICE)
    before, new = (key.clone(), value.clone()), attention.new_token(key, value)
    for slot in (-1, 9):
        column = torch.tensor([slot], device=DEVICE)
        given = query.unsqueeze(2), key, value, *new, column, None
        plan_write_and_attend(*given, 0.5)(*given)  # without a check on the host
        assert same_bits(key, before[0]) and same_bits(value, before[1])


@every_float
def test_rotary_embedding(dtype: torch.dtype) -> None:
    """It has the bits of torch's operators; keys and angles lie in gaps, angles are of a row or of
    all. Triton's interpreter cuts bf16 off where a GPU rounds.
    """
    cut = INTERPRETED and dtype == torch.bfloat16
    for shape in ((3, 5, 2, 4, 10, 3), (2, 3, 3, 1, 64, 1)):
        attention.check_rotary(kernels.rotary_embedding, dtype, shape, DEVICE, cut=cut)


@fp32_heavy
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
