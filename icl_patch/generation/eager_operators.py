"""Operators of a compiled step that the compiler may not compute in its own way.

A compiled exact step has to have the bits of its replay, which runs operator by operator. Inductor
adds, multiplies, compares and moves numbers with the bits of torch's eager operators, and rounds
every result if ``emulate_precision_casts`` is set. It sums in another order, and has functions of
its own in place of torch's (exp, rsqrt, a quotient on a GPU). Sums and such functions are therefore
hidden from it: each becomes an operator of the namespace ``icl_patch_eager`` that runs torch's.
"""

from functools import cache

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

_NAMESPACE = "icl_patch_eager"
_aten = torch.ops.aten
_ADDS: frozenset[OpOverloadPacket] = frozenset((_aten.add, _aten.sub))
_SAME_BITS: frozenset[OpOverloadPacket] = _ADDS | {
    *(_aten.mul, _aten.neg, _aten.abs, _aten._to_copy, _aten.copy_, _aten.where),
    *(_aten.maximum, _aten.minimum, _aten.amax, _aten.isnan),
    *(_aten.cat, _aten.stack, _aten.index_select, _aten.index_copy_, _aten.index, _aten.embedding),
    *(_aten.clone, _aten._unsafe_view, _aten.repeat),
    *(_aten.full, _aten.full_like, _aten.zeros, _aten.zeros_like, _aten.scalar_tensor),
    *(_aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.ones_like),
}
"""Operators on floating-point numbers that Inductor computes with the bits of torch's."""


def keep_rounding(module: fx.GraphModule) -> None:
    """Hide the operators of a graph that a compiler would round in another way, in place."""
    for node in list(module.graph.nodes):
        if not isinstance(node.target, OpOverload):
            continue
        if node.target is _aten.pow.Tensor_Scalar and node.args[1] == 2:
            node.target, node.args = _aten.mul.Tensor, (node.args[0], node.args[0])
        elif not _has_same_bits(node, node.target):
            node.target = _hidden(_for_numbers(node, node.target))
    module.recompile()


def _has_same_bits(node: fx.Node, operator: OpOverload) -> bool:
    """Whether Inductor gives the node's output the bits of torch's operator."""
    if operator.namespace != "aten":
        return True  # the compiler calls the operators of others
    values = [x.meta.get("val") for x in (node, *node.all_input_nodes)]
    if not any(isinstance(x, Tensor) and x.is_floating_point() for x in values):
        return True
    if any(argument.alias_info is not None for argument in operator._schema.returns):
        return True  # a view or a write: no operator of ours can stand for one
    packet = operator.overloadpacket
    if packet in _ADDS and node.kwargs.get("alpha", 1) != 1:
        return False
    # of bools or integers: a comparison, for example
    is_flag = isinstance(values[0], Tensor) and not values[0].is_floating_point()
    return packet in _SAME_BITS or (torch.Tag.pointwise in operator.tags and is_flag)


def _for_numbers(node: fx.Node, operator: OpOverload) -> OpOverload:
    """The operator's overload for the node's arguments: torch makes a tensor of a number for its
    own operators alone.
    """
    pairs = zip(operator._schema.arguments, node.args, strict=False)
    if not any(isinstance(x, int | float) and str(place.type) == "Tensor" for place, x in pairs):
        return operator
    overload: OpOverload = getattr(
        operator.overloadpacket, operator._overloadname.replace("Tensor", "Scalar")
    )
    return overload


@cache
def _hidden(operator: OpOverload) -> OpOverload:
    """An operator that runs ``operator``, and whose name no compiler knows."""
    schema = str(operator._schema)
    schema = schema[schema.index("(") :]
    name = f"{operator._opname}_{operator._overloadname}"
    qualified = f"{_NAMESPACE}::{name}"
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "CompositeExplicitAutograd")(operator)
    torch.library.register_fake(qualified)(operator)
    hidden: OpOverload = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return hidden
