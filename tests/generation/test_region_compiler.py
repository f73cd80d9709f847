"""A traced graph cut into regions: it gives and writes what it did whole, and alike regions share a
graph.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.random_models import tokens
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from icl_patch import ContextPatcher
from icl_patch.evaluation import tiny_models
from icl_patch.generation import region_compiler, traced_step
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

    monkeypatch.setattr(traced_step, "in_regions", making)
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


def test_regions_are_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run after run: outputs, and the tensors that are written in place."""
    monkeypatch.setattr(region_compiler, "BACKEND", "aot_eager")
    torch.manual_seed(0)
    model = Stack([4, 4, 6, 4, 4])
    before = [x.clone() for x in model.state()]
    with torch.no_grad():
        traced = in_regions(graph_of(lambda: model()), model.blocks)
        for x, old in zip(model.state(), before, strict=True):
            x.copy_(old)
        expected = [[x.clone() for x in (*model(), *model.state())] for _ in range(6)]
        for x, old in zip(model.state(), before, strict=True):
            x.copy_(old)
        for outputs in expected:
            found = [*traced(), *model.state()]
            assert all(torch.equal(x, y) for x, y in zip(found, outputs, strict=True))
    # the first with what is for all, the last with what ends, the wider one, and one for the two
    # that are left
    assert len(set(regions_of(traced))) == 4


def test_regions_that_share_what_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler takes it for granted which of its inputs are one: regions alike but for that have
    graphs of their own.
    """
    monkeypatch.setattr(region_compiler, "BACKEND", "aot_eager")
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(6))
    start, written = torch.randn(2, 4), [torch.zeros(3, 4) for _ in blocks]
    read = [x if number in (3, 4) else torch.zeros(3, 4) for number, x in enumerate(written)]

    def run() -> list[Tensor]:
        x = start
        for block, here, there in zip(blocks, written, read, strict=True):
            here.add_(x.mean() + 1)
            x = block(x + there.sum(0))
        return [x]

    def three(function: Callable[[], list[Tensor]]) -> list[Tensor]:
        for tensor in written:
            tensor.zero_()
        return [function()[0].clone() for _ in range(3)]

    with torch.no_grad():
        regions = in_regions(graph_of(run), blocks)
        assert all(torch.equal(x, y) for x, y in zip(three(regions), three(run), strict=True))
    # the first, which reads the start, one for three alike, and one for the other two
    assert len(set(regions_of(regions))) == 3


def graph_of(function: Callable[[], list[Tensor]]) -> fx.GraphModule:
    with torch.no_grad():
        return make_fx(function)()


SLIDING = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
GEMMA3N = {"intermediate_size": [48] * 6, "activation_sparsity_pattern": [0.0] * 6}
GEMMA3N |= {"num_kv_shared_layers": 0}


ALIKE = [("llama", {}, 3), ("gemma3", SLIDING, 3)]
ALIKE += [  # experts and a Conv1D among Llama's forms, and several residual streams among Gemma's
    pytest.param(*alike, marks=pytest.mark.stress)
    for alike in (
        *(("mixtral", {}, 3), ("gpt2", {}, 3)),
        *(("gemma4", SLIDING, 4), ("gemma3n", SLIDING | GEMMA3N, 3)),
    )
]


@pytest.mark.parametrize(("family", "changes", "kinds"), ALIKE)
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
