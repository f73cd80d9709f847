"""Compile a traced step region by region: a region ends behind a block's last matrix product.

The blocks of a model are alike, and so are most regions: each kind of region is compiled once,
however many blocks there are. With 12 blocks this took 56 % of the time for the whole graph.
The cuts cost no fusion, because the compiler fuses nothing with a product.
"""

import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.split_module import split_module

from icl_patch.generation.eager_operators import keep_rounding
from icl_patch.recording.memory import memory_of

BACKEND = "inductor"


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
    module: fx.GraphModule,
    blocks: Iterable[nn.Module],
    *,
    eager_rounding: bool = False,
    free: Iterable[int] = (),
) -> fx.GraphModule:
    """A graph of operators as one of compiled regions, with the same outputs.

    Args:
        module: the graph, without placeholders; its tensors have fixed addresses.
        blocks: the model's blocks, in order.
        eager_rounding: whether the outputs have the bits of the graph's operators, run one by one.
        free: numbers of the outputs whose bits do not matter even so.
    """
    # Each block selects its own part of a tensor for all blocks: select where the tensor is
    # computed, because the indices would make the blocks differ.
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.select.int):
        if node.args[0].op != "get_attr":
            node.args[0].append(node)
    if eager_rounding:
        outputs: Any = module.graph.output_node().args[0]
        keep_rounding(module, [outputs[number] for number in free])
    # gives each node a tensor without numbers, whose storage shows which are one memory
    FakeTensorProp(module, FakeTensorMode(allow_non_fake_inputs=True)).propagate()
    nodes = list(module.graph.nodes)
    ends = _ends(module, nodes[:-1], blocks)
    region = {node: bisect_right(ends, place) for place, node in enumerate(nodes)}
    # The nodes get names by their operators and places, so that equal regions have equal texts.
    split = split_module(module, module, region.__getitem__, keep_original_input_name=False)
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


def _ends(
    module: fx.GraphModule, nodes: Sequence[fx.Node], blocks: Iterable[nn.Module]
) -> list[int]:
    """The positions behind the last product of each block but the last one."""
    owner = {
        weight.data_ptr(): number
        for number, block in enumerate(blocks)
        for weight in block.parameters()
        if weight.dim() > 1
    }
    block_of: dict[fx.Node, int] = {}  # of weights and of their views
    last: dict[int, int] = {}
    for position, node in enumerate(nodes):
        if node.op == "get_attr":
            number = owner.get(getattr(module, str(node.target)).data_ptr())
            if number is not None:
                block_of[node] = number
            continue
        used = {block_of[x] for x in node.all_input_nodes if x in block_of}
        last |= dict.fromkeys(used, position + 1)
        if len(node.all_input_nodes) == 1 and used:
            block_of[node] = used.pop()
    ends = []
    for end in sorted(set(last.values()))[:-1]:
        while nodes[end].target is operator.getitem:  # of a product with several outputs
            end += 1
        ends.append(end)
    return ends
