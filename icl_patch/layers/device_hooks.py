"""accelerate's hooks, which bring a module's inputs and its offloaded weights to a device.

``device_map``, ``cpu_offload`` and ``disk_offload`` replace the forwards of modules. The new
forward moves the inputs to the module's device, loads weights that are offloaded, runs the old
one, and drops the weights again: between two forwards they are on the device meta. A patched
module has products of its own, so it runs inside the hooks of its base module, where the weights
are those of a model on one device. accelerate itself is not imported.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from icl_patch.errors import UnsupportedModelError

_BEFORE = "_icl_patch_hooked_forward"  # accelerate's forward while it is taken away


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """The hooks of a module, or of the base of a patched one, that align devices; none if it has
    another kind among them.
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return ()
    hooks = tuple(getattr(hook, "hooks", (hook,)))
    return hooks if all(type(part).__name__ == "AlignDevicesHook" for part in hooks) else ()


def has_accelerate_hooks(module: nn.Module) -> bool:
    """Whether accelerate aligns the devices of the module, or of one inside it."""
    return any(hooks_of(part) for part in module.modules())


def device_of(module: nn.Module) -> torch.device:
    """The device that a module, or the first one inside it, runs on."""
    first = next((x for x in (*module.parameters(), *module.buffers()) if not x.is_meta), None)
    for part in module.modules() if first is None or has_accelerate_hooks(module) else ():
        for hook in hooks_of(part):
            if hook.execution_device is not None:
                return torch.device(hook.execution_device)
    return torch.device("meta") if first is None else first.device


def input_device(model: nn.Module) -> torch.device:
    """The device that a model takes its token ids on."""
    first = next(model.parameters()).device
    return device_of(model) if first.type == "meta" else first


def run_aligned(
    module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``run(*args, **kwargs)`` as the forward of ``module`` inside its hooks: with its inputs and
    weights, and those of the modules inside it, on the device that it runs on.

    Meanwhile the modules' forwards are those that accelerate replaced.
    """
    entered: list[nn.Module] = []
    out = None
    try:
        for part in module.modules():
            if "_hf_hook" in vars(part) and hooks_of(part):  # a patched one inside does it itself
                entered.append(part)
                if part is module:
                    args, kwargs = part._hf_hook.pre_forward(part, *args, **kwargs)  # type: ignore[union-attr,operator]
                else:
                    part._hf_hook.pre_forward(part)  # type: ignore[union-attr,operator]
                _take_away(part)
        out = run(*args, **kwargs)
    finally:
        for part in reversed(entered):
            put_back(part)
            result = part._hf_hook.post_forward(part, out if part is module else None)  # type: ignore[union-attr,operator]
            out = result if part is module else out
    return out


def _take_away(module: nn.Module) -> None:
    """Give the module the forward that accelerate replaced."""
    names = vars(module)
    forward = names.get("forward")
    if not is_accelerates(forward):
        return  # somebody has replaced it
    names[_BEFORE] = forward
    if (beneath := forward_beneath(module)) is None:
        del names["forward"]
    else:
        names["forward"] = beneath


def forward_beneath(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that accelerate has replaced; None for that of the module's class."""
    forward = vars(module).get("_old_forward")
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def is_accelerates(forward: object) -> bool:
    """Whether a module's forward is the one that accelerate has put there."""
    return isinstance(forward, partial) and forward.func.__module__ == "accelerate.hooks"


def put_back(module: nn.Module) -> None:
    """Undo :func:`_take_away`, if it has been done."""
    if (forward := vars(module).get(_BEFORE)) is not None:
        vars(module)["forward"] = forward
        del vars(module)[_BEFORE]


def offloaded(model: nn.Module, name: str) -> Callable[[], Tensor] | None:
    """A function that reads the parameter or buffer ``name`` of a model from where it is offloaded
    to, on the CPU; None if it is not offloaded.
    """
    path, _, rest = name.rpartition(".")
    while True:
        for hook in hooks_of(model.get_submodule(path)):
            if hook.offload and isinstance(hook.weights_map, Mapping):
                return partial(hook.weights_map.__getitem__, rest)
        if not path:
            return None
        path, _, parent = path.rpartition(".")
        rest = f"{parent}.{rest}"


def weight_of(module: nn.Module, name: str = "weight") -> Tensor:
    """A parameter of a module as its forward sees it; one that is offloaded is read.

    Raises:
        UnsupportedModelError: it is on the device meta, and was not offloaded by accelerate.
    """
    weight: Tensor = getattr(module, name)
    if not weight.is_meta:
        return weight
    read = offloaded(module, name)
    if read is None:
        raise UnsupportedModelError(
            f"expected the {name} of {type(module).__name__} in memory or offloaded by accelerate,"
            " got one on the device meta: load the model's weights"
        )
    return read().to(device_of(module), weight.dtype)
