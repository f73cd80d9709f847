"""Patched modules: the module that was there, a mode, and the factors of a change of its weights.

A patched module takes the base module's place in the model. It shares the base's parameters,
buffers and children under their own names, so the model's state dict, its parameters and
``model.to(...)`` do not notice it.

Three modes: ``off`` (the base module, bit for bit), ``record`` (a recorder computes the factors
from what passes through and applies them) and ``replay`` (the given factors are applied).
"""

import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

from torch import Tensor, nn

from icl_patch.layers.attachment import Attachment


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody has hooked the module: its forward, or its gradients."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class Mode(Enum):
    """What a patched module does with its input."""

    OFF = "off"
    RECORD = "record"
    REPLAY = "replay"


class PatchedModule(nn.Module):
    """What the patched modules have in common: the base module, the mode and the recorder."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        if isinstance(base_layer, PatchedModule):
            raise TypeError(
                f"expected a module that is not patched yet, got {type(base_layer).__name__}"
            )
        # The base's own dictionaries: names stay as they were, and whatever moves or replaces a
        # parameter does it for both.
        self._parameters, self._buffers, self._modules = (
            base_layer._parameters,
            base_layer._buffers,
            base_layer._modules,
        )
        self._non_persistent_buffers_set = base_layer._non_persistent_buffers_set
        object.__setattr__(self, "base_layer", base_layer)
        self.training, self._version = base_layer.training, base_layer._version
        self.mode = Mode.OFF
        self.recorder: Callable[..., Tensor] | None = None
        # of what is no output of the module's: a router's logits, the choice of experts
        self.observer: Callable[..., None] | None = None
        self.attachment: Attachment | None = None  # that the module is part of

    base_layer: nn.Module
    _replay: Callable[..., Tensor]  # what the base module makes of its input with the patch

    _FACTORS: ClassVar[tuple[str, ...]] = ()  # the attributes that hold them
    _STATE: ClassVar[frozenset[str]] = frozenset(("mode", "recorder", "observer"))

    def __setattr__(self, name: str, value: Any) -> None:
        # past torch's bookkeeping of parameters and modules: a decode step sets hundreds of these
        if name in self._STATE:
            object.__setattr__(self, name, value)
        elif (
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

    def train(self, mode: bool = True) -> "PatchedModule":
        """Set the mode of this module and its base."""
        self.base_layer.train(mode)
        return super().train(mode)

    # What a base saves, loads and moves beside its parameters and buffers (a quantised one's
    # scales, say) goes with them.

    def _save_to_state_dict(self, *args: Any) -> None:
        self.base_layer._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.base_layer._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PatchedModule":
        """Factors follow a move to another device; their dtype is their own."""
        self.base_layer._apply(fn, recurse)
        for name in self._FACTORS:
            factor = getattr(self, name)
            if factor is not None:
                setattr(self, name, factor.to(fn(factor[:0]).device))
        return self

    def record(self, recorder: Callable[..., Tensor]) -> None:
        """Hand every input to ``recorder(module, x)``, which sets the factors and returns the
        output.
        """
        self.recorder, self.mode = recorder, Mode.RECORD

    def off(self) -> None:
        """Be the base module again, bit for bit; the factors are dropped."""
        self.recorder, self.mode = None, Mode.OFF

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the base module is called with -> what it returns."""
        if self.mode is Mode.OFF and self.observer is None:
            return self.base_layer(*args, **kwargs)
        attachment = self.attachment
        if attachment is None or attachment.thread == threading.get_ident():
            return self._run(*args, **kwargs)
        with attachment.lock:  # the pass of another thread ends first
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`forward` in the mode that is set; a patch takes one input, under any name."""
        if self.mode is Mode.OFF:
            return self.base_layer(*args, **kwargs)
        if len(args) + len(kwargs) != 1:
            raise TypeError(
                f"expected one input in a patched {type(self.base_layer).__name__}, got"
                f" {len(args) + len(kwargs)}"
            )
        (x,) = (*args, *kwargs.values())
        if self.mode is Mode.RECORD:
            assert self.recorder is not None
            return self.recorder(self, x)
        return self._replay(x)

    def _replicate_for_data_parallel(self) -> "PatchedModule":
        raise RuntimeError(
            "expected a model without patched modules in DataParallel, which cannot copy them: call"
            " icl_patch.detach first"
        )

    def extra_repr(self) -> str:
        """The base module and the mode."""
        return (
            f"{type(self.base_layer).__name__}({self.base_layer.extra_repr()}),"
            f" mode={self.mode.value}"
        )
