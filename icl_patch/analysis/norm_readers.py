"""Which linear maps read a norm's output, and whether anything else does."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from icl_patch.layers.linear import LINEAR
from icl_patch.metrics import linf
from icl_patch.models.trace import first_tensor
from icl_patch.tolerances import rounding_limit


def inputs_of_a_pass(
    model: PreTrainedModel, ids: Tensor, norms: Sequence[str]
) -> tuple[Tensor, dict[str, set[str | None]]]:
    """The logits of a pass, and the inputs of every norm and linear map that ran, each by its path:
    the norm whose output it read, whole rows as the norm left them, or None for any other input.
    """
    inputs: dict[str, set[str | None]] = {}
    outputs: dict[int, tuple[str, Tensor, int]] = {}  # by the address; a tensor keeps it its own

    def note_output(path: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        inputs.setdefault(path, set())
        outputs[output.untyped_storage().data_ptr()] = path, output, output._version

    def note_input(path: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        source = None
        if args and (noted := outputs.get(args[0].untyped_storage().data_ptr())):
            norm, output, version = noted
            rows = args[0].shape[-1:] == output.shape[-1:] and args[0].stride(-1) == 1
            if rows and args[0]._version == version:  # else written to since
                source = norm
        inputs.setdefault(path, set()).add(source)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if path in norms:
                hooks.enter_context(module.register_forward_hook(partial(note_output, path)))
            elif isinstance(module, LINEAR):
                hooks.enter_context(module.register_forward_pre_hook(partial(note_input, path)))
        return model(input_ids=ids, use_cache=False).logits, inputs


@contextmanager
def hidden(model: PreTrainedModel, norm: str, readers: Sequence[str]) -> Iterator[None]:
    """Within this context a norm's output is NaN, except for its readers; so are the parameters of
    the norm and its readers, except within their own forwards.

    Nothing is rounded, so no tolerance is needed, and a NaN does not fade on its way to the logits.
    """
    outputs: dict[int, tuple[Tensor, Tensor]] = {}  # by the address of the NaNs
    ended = False  # then a hook that an interrupt has left does nothing

    def end() -> None:
        nonlocal ended
        ended = True

    def hide_output(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        if ended:
            return output
        output = output.clone(memory_format=torch.contiguous_format)
        nans = torch.full_like(output, math.nan)
        outputs[nans.untyped_storage().data_ptr()] = nans, output
        return nans

    def show_output(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *others = args
        _, output = (x, x) if ended else outputs.get(x.untyped_storage().data_ptr(), (x, x))
        return output.as_strided(x.shape, x.stride(), x.storage_offset()), *others

    def put(module: nn.Module, *_: Any, values: dict[str, nn.Parameter | None]) -> None:
        if not ended:
            module._parameters.update(values)

    with ExitStack() as undo:
        undo.callback(end)
        for path in (norm, *readers):
            module = model.get_submodule(path)
            own = dict(module._parameters)
            nans = {name: x if x is None else _nans_like(x) for name, x in own.items()}
            undo.callback(put, module, values=own)
            put(module, values=nans)
            undo.enter_context(module.register_forward_pre_hook(partial(put, values=own)))
            undo.enter_context(module.register_forward_hook(partial(put, values=nans)))
            if path == norm:
                undo.enter_context(module.register_forward_hook(hide_output))
            else:
                undo.enter_context(module.register_forward_pre_hook(show_output))
        yield


def _nans_like(x: nn.Parameter) -> nn.Parameter:
    """NaNs in the shape of a parameter, in the memory of one number."""
    return nn.Parameter(x.new_full((), math.nan).expand_as(x), requires_grad=False)


@torch.no_grad()
def depends_on_its_sum(reader: nn.Module) -> bool:
    """Whether a class derived from a linear map, such as a router, computes a function of ``W z +
    b``: the same for ``z = x ⊙ s + t`` as for x with ``W diag(s)`` and ``b + W t``. False if it
    does not take one row (1, K) alone.
    """
    first, second = (copy.deepcopy(reader).double() for _ in range(2))
    weight, bias = first._parameters["weight"], first._parameters["bias"]
    assert weight is not None
    transposed, generator = isinstance(reader, Conv1D), torch.Generator().manual_seed(2)
    width = weight.shape[0 if transposed else 1]
    x, s, t = (torch.randn(width, generator=generator).to(weight) for _ in range(3))
    scaled, shift = (weight * s[:, None], t @ weight) if transposed else (weight * s, weight @ t)
    second._parameters["weight"] = nn.Parameter(scaled)
    second._parameters["bias"] = nn.Parameter(shift if bias is None else bias + shift)
    try:
        y, expected = first.forward((x * s + t)[None]), second.forward(x[None])
    except (TypeError, IndexError, RuntimeError, ValueError):  # other inputs, or of another shape
        return False
    y, expected = first_tensor(y), first_tensor(expected)
    if y is None or expected is None:
        return False
    return bool((linf(y, expected) <= rounding_limit(weight.dtype)).all())
