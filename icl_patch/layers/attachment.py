"""The lock of an attached model: passes take turns, and the model's own forward waits for them.

A pass keeps its state in the model's modules while it runs: modes, factors, hooks and replaced
forwards. Only one pass may run at a time, so each pass holds one lock per model. A call of the
model by another thread takes the same lock and waits.

Other threads can still call a part of the model, such as one block, without the lock. The hooks
and forwards of a pass do nothing in another thread, and a patched module waits for the lock.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper, wraps
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel


class Attachment:
    """The lock of one attached model, and everything that detaching has to undo.

    Attributes:
        blocks: the swapped blocks; each has a method ``detach``.
        lock: re-entrant. A pass holds it, and so does a call of the model's forward.
        thread: the identifier of the thread that runs a pass; None outside of a pass.
        forwards: the instance attributes ``forward`` of the model's modules at attach time.
    """

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.lock = threading.RLock()
        self.thread: int | None = None
        self.forwards: dict[nn.Module, Callable[..., Any]] = {}
        self._waiting: list[WaitingForward] = []

    def __getstate__(self) -> dict[str, Any]:
        # a copied model runs passes of its own
        return vars(self) | {"lock": None, "thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock = threading.RLock()

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Within this context no other thread runs a pass or the model's forward."""
        with self.lock:
            before, self.thread = self.thread, threading.get_ident()
            try:
                yield
            finally:
                self.thread = before

    def hold_forwards(self, model: PreTrainedModel) -> None:
        """Make the forwards of the model, and of the models inside it, take the lock."""
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                self._waiting.append(WaitingForward(module, self))
                module.forward = self._waiting[-1]
        self.forwards = {
            part: vars(part)["forward"] for part in model.modules() if "forward" in vars(part)
        }

    def undo(self) -> None:
        """Put everything back; calling it twice is fine. No pass may be running: it does not
        wait.
        """
        while self.blocks:
            self.blocks.pop().detach()
        while self._waiting:
            self._waiting.pop().remove()


class WaitingForward:
    """A model's forward that takes the lock of the attached model.

    ``torch.compile`` traces it without the lock: a compiled model does not look at the modules'
    state when it runs.
    """

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        self._module, self.attachment = module, attachment
        self._had: Callable[..., Any] | None = vars(module).get("forward")
        self._forward: Callable[..., Any] = module.forward
        update_wrapper(self, self._forward)  # transformers looks at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward."""
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        with self.attachment.lock:
            return self._forward(*args, **kwargs)

    def remove(self) -> None:
        """Put the former forward back, unless somebody has replaced this one since."""
        names = vars(self._module)
        if names.get("forward") is self:
            set_forward(self._module, self._had)


def set_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Give one module a forward of its own; None: that of its class."""
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


_Pass = TypeVar("_Pass", bound=Callable[..., Any])


def one_pass(method: _Pass) -> _Pass:
    """Decorate a method of a patcher, or a function of one, as one pass over its model."""

    @wraps(method)
    def waiting(patcher: Any, *args: Any, **kwargs: Any) -> Any:
        with patcher.attachment.one_pass():
            return method(patcher, *args, **kwargs)

    return cast(_Pass, waiting)
