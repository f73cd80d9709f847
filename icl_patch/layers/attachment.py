"""What attaching puts into a model beside its blocks: one lock, held by every pass, that the
model's own forward waits for.

While a pass runs, its state lies in the model's modules: modes, factors, hooks, other forwards. So
passes over one model take turns, and a call of the model by another thread waits for the pass to
end. What another thread calls beneath the model (a block, say) is not stopped: hooks and forwards
of the pass act in its own thread alone, and a patched module waits.
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
        blocks: the blocks that have been swapped, which know how to detach.
        lock: re-entrant; a pass holds it, and so does a call of the model's forward.
        thread: the identifier of the thread whose pass is running, None outside of a pass.
    """

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.lock = threading.RLock()
        self.thread: int | None = None
        self._forwards: list[WaitingForward] = []

    def __getstate__(self) -> dict[str, Any]:
        # a copy of the model has passes of its own
        return vars(self) | {"lock": None, "thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock = threading.RLock()

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Within this context no other thread runs a pass or the model's forward; it waits for them
        to end.
        """
        with self.lock:
            before, self.thread = self.thread, threading.get_ident()
            try:
                yield
            finally:
                self.thread = before

    def hold_forwards(self, model: PreTrainedModel) -> None:
        """Make the forwards of the model, and of the models within it, wait for passes."""
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                self._forwards.append(WaitingForward(module, self))
                module.forward = self._forwards[-1]

    def undo(self) -> None:
        """Put everything back; twice is fine. It does not wait: no pass may be running."""
        while self.blocks:
            self.blocks.pop().detach()
        while self._forwards:
            self._forwards.pop().remove()


class WaitingForward:
    """A model's forward that waits for another thread's pass to end, and that a pass of another
    thread waits for.

    It does not wait while ``torch.compile`` traces it: what is compiled is the model without a
    pass.
    """

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        self._module, self.attachment = module, attachment
        self._had: Callable[..., Any] | None = vars(module).get("forward")
        self._forward: Callable[..., Any] = module.forward
        update_wrapper(self, self._forward)  # transformers looks at the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own forward returns."""
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        with self.attachment.lock:
            return self._forward(*args, **kwargs)

    def remove(self) -> None:
        """Put back what was there, unless someone has put something else there since."""
        names = vars(self._module)
        if names.get("forward") is not self:
            return
        if self._had is None:
            del names["forward"]
        else:
            names["forward"] = self._had


_Pass = TypeVar("_Pass", bound=Callable[..., Any])


def one_pass(method: _Pass) -> _Pass:
    """A method of a patcher, or a function of one, that is a pass over its model: it waits for
    those of other threads.
    """

    @wraps(method)
    def waiting(patcher: Any, *args: Any, **kwargs: Any) -> Any:
        with patcher.attachment.one_pass():
            return method(patcher, *args, **kwargs)

    return cast(_Pass, waiting)
