"""The lock of an attached model: passes take turns, and the model's own forward waits for them.

A pass keeps its state in the model's modules while it runs: modes, factors, hooks and replaced
forwards. Only one pass may run at a time, so each pass holds one lock per model. A call of the
model by another thread takes the same lock and waits.

Other threads can still call a part of the model, such as one block, without the lock. The hooks
and forwards of a pass do nothing in another thread, and a patched module waits for the lock.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from icl_patch.layers.device_hooks import put_back

Forward = Callable[..., Any]
_NO_COPY = (
    "expected a copy of the model outside of the patcher's own passes and of `with"
    " patcher.applied(...)`, got one within: copy the model before or afterwards"
)


class Attachment:
    """The lock of one attached model, and everything that detaching has to undo.

    The forwards of the model, and of the models inside it, take the lock.

    Attributes:
        blocks: the swapped blocks; each has a method ``detach``.
        lock: re-entrant. A pass holds it, and so does a call of the model's forward.
        thread: the identifier of the thread that runs a pass, or whose pass an interrupt ended
            before it was cleared away; None outside of a pass.
        applied: whether one token's patch is applied to all tokens just now.
        forwards: the instance attributes ``forward`` of the model's modules at attach time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.blocks: list[Any] = []
        self.lock = threading.RLock()
        self.thread: int | None = None
        self.applied = False
        self._model = model
        self._waiting = [
            WaitingForward(part, self)
            for part in model.modules()
            if isinstance(part, PreTrainedModel)
        ]
        self.forwards: dict[nn.Module, Forward] = {
            part: vars(part)["forward"] for part in model.modules() if "forward" in vars(part)
        }

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within this context no other thread runs a pass or the model's forward.

        An interrupt may come while a pass removes its hooks and factors from the model. The rest is
        removed at once, or at the latest before the next pass or call of the model.
        """
        with self.turn():
            before, ended = self.thread, False
            try:
                self.thread = threading.get_ident()
                yield
                ended = True
            finally:
                if before is None and not ended:
                    self._clear()
                self.thread = before

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within this context this thread holds the lock, and no pass of another time has left
        anything in the model.
        """
        held = self._is_held()
        with self.lock:
            if not held and self.thread is not None:
                self._clear()
                self.thread = None
            yield

    def check_outside(self) -> None:
        """Raises ValueError within a pass of this thread, as in a forward hook."""
        if self._is_held() and self.thread == threading.get_ident():
            raise ValueError(
                "expected a call outside of the patcher's own passes, got one from within a pass,"
                " as from a forward hook: let the hook keep its values, and call afterwards"
            )

    def check_copy(self) -> None:
        """Raises ValueError while a pass or an applied patch has factors and hooks in the model,
        which a copy would keep.
        """
        if self.applied or self.thread is not None:
            raise ValueError(_NO_COPY)

    def _is_held(self) -> bool:
        """Whether this thread holds the lock. An interrupt may make a pass's own notes wrong, but
        never this.
        """
        return self.lock._is_owned()  # type: ignore[attr-defined]

    def _clear(self) -> None:
        """Take the factors, hooks and forwards of a pass out of the model."""
        if self.applied:
            return
        for block in self.blocks:
            block.off()
        for module in self._model.modules():
            for part in (module, vars(module).get("base_layer")):
                if part is not None:
                    _clear_hooks(part)
                    put_back(part)
                    if part is not self._model:  # its own is no pass's, but batch_invariant's
                        end_passes(part)

    def undo(self) -> None:
        """Put everything back; calling it twice is fine. No pass may be running: it does not
        wait.
        """
        if self.thread is not None:
            self._clear()
        while self.blocks:
            self.blocks.pop().detach()
        while self._waiting:
            self._waiting.pop().remove()


class PassHook:
    """A hook of a pass, which runs in the thread of the pass only; outside of one, in all threads.

    A module that has one cannot be copied: the copy would keep it.
    """

    def __init__(self, hook: Callable[..., Any], thread: int | None) -> None:
        self._hook, self._thread = hook, thread

    def __call__(self, *args: Any) -> Any:
        """Call the hook, unless this is another thread."""
        own = self._thread is None or self._thread == threading.get_ident()
        return self._hook(*args) if own else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(_NO_COPY)


class InstanceForward:
    """A forward that icl-patch gives to one module, on top of the one that the module had.

    A copy of the module gets the forward from before: one of ours would run this module in the
    copy too.

    Attributes:
        module: the module.
        before: its instance attribute ``forward`` from before; None if it had its class's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._remember()

    def _remember(self) -> None:
        self.before: Forward | None = vars(self.module).get("forward")
        self.__wrapped__ = self.module.forward  # inspect.signature looks there


class WaitingForward(InstanceForward):
    """A model's forward that takes the lock of the attached model.

    ``torch.compile`` traces it without the lock: a compiled model does not look at the modules'
    state when it runs.
    """

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        super().__init__(module)
        self.attachment = attachment
        set_forward(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward."""
        if torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        with self.attachment.turn():
            return self.__wrapped__(*args, **kwargs)

    def remove(self) -> None:
        """Put the former forward back, unless somebody has replaced this one since."""
        forward = vars(self.module).get("forward")
        set_forward(self.module, self.before if forward is self else forward)


class PassForward(InstanceForward):
    """A forward that a module has in one thread; in all others, and after its end, the module runs
    the one from before.

    Args:
        module: the module. forward: what it runs.
        thread: a list of the thread's identifier, of 0 outside of the pass.
    """

    def __init__(self, module: nn.Module, forward: Forward, thread: list[int]) -> None:
        super().__init__(module)
        self._forward, self.thread = forward, thread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward, or the one from before."""
        own = threading.get_ident() == self.thread[0]
        return (self._forward if own else self.__wrapped__)(*args, **kwargs)

    def put(self) -> None:
        """Give it to the module, unless it lies below another one there since it ended last."""
        if self not in our_forwards(self.module):
            self._remember()
            set_forward(self.module, self)


def our_forwards(module: nn.Module) -> Iterator[InstanceForward]:
    """The forwards of ours that a module has on top of each other and of its own, the last one
    first.
    """
    forward = vars(module).get("forward")
    while isinstance(forward, InstanceForward):
        yield forward
        forward = forward.before


def forward_of_others(module: nn.Module) -> Forward | None:
    """The forward that other code has given to the module; None for its class's."""
    forward = vars(module).get("forward")
    for ours in our_forwards(module):
        forward = ours.before
    return forward


def take_ended(module: nn.Module) -> None:
    """Take away the forwards of passes that have ended; one below another's stays until that one
    has ended too.
    """
    for forward in our_forwards(module):
        if not isinstance(forward, PassForward) or forward.thread[0]:
            return
        set_forward(module, forward.before)


def end_passes(module: nn.Module) -> None:
    """Take away the forwards of passes whose end an interrupt has kept from them."""
    for forward in our_forwards(module):
        if isinstance(forward, PassForward):
            forward.thread[0] = 0
    take_ended(module)


def set_forward(module: nn.Module, forward: Forward | None) -> None:
    """Give one module a forward of its own; None: that of its class."""
    names = vars(module)
    if forward is None:
        names.pop("forward", None)
    else:
        names["forward"] = forward
    # copy, deepcopy and pickle look for it in the instance first
    if isinstance(forward, InstanceForward):
        names["__reduce_ex__"] = partial(_reduce_ex, module)
    else:
        names.pop("__reduce_ex__", None)


def _reduce_ex(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """``module.__reduce_ex__(protocol)`` without the forwards that are ours."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    make, args, state, *rest = reduced
    state = {k: x for k, x in state.items() if k not in ("forward", "__reduce_ex__")}
    forward = forward_of_others(module)
    return make, args, state if forward is None else state | {"forward": forward}, *rest


def turn_of(model: nn.Module) -> AbstractContextManager[Any]:
    """A context that no other thread has at once: of an attached model that of its passes."""
    for forward in our_forwards(model):
        if isinstance(forward, WaitingForward):
            return forward.attachment.turn()
    return _turns.setdefault(model, threading.RLock())


_turns: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # of models without a patcher


def _clear_hooks(module: nn.Module) -> None:
    for hooks, marks in (
        (module._forward_hooks, module._forward_hooks_with_kwargs),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    ):
        for number in [number for number, hook in hooks.items() if isinstance(hook, PassHook)]:
            del hooks[number]
        for number in set(marks) - set(hooks):  # which of them take keyword arguments
            del marks[number]


_Pass = TypeVar("_Pass", bound=Callable[..., Any])


def as_pass(method: _Pass) -> _Pass:
    """Decorate a method of a patcher, or a function of one, as a pass over its model.

    It records no gradients, and leaves inference mode: caches are written later, in that mode or
    outside.
    """

    @wraps(method)
    def waiting(patcher: Any, *args: Any, **kwargs: Any) -> Any:
        with patcher.attachment.exclusive(), torch.inference_mode(False), torch.no_grad():
            return method(patcher, *args, **kwargs)

    return cast(_Pass, waiting)
