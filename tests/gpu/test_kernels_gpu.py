"""The Triton kernels on a CUDA device: all that is checked in the interpreter, and what only a
device can show.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from support.kernel_checks import *  # noqa: F403
from support.linear_cases import check_linear
from support.linear_kernel_checks import *  # noqa: F403
from support.linear_kernel_checks import linear_case, rows_keep_their_bits
from support.numeric import UNIT, normal, on_a_gpu, same_bits, seeded, within_roundings
from torch import Tensor

from icl_patch import kernels
from icl_patch.kernels.runtime.launching import INTERPRETED

pytestmark = [*on_a_gpu, pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set")]

# (N, K) of the readers and writers of Gemma-3 1B, 4B, 12B and 27B, Llama-3 8B and Qwen3 0.6B
HEADLINE = [(6912, 1152), (1152, 6912), (10240, 2560), (15360, 3840), (21504, 5376)]
HEADLINE += [(5376, 21504), (14336, 4096), (3072, 1024)]
headline = pytest.mark.parametrize(("n", "k"), HEADLINE)


def needs_memory(gigabytes: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of device memory, {free / 1e9:.1f} are free")


@pytest.mark.parametrize(
    ("rows", "rank"), [(1, 1), (2, 1), (8, 1), (8, 4), (16, 16), (32, 1), (64, 4)]
)
@headline
def test_headline_shapes(n: int, k: int, rows: int, rank: int) -> None:
    case = linear_case("row-rank", (rows, n, k), rank, torch.bfloat16, seed=rows)
    # Entries of the size a model has, so that the patch and the plain output are comparable.
    case = replace(case, v=case.v / k, row_v=case.row_v / k)
    case = replace(case, row_v=case.v.double())
    for dtype in (torch.float32, torch.bfloat16):
        check_linear(case, kernels.patched_linear(**case.arguments, out_dtype=dtype), dtype)


@headline
def test_no_row_sees_its_batch_at_headline_shapes(n: int, k: int) -> None:
    case = linear_case("row", (16, n, k), 1, torch.bfloat16)
    assert rows_keep_their_bits(case, list(range(1, 16)))
    large = linear_case("row", (96, n, k), 1, torch.bfloat16)
    assert rows_keep_their_bits(large, [1, 17, 64])


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32])
@headline
def test_replay_has_the_bits_of_the_recording_at_headline_shapes(n: int, k: int, rows: int) -> None:
    generator = seeded(rows)
    pair, weight = (
        normal(generator, *size, dtype=torch.bfloat16).cuda() for size in ((2 * rows, k), (n, k))
    )
    v, _, coeff = kernels.read_direction(pair[rows:])
    y_pair, u = kernels.record_linears(pair, [weight], [None], coeff)
    assert same_bits(kernels.patched_linear(pair[rows:], weight, u, v), y_pair[rows:])
    assert same_bits(kernels.patched_linear(pair[:rows], weight), y_pair[:rows])
    exact = (pair[:rows].double() - pair[rows:].double()) @ weight.double().T
    size = (pair.double().abs() @ weight.double().abs().T).amax()
    assert ((u - exact).abs() <= 64 * UNIT[torch.float32] * size).all()


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call as a graph, after a run that compiles its kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("layout", ["row", "row-rank", "shared", "pool"])
@pytest.mark.parametrize("rows", [2, 40])
def test_a_captured_graph_follows_its_factors(layout: str, rows: int) -> None:
    case = linear_case(layout, (rows, 640, 512), 8, torch.bfloat16)
    out: list[Tensor] = []
    graph = captured(lambda: out.append(kernels.patched_linear(**case.arguments)))
    for seed in (1, 2):
        other = linear_case(layout, (rows, 640, 512), 8, torch.bfloat16, seed=seed)
        for name in ("z", "u", "v", "bias", "index"):
            if getattr(case, name) is not None:
                getattr(case, name).copy_(getattr(other, name))
        graph.replay()
        torch.cuda.synchronize()
        expected = kernels.patched_linear(**case.arguments)
        assert same_bits(out[-1], expected)
        check_linear(replace(other, weight=case.weight), expected, torch.bfloat16)


def test_a_captured_step_records() -> None:
    hidden, weight, norm = (
        normal(seeded(s), *size, dtype=torch.bfloat16).cuda()
        for s, size in ((0, (4, 512)), (1, (640, 512)), (2, (512,)))
    )
    out: list[list[Tensor]] = []

    def step() -> None:
        z_pair, _, _, _, coeff = kernels.norm_pair(hidden, norm, 1e-6)
        out.append(kernels.record_linears(z_pair, [weight], [None], coeff))

    graph = captured(step)
    hidden.copy_(normal(seeded(3), 4, 512, dtype=torch.bfloat16))
    graph.replay()
    torch.cuda.synchronize()
    seen = out[-1]
    step()
    assert all(map(same_bits, seen, out[-1]))
    assert not same_bits(seen[1], out[0][1])


# More than 2**31 elements


def test_a_weight_of_more_than_two_to_the_31_elements() -> None:
    needs_memory(12)
    n, k = 262208, 8256
    weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    z = torch.randn(2, k, dtype=torch.bfloat16, device="cuda")
    u, v = torch.randn(2, n, device="cuda"), torch.randn(2, k, device="cuda") / k
    for last, w in ((weight[-100:], weight), (weight.view(k, n).T[-100:], weight.view(k, n).T)):
        out = kernels.patched_linear(z, w, u, v, out_dtype=torch.float32)[:, -100:]
        wide, products, own = z.double(), z.double() * v.double(), u[:, -100:].double()
        expected = wide @ last.double().T + products.sum(-1, keepdim=True) * own
        size = wide.abs() @ last.double().abs().T
        size += products.abs().sum(-1, keepdim=True) * own.abs()
        assert within_roundings(out, expected, 64, size)  # its blocks are added up in turn
        assert not within_roundings(out, expected.flip(1), 64, size)


@pytest.mark.parametrize("rows", [40000])
def test_rows_and_outputs_of_more_than_two_to_the_31_elements(rows: int) -> None:
    needs_memory(16)  # u and the result take 5.25 GB each
    n, k = 65600, 64
    z, weight = (torch.randn(size, k, dtype=torch.bfloat16, device="cuda") for size in (rows, n))
    u = torch.randn(rows, n, dtype=torch.bfloat16, device="cuda")
    v = torch.randn(rows, k, device="cuda")
    out = kernels.patched_linear(z, weight, u, v)[-70:, -100:]
    coeff = (z[-70:].double() * v[-70:].double()).sum(-1, keepdim=True)
    own = u[-70:, -100:].double()
    size = 64 * z.abs().amax() * (weight.abs().amax() + v.abs().amax() * own.abs().amax())
    expected = z[-70:].double() @ weight[-100:].double().T + coeff * own
    limit = 1.01 * UNIT[torch.bfloat16] * expected.abs() + 64 * UNIT[torch.float32] * size
    assert ((out - expected).abs() <= limit).all()


def test_a_gated_product_of_more_than_two_to_the_31_elements() -> None:
    needs_memory(20)
    gate = torch.randn(100100, 21504, dtype=torch.bfloat16, device="cuda")
    out = kernels.gated_product(gate, gate, "silu")
    last, tiny = gate[-1].double(), torch.finfo(torch.bfloat16).tiny
    error = (out[-1] - last.square() * torch.sigmoid(last)).abs()
    assert (error <= 3 * UNIT[torch.bfloat16] * last.square() + tiny).all()


def test_attention_over_more_than_two_to_the_31_elements() -> None:
    needs_memory(10)
    keys = torch.randn(8, 2**29, dtype=torch.bfloat16, device="cuda")[:, :70].T
    query = torch.randn(1, 3, 8, dtype=torch.bfloat16, device="cuda")
    near, far = (x.expand(1, 1, 70, 8) for x in (keys.contiguous(), keys))
    expected = kernels.decode_attention(query, near, near, None, 0.5)
    assert same_bits(kernels.decode_attention(query, far, far, None, 0.5), expected)


@pytest.mark.parametrize("d", [64, 128])
def test_a_mask_changes_no_bits_of_attention(d: int) -> None:
    """Of many numbers: another order of a sum shows in one of thousands."""
    sizes = (64, 32, d), (64, 8, 300, d), (64, 8, 300, d)
    query, key, value = (normal(seeded(i), *x).bfloat16().cuda() for i, x in enumerate(sizes))
    mask = torch.ones(64, 310, dtype=torch.bool, device="cuda")
    mask[:, :10] = False
    expected = kernels.decode_attention(query, key, value, None, 0.1)
    key, value = (torch.cat([x[:, :, :10], x], 2) for x in (key, value))
    assert same_bits(kernels.decode_attention(query, key, value, mask, 0.1), expected)
