"""The RMSNorm inversion on a CUDA device: like the CPU's, and a row's bits depend on the row alone
there too.
"""

from dataclasses import fields

import pytest
import torch
from support.inversion import LAYOUTS, ROOT_ULP, check_rows, mixed_rows, same_rows
from support.norm_recording import EPS, FORMS, random_rows, replayed
from support.numeric import UNIT, every_dtype, every_narrow, normal, on_a_gpu, same_bits, seeded
from torch import Tensor

from icl_patch import ops
from icl_patch.ops import InversionStatus as Status
from icl_patch.ops import native

pytestmark = [
    *on_a_gpu,
    pytest.mark.skipif(not native.cuda_architectures, reason=native.describe()),
]

# On both sides of every place where the driver changes what it keeps where.
SIZES = [1, 31, 256, 257, 2048, 2049, 4096, 4097, 5376, 8193, 10500, 16384, 65536]


def on_cpu(result: ops.RMSNormInverse | ops.StableScale) -> ops.RMSNormInverse | ops.StableScale:
    return type(result)(*(getattr(result, field.name).cpu() for field in fields(result)))


def some_rows(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Of every family, on the device."""
    m, g = mixed_rows(n, 3 if n < 5000 else 1, dtype)
    return m.cuda(), g.cuda()


@every_dtype
@pytest.mark.parametrize("n", SIZES)
def test_every_dtype_is_like_the_cpu(n: int, dtype: torch.dtype) -> None:
    """And a row sees neither its batch nor strides."""
    m, g = some_rows(n, dtype)
    rms = (torch.rand(len(m), generator=seeded(0)) + 0.5).to(dtype).cuda()
    h = normal(seeded(1), *m.shape, dtype=dtype).cuda()

    def both(*given: Tensor, eps: float) -> tuple[ops.RMSNormInverse, ops.StableScale]:
        g, scale, rms, h = given
        return ops.invert_rmsnorm(g, scale, rms, eps, h), ops.stable_scale(g, scale, h, eps)

    # of eps = 0 rows are at the boundary between a root and none, where fp64 sums decide
    for scale, eps in ((m, 0.0), (m, 1e-6), (m[0], 0.1))[dtype != torch.float32 :]:
        given = g, scale, rms, h
        made, expected = both(*given, eps=eps), both(*(x.cpu() for x in given), eps=eps)
        check_rows(scale.cpu(), g.cpu(), rms.cpu(), eps, on_cpu(made[0]))
        for x, y in zip(made, expected, strict=True):
            assert torch.equal(x.status.cpu(), y.status)
            assert [a.dtype for a in vars(x).values()] == [b.dtype for b in vars(y).values()]
        size = expected[1].u.abs() + h.cpu().abs().to(expected[1].u.dtype)
        size = size.norm(dim=1, keepdim=True)
        assert ((made[1].u.cpu() - expected[1].u).abs() <= ROOT_ULP * size).all()
        for rows in (torch.arange(len(m)).flip(0), torch.arange(5), torch.tensor([3])):
            place = rows.cuda()
            own = scale[place] if scale.dim() == 2 else scale
            alone = both(g[place], own, rms[place], h[place], eps=eps)
            assert all(same_rows(x, y, place) for x, y in zip(alone, made, strict=True))
        for lay in LAYOUTS.values() if n in (31, 4097, 16384) else ():
            assert all(map(same_rows, both(*map(lay, given), eps=eps), made))
    expanded = ops.invert_rmsnorm(g[1].expand(5, n), m[1].expand(5, n), rms[:1].expand(5))
    assert same_rows(expanded, ops.invert_rmsnorm(g[1].repeat(5, 1), m[1], rms[:1].repeat(5)))


@pytest.mark.parametrize("n", [31, 2049, 5376, 16384])
def test_a_poisoned_row_leaves_the_others_alone(n: int) -> None:
    m, g = (x.repeat(1024 // len(x) + 1, 1)[:1024] for x in some_rows(n))
    rms = torch.ones(1024).cuda()
    clean = ops.invert_rmsnorm(g, m, rms, 1e-6)
    g[517, n // 2], m[518, 0], rms[519] = torch.nan, torch.inf, 0
    result = ops.invert_rmsnorm(g, m, rms, 1e-6)
    assert result.status[517:519].tolist() == [Status.NONFINITE] * 2
    assert result.status[519] == Status.BAD_RADIUS
    assert result.hidden[517:519].isnan().all() and not result.hidden[519].any()
    others = torch.ones(1024, dtype=torch.bool).index_fill_(0, torch.arange(517, 520), False)
    for field in fields(clean):
        x, y = (getattr(each, field.name).cpu()[others] for each in (result, clean))
        assert torch.equal(x, y)


@every_narrow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 129, 1025, 2560, 5376, 20_000])
def test_a_recorded_norm(n: int, form: str, dtype: torch.dtype) -> None:
    """The bits of its replay, and the numbers of the native op on the CPU."""
    offset, cast_first = FORMS[form]
    options: dict = {"out_dtype": dtype, "scale_offset": offset, "cast_first": cast_first}
    given = random_rows(4, n, 2 * n + 1, dtype)
    on_device = tuple(x.cuda() for x in given)
    found, expected = (ops.record_norm(*of, EPS, **options) for of in (on_device, given))
    assert same_bits(found.y_pair, replayed(on_device, found, form))
    assert torch.equal(found.status.cpu(), expected.status)
    for name in ("u", "new_scale"):
        got, want = getattr(found, name).cpu(), getattr(expected, name)
        size = want.nan_to_num().abs().amax(1, keepdim=True)
        near = (got - want).abs() <= 4 * UNIT[torch.float32] * size
        assert near.logical_or(want.isnan()).all()
    v, inverse_norm2, _ = ops.read_direction(on_device[1])
    torch.testing.assert_close(found.direction.v, v, rtol=2.0**-22, atol=0)
    torch.testing.assert_close(found.direction.inverse_norm2, inverse_norm2, rtol=2.0**-22, atol=0)


def test_of_nothing() -> None:
    empty = torch.ones(0, 7, device="cuda")
    result = ops.invert_rmsnorm(empty, torch.ones(7, device="cuda"), empty[:, 0])
    assert result.hidden.shape == (0, 7) and result.status.shape == (0,)
    assert ops.stable_scale(empty, empty, empty).u.shape == (0, 7)
    torch.cuda.synchronize()


@pytest.mark.parametrize("n", [31, 4097, 16384])
def test_on_a_stream_of_its_own(n: int) -> None:
    """What the stream has still to write is seen, and what it reads next is finished."""
    m, g = some_rows(n)
    rms = torch.ones(len(m)).cuda()
    expected = ops.invert_rmsnorm(2 * g, m, rms)
    busy = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    stream, late = torch.cuda.Stream(), torch.zeros_like(g)
    with torch.cuda.stream(stream):
        for _ in range(20):
            busy = busy @ busy / 4096
        late.copy_(2 * g)
        result = ops.invert_rmsnorm(late, m, rms)
        copied = result.hidden.clone()
    stream.synchronize()
    assert same_rows(result, expected)
    assert same_bits(copied, expected.hidden)


@pytest.mark.parametrize("n", [31, 4097, 16384])
def test_in_a_cuda_graph(n: int) -> None:
    """Captured once and replayed on other numbers in the same places: no host looks at a number on
    the way.
    """

    def both(g: Tensor, m: Tensor, rms: Tensor) -> tuple[ops.RMSNormInverse, ops.StableScale]:
        return ops.invert_rmsnorm(g, m, rms, 1e-6, g), ops.stable_scale(g, m, m, 1e-6)

    m, g = some_rows(n)
    inputs = [g, m, torch.ones(len(m)).cuda()]
    places = [x.clone() for x in inputs]
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        both(*places)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both(*places)
    for order in (torch.arange(len(m)), torch.arange(len(m)).flip(0)):
        for place, x in zip(places, inputs, strict=True):
            place.copy_(x[order.cuda()])
        graph.replay()
        torch.cuda.synchronize()
        for result, expected in zip(results, both(*(x[order.cuda()] for x in inputs)), strict=True):
            assert same_rows(result, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_the_second_device() -> None:
    m, g = some_rows(257)
    expected = ops.invert_rmsnorm(g, m, torch.ones(len(m)).cuda())
    second = torch.device("cuda", 1)
    result = ops.invert_rmsnorm(g.to(second), m.to(second), torch.ones(len(m), device=second))
    assert result.hidden.device == second and torch.cuda.current_device() == 0
    assert same_rows(on_cpu(result), on_cpu(expected))
    with pytest.raises(ValueError, match="expected scale on cuda:1, got cuda:0"):
        ops.invert_rmsnorm(g.to(second), m, torch.ones(len(m), device=second))
