"""PatchedModule: a module of the model, and the factors of a change of its weights.

A patched module takes the base module's place in the model. It shares the base's parameters,
buffers and children under their own names, so the model's state dict, its parameters and
``model.to(...)`` do not notice it.

It is off (the base module, bit for bit), records (a recorder computes the factors from the module's
input and applies them) or replays (the factors that were set are applied).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from inspect import signature
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from icl_patch.layers.attachment import Attachment
from icl_patch.layers.device_hooks import has_accelerate_hooks, run_aligned

_PLAIN_WEIGHTS = (
    "expected a model without an applied patch to take the state dict of, or to save, got one with"
    " it: these are its own weights, without the patch. For weights with it call patch.merge(model)"
    " or `icl-patch apply` with a static patch, PatchedLinear.merge() for one layer"
)


def untouched(module: nn.Module) -> bool:
    """Whether nobody has hooked the module, or all modules, or put another forward there."""
    hooked = has_hooks(module) or _global_forward_hooks or _global_forward_pre_hooks
    return "forward" not in vars(module) and not hooked


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _without_global_hooks(method: Any) -> Any:
    """A method of torch's modules that finds no hooks of all modules."""
    names = vars(torch.nn.modules.module)
    none: dict[str, Any] = {
        name: {} for name in names if name.startswith("_global_") and name.endswith("_hooks")
    }
    return FunctionType(method.__code__, names | none, method.__name__, method.__defaults__)


def matches_rows(change: Tensor, x: Tensor) -> bool:
    """Whether a change is (n,), or one for each row of x (..., n): (..., n), or flat (M, n)."""
    return change.shape in (x.shape, x.shape[-1:], (x.shape[:-1].numel(), x.shape[-1]))


def other_rows(name: str, change: Tensor, x: Tensor, shared: str) -> str:
    """The message for changes that are not of the rows of an input or output x (..., n).

    shared: how to give one change to all rows.
    """
    rows = x.shape[:-1].numel()
    message = (
        f"expected {name} for the {rows} rows of this call, {(*x.shape[:-1], '·')} or flat"
        f" ({rows}, ·), or one for all, {shared}, got {tuple(change.shape)}"
    )
    if change.dim() < 2 or change.shape[:-1].numel() == rows:
        return message
    return (
        f"{message}. A patch of rows is for one call: a prompt (prefill) and each token behind it"
        " (decode) are calls of different rows, so none lasts from one to the other. Set a patch"
        " before each call, or one for all"
    )


def rows_of(x: Tensor) -> Tensor:
    """x (..., n) as rows (M, n); x itself if it is."""
    return x if x.dim() == 2 else x.unsqueeze(0).flatten(0, -2)


def like_rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (M, N) in the leading dimensions of x (..., n); the rows themselves if x has rows."""
    return rows if x.dim() == 2 else rows.reshape(*x.shape[:-1], rows.shape[-1])


class PatchedModule(nn.Module):
    """The common part of the patched modules: the base module and what runs in its place."""

    base_layer: nn.Module
    _replay: Callable[..., Tensor]  # the base module's output with the patch

    _PATCH: ClassVar[tuple[str, ...]] = ()  # the attributes that hold it, None without one
    _INPUTS: ClassVar[tuple[str, ...]] = ("x",)  # the inputs that a patch is defined for

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        if isinstance(base_layer, PatchedModule):
            raise TypeError(
                f"expected a module that is not patched yet, got {type(base_layer).__name__}"
            )
        # The base's own dictionaries: names stay as they were, and code that moves or replaces a
        # parameter does it for both.
        self._parameters, self._buffers, self._modules = (
            base_layer._parameters,
            base_layer._buffers,
            base_layer._modules,
        )
        self._non_persistent_buffers_set = base_layer._non_persistent_buffers_set
        object.__setattr__(self, "base_layer", base_layer)
        self._parameter_names = frozenset(base_layer._parameters)
        self._aligned = has_accelerate_hooks(base_layer)
        self.training, self._version = base_layer.training, base_layer._version
        # called with this module and its inputs in place of the base: a recorder, or _replay
        self.override: Callable[..., Any] | None = None
        # Called with values that are no output: a router's logits, the choice of experts.
        self.observer: Callable[..., None] | None = None
        self.attachment: Attachment | None = None  # the attached model that the module is part of
        self.off()

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            name in vars(self.__dict__.get("base_layer", self))
            and name not in vars(self)
            and not hasattr(type(self), name)
        ):
            setattr(self.base_layer, name, value)  # where it is read
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "base_layer" not in vars(self):  # while it is being copied or unpickled
                raise
            return getattr(self.base_layer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy of an attached model is a plain one: it has the base module."""
        if self.attachment is None:
            return super().__reduce_ex__(protocol)
        self.attachment.check_copy()
        return _itself, (self.base_layer,)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules as torch gives them, and before them a base with adapters, under the same
        name: PEFT looks for it by its class to choose its adapter.
        """
        if hasattr(self.base_layer, "set_adapter"):
            yield prefix, self.base_layer
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def unload_and_optionally_merge_module(self, **_: Any) -> nn.Module:
        """The module itself, which has no adapter: PEFT's ``unload`` and ``merge_and_unload`` ask
        every module.

        Raises:
            ValueError: the base module has adapters.
        """
        if hasattr(self.base_layer, "set_adapter"):
            raise ValueError(
                "expected a model without patched modules to take its adapters away, got a"
                f" {type(self).__name__} around some: detach the patcher, or put the base modules"
                " back, and call it again"
            )
        return self

    def train(self, mode: bool = True) -> "PatchedModule":
        """Set the mode of this module and its base."""
        self.base_layer.train(mode)
        return super().train(mode)

    # A base may save, load and move more than parameters and buffers, such as the scales of a
    # quantised one.

    def _save_to_state_dict(self, *args: Any) -> None:
        if self.override is type(self)._replay:
            warnings.warn(_PLAIN_WEIGHTS, stacklevel=2)  # of one place: told once
        self.base_layer._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.base_layer._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PatchedModule":
        """Factors follow a move to another device; their dtype is their own.

        Raises:
            ValueError: the factors are on the meta device, and have no numbers that could move.
        """
        factors = {name: x for name in self._PATCH if isinstance(x := getattr(self, name), Tensor)}
        devices = {name: fn(x[:0]).device for name, x in factors.items()}
        for name, x in factors.items():
            if x.is_meta and devices[name] != x.device:
                raise ValueError(
                    f"expected a {type(self).__name__} without a patch to leave the meta device,"
                    f" got {name} there, which has no numbers: call clear_patch() before, and set"
                    " the patch again after"
                )
        self.base_layer._apply(fn, recurse)
        for name, x in factors.items():
            setattr(self, name, x.to(devices[name]))
        return self

    def record(self, recorder: Callable[..., Any]) -> None:
        """Hand every input to ``recorder(module, x)``, which keeps the factors and returns the
        output.
        """
        vars(self)["override"] = recorder

    def replay(self, **patch: Any) -> None:
        """Apply a patch, by the names of the attributes that hold it."""
        # past torch's bookkeeping, which would make a parameter among them one of the base's
        vars(self).update(patch, override=type(self)._replay)

    def off(self) -> None:
        """Be the base module again, bit for bit, and drop the patch."""
        vars(self).update(dict.fromkeys(("override", *self._PATCH)))

    def clear_patch(self) -> None:
        """Drop the patch and be the base module again."""
        self.off()

    def runs_plainly(self, x: Tensor) -> bool:
        """Whether only the base class's own forward runs, in x's dtype: no hook, no replaced
        forward and no autocast stand between.
        """
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        return untouched(self.base_layer) and not autocast

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if has_hooks(self):
            return self._call_with_own_hooks(*args, **kwargs)
        return self.forward(*args, **kwargs)

    # global hooks run once, for the base module
    _call_with_own_hooks = _without_global_hooks(nn.Module._call_impl)
    _get_backward_hooks = _without_global_hooks(nn.Module._get_backward_hooks)
    _get_backward_pre_hooks = _without_global_hooks(nn.Module._get_backward_pre_hooks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base module's arguments -> its output."""
        if self._parameter_names.difference(self._parameters):  # as torch 2.11 can compile it
            self._check_parameters()
        if self.override is None and self.observer is None:
            return self.base_layer(*args, **kwargs)
        if kwargs and len(args) + len(kwargs) > 1:  # in the order in which the base takes them
            given = signature(self.base_layer.forward).bind(*args, **kwargs)
            args, kwargs = given.args, given.kwargs
        attachment, compiling = self.attachment, torch.compiler.is_compiling()
        # the pass of another thread ends first; torch.compile traces no locks
        with nullcontext() if attachment is None or compiling else attachment.lock:
            if self._aligned:
                return run_aligned(self.base_layer, self._run, args, kwargs)
            return self._run(*args, **kwargs)

    def _check_parameters(self) -> None:
        """Raises ValueError if the base lacks a parameter, because code that puts something in its
        place, as pruning and parametrizations do, has put it into this module.
        """
        for name in self._parameter_names - self._parameters.keys():
            if not hasattr(self.base_layer, name):
                kind = type(self.base_layer).__name__
                raise ValueError(
                    f"expected a {kind} with its {name}, got one without: prune or parametrize the"
                    " base_layer of a patched module, or the module before it is patched"
                )

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`forward` with a patch, recorder or observer; the inputs may have any names.

        Raises:
            TypeError: they are not those that a patch is defined for.
        """
        inputs = (*args, *kwargs.values())
        if self.observer is not None:
            self._observe(*inputs)
        if self.override is None:
            return self.base_layer(*args, **kwargs)
        if len(inputs) != len(self._INPUTS):
            raise TypeError(
                f"expected a {type(self.base_layer).__name__} that is called with"
                f" {', '.join(self._INPUTS)} alone while it has a patch or a recorder, got"
                f" {len(inputs)} inputs"
            )
        return self.override(self, *inputs)

    def _observe(self, *inputs: Any) -> None:
        """Call the observer with values that are not the module's output."""

    def _replicate_for_data_parallel(self) -> "PatchedModule":
        raise RuntimeError(
            "DataParallel cannot copy patched modules: call icl_patch.detach(model) first"
        )

    def extra_repr(self) -> str:
        """The base module."""
        return f"{type(self.base_layer).__name__}({self.base_layer.extra_repr()})"


def _itself(module: nn.Module) -> nn.Module:
    return module


def with_base(module: nn.Module) -> tuple[nn.Module, ...]:
    """The module, and the base module of a patched one."""
    return (module, module.base_layer) if isinstance(module, PatchedModule) else (module,)
