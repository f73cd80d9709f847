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
from functools import partial, update_wrapper, wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from icl_patch.layers.device_hooks import put_back

_NO_COPY = (
    "expected a copy of the model outside of the patcher's own passes and of `with"
    " patcher.applied(...)`, got one within: copy the model before or afterwards"
)


class Attachment:
    """The lock of one attached model, and everything that detaching has to undo.

    Attributes:
        blocks: the swapped blocks; each has a method ``detach``.
        lock: re-entrant. A pass holds it, and so does a call of the model's forward.
        thread: the identifier of the thread that runs a pass; None outside of a pass.
        applied: whether one token's patch is applied to all tokens just now.
        forwards: the instance attributes ``forward`` of the model's modules at attach time.
    """

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.lock = threading.RLock()
        self.thread: int | None = None
        self.applied = False
        self._unfinished = False  # whether a pass has begun and neither ended nor been cleared away
        self._model: nn.Module | None = None
        self.forwards: dict[nn.Module, Callable[..., Any]] = {}
        self._waiting: list[WaitingForward] = []

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within this context no other thread runs a pass or the model's forward.

        An interrupt may come while a pass removes its hooks and factors from the model. The rest is
        removed at once, or at the latest before the next pass or call of the model.
        """
        with self.turn():
            before, ended = self.thread, False
            self._unfinished = True
            try:
                self.thread = threading.get_ident()
                yield
                ended = True
            finally:
                self.thread = before
                if before is None:
                    if not ended:
                        self._clear()
                    self._unfinished = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within this context this thread holds the lock, and no pass of another time has left
        anything in the model.
        """
        held = self._is_held()
        with self.lock:
            if not held:
                self.thread = None
                if self._unfinished:
                    self._clear()
                    self._unfinished = False
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
        held: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return held

    def _clear(self) -> None:
        """Take the factors, hooks and forwards of a pass out of the model."""
        if self._model is None or self.applied:
            return
        for block in self.blocks:
            block.off()
        for module in self._model.modules():
            for part in (module, vars(module).get("base_layer")):
                if part is not None:
                    _clear_hooks(part)
                    put_back(part)
                    # the model's own is no pass's, but that of batch_invariant
                    while part is not self._model and _is_of_a_pass(vars(part).get("forward")):
                        set_forward(part, _forward_before(part))

    def hold_forwards(self, model: PreTrainedModel) -> None:
        """Make the forwards of the model, and of the models inside it, take the lock."""
        self._model = model
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                self._waiting.append(WaitingForward(module, self))
                set_forward(module, self._waiting[-1])
        self.forwards = {
            part: vars(part)["forward"] for part in model.modules() if "forward" in vars(part)
        }

    def undo(self) -> None:
        """Put everything back; calling it twice is fine. No pass may be running: it does not
        wait.
        """
        if self._unfinished:
            self._clear()
        while self.blocks:
            self.blocks.pop().detach()
        while self._waiting:
            self._waiting.pop().remove()


class PassHook:
    """A hook of a pass, which runs in the thread of the pass only; outside of one, in all threads.

    A module that has one cannot be copied: the copy would keep it.
    """

    of_a_pass = True

    def __init__(self, hook: Callable[..., Any], thread: int | None) -> None:
        self._hook, self._thread = hook, thread

    def __call__(self, *args: Any) -> Any:
        """Call the hook, unless this is another thread."""
        own = self._thread is None or self._thread == threading.get_ident()
        return self._hook(*args) if own else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(_NO_COPY)


class WaitingForward:
    """A model's forward that takes the lock of the attached model.

    ``torch.compile`` traces it without the lock: a compiled model does not look at the modules'
    state when it runs.
    """

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        self._module, self.attachment = module, attachment
        self.before: Callable[..., Any] | None = vars(module).get("forward")
        self._forward: Callable[..., Any] = module.forward
        update_wrapper(self, self._forward)  # transformers looks at the signature
        self.reduce_ex = partial(_reduce_ex, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward."""
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        with self.attachment.turn():
            return self._forward(*args, **kwargs)

    def remove(self) -> None:
        """Put the former forward back, unless somebody has replaced this one since."""
        forward = vars(self._module).get("forward")
        set_forward(self._module, self.before if forward is self else forward)


def set_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Give one module a forward of its own; None: that of its class.

    A forward of ours would run this module in a copy of it too. So a copy gets the forward from
    before: copy, deepcopy and pickle look for ``__reduce_ex__`` in the instance first.
    """
    names, reduce_ex = vars(module), getattr(forward, "reduce_ex", None)
    if forward is None:
        names.pop("forward", None)
    else:
        names["forward"] = forward
    if reduce_ex is None:
        names.pop("__reduce_ex__", None)
    else:
        names["__reduce_ex__"] = reduce_ex


def _reduce_ex(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """``module.__reduce_ex__(protocol)`` without the forwards that are ours."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    make, args, state, *rest = reduced
    state = {k: x for k, x in state.items() if k not in ("forward", "__reduce_ex__")}
    forward = below_passes(module)
    if isinstance(forward, WaitingForward):
        forward = forward.before
    return make, args, state if forward is None else state | {"forward": forward}, *rest


def forward_of_a_pass(forward: Callable[..., Any], module: nn.Module, others: list[Any]) -> None:
    """Mark a forward that a pass puts into a module, with a list of the one that was there."""
    vars(forward).update(of_a_pass=others, reduce_ex=partial(_reduce_ex, module))


def _is_of_a_pass(function: Any) -> bool:
    return hasattr(function, "of_a_pass")


def below_passes(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that the module has outside of passes, of all threads; None for its class's."""
    forward: Any = vars(module).get("forward")
    while _is_of_a_pass(forward):
        (forward,) = forward.of_a_pass
    return unless_of_class(module, forward)


def turn_of(model: nn.Module) -> AbstractContextManager[Any]:
    """A context that no other thread has at once: of an attached model that of its passes."""
    forward = below_passes(model)
    if isinstance(forward, WaitingForward):
        return forward.attachment.turn()
    return _turns.setdefault(model, threading.RLock())


_turns: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # of models without a patcher


def unless_of_class(
    module: nn.Module, forward: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    """A forward of the module; None if it is that of its class."""
    of_class = getattr(forward, "__func__", None) is type(module).forward
    return None if of_class and getattr(forward, "__self__", None) is module else forward


def _forward_before(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that the module had before a pass put its own there; None for its class's."""
    (before,) = vars(module)["forward"].of_a_pass
    return unless_of_class(module, before)


def _clear_hooks(module: nn.Module) -> None:
    for hooks, marks in (
        (module._forward_hooks, module._forward_hooks_with_kwargs),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    ):
        for number in [number for number, hook in hooks.items() if _is_of_a_pass(hook)]:
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
