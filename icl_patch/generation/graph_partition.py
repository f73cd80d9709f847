"""Compile a traced step region by region: a region ends behind a block's last matrix product.

The blocks of a model are alike, and so are most regions: each kind of region is compiled once,
however many blocks there are. With 12 blocks this took 56 % of the time for the whole graph.
The cuts cost no fusion, because the compiler fuses nothing with a product. Values that every block
computes, such as a mask, are computed once, in the first region.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from icl_patch.generation.eager_operators import keep_rounding

BACKEND = "inductor"


class _Kind:
    """The graph of all equal regions. It is compiled when it first runs.

    eager_rounding: whether every result is rounded to its dtype, as eager operators do.
    """

    def __init__(self, module: fx.GraphModule, eager_rounding: bool) -> None:
        self._module: fx.GraphModule | None = module
        self._eager_rounding = eager_rounding
        self._run: Callable[..., Sequence[Tensor]] | None = None

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The outputs, one by one."""
        if self._run is None:
            assert self._module is not None
            from torch._dynamo import lookup_backend  # takes seconds
            from torch._inductor import config

            # The inputs always have the same addresses and shapes. The checks of this would take a
            # sixth of a step's time between the products.
            with config.patch(
                size_asserts=False,
                alignment_asserts=False,
                emulate_precision_casts=self._eager_rounding,
            ):
                self._run = lookup_backend(BACKEND)(self._module, list(inputs))
            self._module = None
        return self._run(*inputs)


class _Region(NamedTuple):
    """A part of the graph.

    inputs: tensors with a fixed address, and nodes of earlier regions; outputs: the nodes that
    later regions or the caller use.
    """

    run: _Kind
    inputs: list[Tensor | fx.Node]
    outputs: list[fx.Node]


class Regions:
    """A graph of operators as compiled regions: ``regions()`` returns its outputs.

    Args:
        module: the graph, without placeholders; its tensors have fixed addresses.
        blocks: the model's blocks, in order.
        eager_rounding: whether the outputs have the bits of the graph's operators, run one by one.
        free: numbers of the outputs whose bits do not matter even so.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        blocks: Iterable[nn.Module],
        *,
        eager_rounding: bool = False,
        free: Iterable[int] = (),
    ) -> None:
        tidy(module)
        if eager_rounding:
            outputs: Any = module.graph.output_node().args[0]
            keep_rounding(module, [outputs[number] for number in free])
        *nodes, output = module.graph.nodes
        bounds = [0, *_ends(module, nodes, blocks), len(nodes)]
        parts = [nodes[start:end] for start, end in pairwise(bounds)]
        kinds: dict[str, _Kind] = {}
        storage, written = _storages(module)
        self._regions = [
            _region(module, part, kinds, storage, written, eager_rounding)
            for part in parts
            if any(node.op != "get_attr" for node in part)
        ]
        self._results: list[Any] = [_tensor(module, x) for x in output.args[0]]
        self.kinds = len(kinds)

    def __call__(self) -> list[Any]:
        """The graph's outputs."""
        values: dict[fx.Node, Tensor] = {}
        for region in self._regions:
            outputs = region.run(
                *[values[x] if isinstance(x, fx.Node) else x for x in region.inputs]
            )
            values |= zip(region.outputs, outputs, strict=True)
        return [values[x] if isinstance(x, fx.Node) else x for x in self._results]


def tidy(module: fx.GraphModule) -> None:
    """Make the regions of equal blocks equal: compute a value of several blocks once."""
    graph = module.graph
    storage, written = _storages(module)
    for node in list(graph.nodes):
        # Each block selects its own part of a tensor for all blocks: select where the tensor is
        # computed, because the indices would make the blocks differ.
        if (
            node.target is torch.ops.aten.select.int
            and node.args[0].op != "get_attr"
            and storage[node] not in written
        ):
            node.args[0].append(node)
    first: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        touched = {storage[x] for x in (node, *node.all_input_nodes)}
        if node.op == "get_attr" or (_is_function(node) and not touched & written):
            other = first.setdefault(f"{node.op} {node.target} {node.args} {node.kwargs}", node)
            if other is not node:
                node.replace_all_uses_with(other)
                graph.erase_node(node)
    # Compute a constant where it is used, or the first block that uses it would differ.
    for node in first.values():
        if _is_function(node) and not node.all_input_nodes and node.meta["val"].numel() == 1:
            for user in list(node.users)[1:]:
                with graph.inserting_before(user):
                    user.replace_input_with(node, graph.node_copy(node))
    module.recompile()


def _storages(module: fx.GraphModule) -> tuple[dict[fx.Node, Any], set[Any]]:
    """The storage of each node's tensor, and the storages that the graph writes into."""
    storage: dict[fx.Node, Any] = {}
    written: set[Any] = set()
    for node in module.graph.nodes:
        storage[node] = node
        if isinstance(tensor := _tensor(module, node), Tensor):
            storage[node] = tensor.untyped_storage().data_ptr()
        elif node.target is operator.getitem:
            storage[node] = storage[node.args[0]]
        for source, writes in _aliased(node):
            storage[node] = storage[source]
            if writes:
                written.add(storage[source])
    return storage, written


def _is_function(node: fx.Node) -> bool:
    """Whether the node's output depends on its inputs alone."""
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded not in node.target.tags
    return node.target is operator.getitem


def _aliased(node: fx.Node) -> Iterable[tuple[fx.Node, bool]]:
    """The inputs that the output shares memory with, each with whether it is written into."""
    if not isinstance(node.target, OpOverload):
        return
    for number, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None:
            sources = (
                node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            )
            for x in sources if isinstance(sources, list | tuple) else [sources]:
                if isinstance(x, fx.Node):
                    yield x, argument.alias_info.is_write


def _tensor(module: fx.GraphModule, x: Any) -> Any:
    """The tensor that a node of the module stands for, or the argument itself."""
    if isinstance(x, fx.Node) and x.op == "get_attr":
        attribute = getattr(module, str(x.target))
        return attribute if isinstance(attribute, Tensor) else x
    return x


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
        tensor = _tensor(module, node)
        if isinstance(tensor, Tensor):
            if (number := owner.get(tensor.data_ptr())) is not None:
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


def _region(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    kinds: dict[str, _Kind],
    storage: dict[fx.Node, Any],
    written: set[Any],
    eager_rounding: bool,
) -> _Region:
    """The region of these nodes; a new kind of region is added to ``kinds``."""
    calls = [node for node in nodes if node.op == "call_function"]
    inside = set(calls)
    sources = {
        x: _tensor(module, x) for node in calls for x in node.all_input_nodes if x not in inside
    }
    inputs = {
        x: tensor
        for x, tensor in sources.items()
        if isinstance(tensor, Tensor) or x.op != "get_attr"
    }
    outputs = [node for node in calls if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies = {x: graph.placeholder(f"x{number}") for number, x in enumerate(inputs)}
    copies |= {x: graph.get_attr(str(x.target)) for x in sources if x not in inputs}
    for node in calls:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        # The name comes from the operator, so that the text of equal regions is equal.
        copies[node] = graph.create_node(node.op, node.target, args, kwargs)
    graph.output([copies[x] for x in outputs])
    like = [x if isinstance(x, Tensor) else x.meta["val"] for x in inputs.values()]
    kind = f"{graph} {[(x.shape, x.stride(), x.dtype, x.device) for x in like]}"
    storages = [storage[x] for x in inputs]
    if any(place in written and storages.count(place) > 1 for place in storages):
        # The compiler relies on which inputs share written memory, so this region has its own kind.
        kind += f" {id(nodes)}"
    if kind not in kinds:
        kinds[kind] = _Kind(fx.GraphModule(module, graph), eager_rounding)
    return _Region(kinds[kind], list(inputs.values()), outputs)
