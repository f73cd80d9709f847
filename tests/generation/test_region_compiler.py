"""A traced graph cut into regions: it gives and writes what it did whole, alike regions share a
graph, and an exact one is rounded as torch's eager operators do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from packaging.version import Version
from support.generation import mostly_stress
from support.numeric import normal, same_bits, seeded
from support.random_models import tokens
from torch import Tensor, fx, nn

from icl_patch import ContextPatcher
from icl_patch.evaluation import tiny_models
from icl_patch.generation import recorded_step, region_compiler
from icl_patch.generation.region_compiler import in_regions


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, but for the tests that set another one."""
    monkeypatch.setattr(region_compiler, "BACKEND", "eager")


def regions_of(graph: fx.GraphModule) -> list[Any]:
    """The compiled graph of each region."""
    return [getattr(graph, node.target) for node in graph.graph.find_nodes(op="call_module")]


def made_regions(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """All graphs of regions that are made from now on."""
    made: list[fx.GraphModule] = []

    def making(*args: Any, **options: Any) -> fx.GraphModule:
        made.append(in_regions(*args, **options))
        return made[-1]

    monkeypatch.setattr(recorded_step, "in_regions", making)
    return made


class Stack(nn.Module):
    """Blocks of two products with what real ones have between them: a mask for all, a cache, a
    counter, outputs in parts.
    """

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 2 * width), nn.Linear(width, 5), nn.LayerNorm((3, 5)))
            for width in widths
        )
        self.register_buffer("x", torch.randn(3, 5))
        self.register_buffer("mask", torch.ones(3, 1, dtype=torch.bool))
        self.register_buffer("slot", torch.zeros(1, dtype=torch.long))
        self.counters = [torch.zeros((), dtype=torch.long) for _ in widths]
        self.caches = [torch.zeros(4, 5) for _ in widths]

    def forward(self) -> list[Tensor]:
        self.slot.add_(1)
        self.mask.index_fill_(0, self.slot % 3, False)
        x, seen = self.x, []
        for block, counter, cache in zip(self.blocks, self.counters, self.caches, strict=True):
            away = torch.where(~self.mask, -1.0, 0.0)
            cache.index_copy_(0, (counter % 4).view(1), x[:1])
            counter.add_(1)
            gate, up = block[0](x + away).chunk(2, -1)
            x = x + block[1](gate.sigmoid() * up) + cache.mean(0)
            x = block[2](x)
            seen += [gate, cache[0]]
        return [x, self.slot + 0, self.x, *seen]

    def state(self) -> list[Tensor]:
        return [self.x, self.mask, self.slot, *self.counters, *self.caches]


class Sharing(nn.Module):
    """Products alike but for a tensor that is read, which two of them have written into."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))
        self.start, self.written = torch.randn(2, 4), [torch.zeros(3, 4) for _ in self.blocks]
        self.read = [x if n in (3, 4) else 0 * x for n, x in enumerate(self.written)]

    def forward(self) -> list[Tensor]:
        x = self.start
        for block, here, there in zip(self.blocks, self.written, self.read, strict=True):
            here.add_(x.mean() + 1)
            x = block(x + there.sum(0))
        return [x]

    def state(self) -> list[Tensor]:
        return self.written


@pytest.mark.parametrize(
    ("make", "graphs"),
    [
        # the first with what is for all, the last with what ends, the wider one, and one for the
        # two that are left
        pytest.param(partial(Stack, [4, 4, 6, 4, 4]), 4, id="stack"),
        # the first, which reads the start, two for the alike ones, and the last, which writes
        # nothing: a compiler takes it for granted which of its inputs are one
        pytest.param(Sharing, 4, id="sharing"),
    ],
)
@torch.no_grad()
def test_regions_are_the_whole_graph(
    make: Callable[[], Any], graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run after run: outputs, and the tensors that are written in place."""
    monkeypatch.setattr(region_compiler, "BACKEND", "aot_eager")
    torch.manual_seed(0)
    model = make()
    before = [x.clone() for x in model.state()]

    def runs(function: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
        for x, old in zip(model.state(), before, strict=True):
            x.copy_(old)
        return [[x.clone() for x in (*function(), *model.state())] for _ in range(6)]

    regions = in_regions(model, model.blocks)
    for found, expected in zip(runs(regions), runs(model), strict=True):
        assert all(map(torch.equal, found, expected))
    assert len(set(regions_of(regions))) == graphs


SLIDING = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
GEMMA3N = {"intermediate_size": [48] * 6, "activation_sparsity_pattern": [0.0] * 6}
GEMMA3N |= {"num_kv_shared_layers": 0}
# experts and a Conv1D among Llama's forms, and several residual streams among Gemma's
ALIKE = [("llama", {}, 3), ("gemma3", SLIDING, 3), ("mixtral", {}, 3), ("gpt2", {}, 3)]
ALIKE += [("gemma4", SLIDING, 4), ("gemma3n", SLIDING | GEMMA3N, 3)]


@pytest.mark.parametrize(("family", "changes", "kinds"), mostly_stress(ALIKE, ALIKE[:2]))
def test_alike_blocks_share_a_graph(
    family: str, changes: dict, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last have more in them; some have two kinds of attention, and pick their
    own of a tensor that is for all.
    """
    found = made_regions(monkeypatch)
    layers = 6 if changes else 4
    model = tiny_models.build(family, num_hidden_layers=layers, **changes)
    with ContextPatcher(model, "stable") as patcher:
        ids = tokens(0, 1, 6) % tiny_models.VOCABULARY
        list(patcher.generate(ids, max_new_tokens=1, compile=True))
    (regions,) = map(regions_of, found)
    assert len(regions) == layers
    assert len(set(regions)) == kinds


# Only rounded as torch's eager operators do

WIDTH = 1037


class Step:
    """A little of all that a step does, on tensors in place: RMSNorm, an activation, a rotation, a
    product of three factors, closing in fp64, a sum with a factor, a norm.
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
        output = torch.add(output, gate, alpha=3)  # in one rounding
        return [z, gate, rotated, factor, output, (output - x).float().norm(dim=-1)]


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.stress), torch.bfloat16], ids=str
)
def test_the_compiled_graph_has_the_bits_of_eager_operators(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this setting the compiler rounds in other places."""
    if dtype == torch.bfloat16 and Version(torch.__version__) < Version("2.12"):
        pytest.skip("on a CPU torch 2.11 rounds no product of numbers in bf16; steps are tried")
    monkeypatch.setattr(region_compiler, "BACKEND", "inductor")
    step = Step(dtype)
    expected = step()
    kept = in_regions(step, [], eager_rounding=True)()
    for number, (got, wanted) in enumerate(zip(kept, expected, strict=True)):
        assert same_bits(got, wanted), number
    if dtype == torch.bfloat16:
        assert not all(map(same_bits, in_regions(step, [])(), expected))
