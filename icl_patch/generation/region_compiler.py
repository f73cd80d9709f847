"""Compile a step's operators region by region: a region begins where a block's first parameter is
read.

The blocks of a model are alike, and so are most regions: each kind of region is compiled once,
however many blocks there are.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.split_module import split_module

from icl_patch.generation.eager_operators import keep_rounding
from icl_patch.recording.memory import memory_of

BACKEND = "inductor"
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.as_strided.default)


def _compiled(module: fx.GraphModule, like: list[Tensor], eager_rounding: bool) -> Any:
    """A region's graph, compiled for inputs that are ``like`` these."""
    from torch._dynamo import lookup_backend  # takes seconds
    from torch._inductor import config

    # The inputs always have the same addresses and shapes. The checks of this would take a sixth of
    # a step's time between the products.
    with config.patch(
        size_asserts=False, alignment_asserts=False, emulate_precision_casts=eager_rounding
    ):
        if isinstance(module.graph.output_node().args[0], tuple):
            return lookup_backend(BACKEND)(module, like)
        # a compiler's graph returns a tuple, a region with one output returns the tensor
        module.graph.output_node().args = (module.graph.output_node().args,)
        module.recompile()
        compiled = lookup_backend(BACKEND)(module, like)
        return lambda *inputs: compiled(*inputs)[0]


def in_regions(
    function: Callable[[], Any], blocks: Iterable[nn.Module], *, eager_rounding: bool = False
) -> fx.GraphModule:
    """A function as a graph of compiled regions, with the same outputs.

    Args:
        function: it calls operators on tensors with fixed addresses; it is run once.
        blocks: the model's blocks, in order.
        eager_rounding: whether the outputs have the bits of the operators, run one by one.
    """
    # One fake mode for all tensors: make_fx would make one for each, in half of its time.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        module = make_fx(function)()
    # Views are made where their tensors are: of a mask for all blocks, which the first block would
    # view for the others, or of a block's own part of a tensor for all, whose place differs.
    for node in list(module.graph.nodes):
        if node.target in _VIEWS and node.args[0].op != "get_attr":
            node.args[0].append(node)
    if eager_rounding:
        keep_rounding(module)
    # gives each node a tensor without numbers, whose storage shows which are one memory
    FakeTensorProp(module, FakeTensorMode(allow_non_fake_inputs=True)).propagate()
    regions = _regions(module, blocks)
    # The nodes get names by their operators and places, so that equal regions have equal texts.
    split = split_module(module, module, regions.__getitem__, keep_original_input_name=False)
    kinds: dict[str, Any] = {}
    for call in split.graph.find_nodes(op="call_module"):
        name = str(call.target)
        part = getattr(split, name)
        like = [x.meta["val"] for x in part.graph.find_nodes(op="placeholder")]
        # The compiler relies on which inputs are one memory.
        places = [memory_of(x) for x in like]
        memory = [places.index(place) for place in places]
        kind = f"{part.graph} {[(x.shape, x.stride(), x.dtype, x.device) for x in like]} {memory}"
        if kind not in kinds:
            kinds[kind] = _compiled(part, like, eager_rounding)
        delattr(split, name)
        setattr(split, name, kinds[kind])
    # a module looks for its tensors in its own dictionary first
    vars(split).update({**split._parameters, **split._buffers})
    return split


def _regions(module: fx.GraphModule, blocks: Iterable[nn.Module]) -> dict[fx.Node, int]:
    """The number of the region of each node: that of the last block whose parameters were read."""
    owner = {
        parameter.data_ptr(): number
        for number, block in enumerate(blocks)
        for parameter in block.parameters()
    }
    regions: dict[fx.Node, int] = {}
    region = 0
    for node in module.graph.nodes:
        read = [x for x in node.all_input_nodes if x.op == "get_attr"]
        addresses = [getattr(module, str(x.target)).data_ptr() for x in read]
        region = max(region, *(owner.get(address, 0) for address in addresses), 0)
        regions[node] = region
    return regions
