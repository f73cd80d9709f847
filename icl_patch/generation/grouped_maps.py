"""Linear maps of one input in one operation of a step's program: queries, keys and values, or the
readers of a gated MLP. On CUDA they share a launch.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from icl_patch.generation.operator_recorder import Call, by_name, key_of, tensors_in

# of plain maps and of recorded ones, natively and in Triton
_GROUPS = {
    "icl_patch::patched_linear": "linear_maps",
    "icl_patch::triton_patched_linear": "triton_linear_maps",
    "icl_patch::record_linear": "record_linears",
    "icl_patch::triton_record_linears": "triton_record_linears",
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
    """Equal for maps that one operator can run; None for others."""
    several = _operator(call)
    if several is None:
        return None
    weights, biases, others = _arguments(call)
    known = all(isinstance(x, Tensor) or x is None for x in (*weights, *biases))
    # a patch, or a dtype of the output
    further = others.keys() - {argument.name for argument in several._schema.arguments}
    return None if further or not known else (several, key_of(others))


def _together(group: list[Call]) -> Call:
    """One call of all maps."""
    weights, biases, others = zip(*map(_arguments, group), strict=True)
    given = {**others[0], "weights": [*chain(*weights)], "biases": [*chain(*biases)]}
    target = _operator(group[0])
    assert target is not None
    args = tuple(given[argument.name] for argument in target._schema.arguments)
    made = tuple(number for call in group for number in call.made)
    return Call(target, args, {}, made, several=True)


def _operator(call: Call) -> OpOverload | None:
    """The operator that runs several of these maps."""
    name = _GROUPS.get(call.target._schema.name)
    return None if name is None else getattr(torch.ops.icl_patch, name).default


def _arguments(call: Call) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """The weights and biases of a map, or of several, and the other arguments by name."""
    given = by_name(call.target, call.args, call.kwargs)
    weights = given.pop("weights", None) or [given.pop("weight")]
    biases = given.pop("biases", None) or [given.pop("bias", None)]
    return weights, biases, {name: x for name, x in given.items() if x is not None}
