"""A graph that the compiler may only round as torch's eager operators do."""

from collections import Counter

import pytest
import torch
from packaging.version import Version
from support.numeric import normal, same_bits, seeded
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from icl_patch.generation.eager_operators import keep_rounding
from icl_patch.generation.region_compiler import in_regions

WIDTH = 1037


class Step:
    """A little of all that a step does, on tensors in place: RMSNorm, an activation, a rotation, a
    product of three factors, closing in fp64; last a number that is only looked at.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        rng = seeded(4)
        self.x, self.y, self.w = (
            normal(rng, *size, dtype=dtype) for size in ((3, WIDTH),) * 2 + ((WIDTH,),)
        )

    def __call__(self) -> list[Tensor]:
        x, y, w = self.x, self.y, self.w
        wide = x.float()
        z = w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        gate = (wide / (1 + torch.exp(-wide))).to(x.dtype) * y * z
        rotated = x * y.abs() + torch.cat([-y[:, WIDTH // 2 :], y[:, : WIDTH // 2]], -1) * z
        target = (gate + rotated).double()
        factor = torch.where(z != 0, (target - x.double()) / z.double(), 0.0)
        output = (x.double() + factor * z.double()).to(x.dtype)
        return [z, gate, rotated, factor, output, (output - x).float().norm(dim=-1)]


def traced(step: Step) -> fx.GraphModule:
    with torch.no_grad():
        return make_fx(step)()


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.stress), torch.bfloat16], ids=str
)
def test_the_compiled_graph_has_the_bits_of_eager_operators(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and Version(torch.__version__) < Version("2.12"):
        pytest.skip("on a CPU torch 2.11 rounds no product of numbers in bf16; steps are tried")
    step = Step(dtype)
    expected = step()
    kept = in_regions(traced(step), [], eager_rounding=True, free=[5])()
    for number, (got, wanted) in enumerate(zip(kept, expected, strict=True)):
        assert same_bits(got, wanted) or number == 5, number


def test_without_it_the_compiler_rounds_in_other_places() -> None:
    step = Step(torch.bfloat16)
    pairs = zip(in_regions(traced(step), [])(), step(), strict=True)
    assert not all(same_bits(got, wanted) for got, wanted in pairs)


def test_what_is_hidden() -> None:
    """Not a square, nor a number that no bits depend on."""
    graph = traced(Step(torch.float32))
    outputs = graph.graph.output_node().args[0]
    keep_rounding(graph, [outputs[5]])
    names = Counter(str(node.target).removesuffix(".default") for node in graph.graph.nodes)
    hidden = {name.partition(".")[2] for name in names if name.startswith("icl_patch_eager")}
    assert hidden == {"mean_dim", "rsqrt_default", "exp_default", "div_Tensor"}
    assert any(name.startswith("aten.linalg_vector_norm") for name in names)
    assert not any("pow" in name for name in names)
    everything = traced(Step(torch.float32))
    keep_rounding(everything, [])
    assert any(
        "icl_patch_eager.linalg_vector_norm" in str(x.target) for x in everything.graph.nodes
    )


def test_a_sum_with_a_factor_is_hidden() -> None:
    """Eager torch multiplies and adds in one rounding."""
    x = torch.randn(5)
    graph = make_fx(lambda: [torch.add(x, x.exp(), alpha=3), x - x])()
    keep_rounding(graph, [])
    names = [str(node.target) for node in graph.graph.nodes]
    assert "icl_patch_eager.add_Tensor.default" in names and "aten.sub.Tensor" in names
    for got, wanted in zip(graph(), (torch.add(x, x.exp(), alpha=3), x - x), strict=True):
        assert same_bits(got, wanted)
