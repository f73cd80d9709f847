"""Linear maps of one input in one operation of a step's program: queries, keys and values, or the
readers of a gated MLP. On CUDA they share a launch.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from icl_patch.generation.operator_recorder import Call, key_of, tensors_in

# of plain maps, natively and in Triton, and of recorded ones
_GROUPS = {
    "icl_patch::patched_linear": "linear_maps",
    "icl_patch::triton_patched_linear": "triton_linear_maps",
    "icl_patch::record_linear": "record_linears",
}


def grouped(calls: Iterable[Call], is_written: Callable[[Any], bool]) -> list[Call]:
    """The calls, those that map one input at the place of the first of them, unless the step writes
    into what they read.
    """
    result: list[Call] = []
    groups: dict[Any, list[Call]] = {}  # by what its maps share
    for call in calls:
        key = _shared(call)
        if key is None or any(map(is_written, tensors_in((call.args, call.kwargs)))):
            result.append(call)
        elif key in groups:
            groups[key].append(call)
        else:
            groups[key] = [call]
            result.append(call)
    together = {id(group[0]): _together(group) for group in groups.values() if len(group) > 1}
    return [together.get(id(call), call) for call in result]


def _shared(call: Call) -> Any:
    """Equal for maps without a patch of their own that read the same input; None for others."""
    name = call.target._schema.name
    if name not in _GROUPS:
        return None
    z, weight, *rest = _arguments(call)
    # u and v, or v of a recorded map, then the bias
    factors, bias = (rest[:1], rest[1]) if "record" in name else (rest[:2], rest[2])
    known = all(isinstance(x, Tensor) or x is None for x in (weight, bias))
    if not known or rest[len(factors) + 1 :] not in ([], [None, None]):
        return None
    if "record" not in name and factors != [None, None]:
        return None
    return name, key_of(z), key_of(tuple(factors))


def _together(group: list[Call]) -> Call:
    """One call of all maps."""
    first, several = group[0], _GROUPS[group[0].target._schema.name]
    arguments = [_arguments(call) for call in group]
    recorded = several == "record_linears"
    weights, biases = ([x[place] for x in arguments] for place in (1, 3 if recorded else 4))
    args = [arguments[0][0], weights, biases]
    if recorded:
        args.insert(2, arguments[0][2])
    made = tuple(number for call in group for number in call.made)
    target = getattr(torch.ops.icl_patch, several).default
    return replace(first, target=target, args=tuple(args), kwargs={}, made=made, several=True)


def _arguments(call: Call) -> list[Any]:
    """All arguments of a call in their order."""
    names = [argument.name for argument in call.target._schema.arguments]
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    return [given.get(name) for name in names]
