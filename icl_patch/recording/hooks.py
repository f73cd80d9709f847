"""Forward hooks on an attached model, and the check that a patch is right with them.

A hook is part of the model's computation. Some hooks only watch; others add a vector, scale an
output, or treat the rows of a batch differently. The form of a block does not say which. So a
patch of a model with hooks is replayed before it is returned. The replay must give the logits of
the model with its hooks and with the context.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils.hooks import RemovableHandle

from icl_patch.errors import UnsupportedModelError
from icl_patch.layers.attachment import set_forward
from icl_patch.layers.patched_module import with_base

HookIds = tuple[tuple[str, Any], ...]
# transformers installs these when hidden states are first asked for; they stay and change nothing
_CAPTURING = "transformers.utils.output_capturing"
_GLOBAL = "every module (a global hook)"
_SHOWN = 8  # paths in a message


class Hooks:
    """The forward hooks in a model, and the forwards that were replaced after it was attached.

    Hooks on gradients are not included, nor those with which transformers captures outputs.

    Args:
        model: the attached model.
        forwards: :attr:`icl_patch.layers.attachment.Attachment.forwards`.
    """

    def __init__(self, model: nn.Module, forwards: Mapping[nn.Module, Any]) -> None:
        parts = [
            (path, part) for path, module in model.named_modules() for part in with_base(module)
        ]
        self._forwards = [(path, part, forwards.get(part)) for path, part in parts]
        self._hooks = [(_GLOBAL, _global_forward_pre_hooks), (_GLOBAL, _global_forward_hooks)]
        for path, part in parts:
            self._hooks += [(path, part._forward_pre_hooks), (path, part._forward_hooks)]
        self._dicts = [hooks for _, hooks in self._hooks]
        self._next: int | None = None  # the number of the next hook when there was none

    def new(self) -> HookIds:
        """As :meth:`current`, quickly, for every decode step: if there was no hook, it looks again
        when torch has made one since. Hooks that someone puts back without torch are not seen.
        """
        return (
            () if self._next == RemovableHandle.next_id and not self._replaced() else self.current()
        )

    def current(self) -> HookIds:
        """The module's path, and the hook's number or the forward, for each; empty without any."""
        self._next, following = None, RemovableHandle.next_id
        replaced = self._replaced()
        if not any(self._dicts) and not replaced:
            self._next = following
            return ()
        numbers = [
            (path, number)
            for path, hooks in self._hooks
            for number, hook in list(hooks.items())  # another thread may add one meanwhile
            if getattr(hook, "__module__", None) != _CAPTURING
        ]
        return (*numbers, *((path, vars(part).get("forward")) for path, part, _ in replaced))

    def _replaced(self) -> list[tuple[str, nn.Module, Any]]:
        """The modules that have another forward than then."""
        return [x for x in self._forwards if x[1].__dict__.get("forward") is not x[2]]

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Within this context the model has no hooks, and the forwards that it was attached with.

        Raises:
            UnsupportedModelError: there are global hooks, which other models may need.
        """
        if _global_forward_pre_hooks or _global_forward_hooks:
            raise UnsupportedModelError(
                "expected no global forward hooks to replay a patch without logits: it does not"
                " say whether they ran when it was computed. Remove them or compute it again",
            )
        saved = [(hooks, dict(hooks)) for hooks in self._dicts if hooks]
        replaced = [(part, vars(part).get("forward"), was) for _, part, was in self._replaced()]
        try:
            for hooks, _ in saved:
                hooks.clear()
            for part, _, was in replaced:
                set_forward(part, was)
            yield
        finally:
            self._next = None
            for hooks, before in saved:
                hooks.update(before)
            for part, now, _ in replaced:
                set_forward(part, now)


def paths_of(hooks: HookIds) -> str:
    """The modules' paths as text."""
    paths = list(dict.fromkeys(path for path, _ in hooks))
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(path or "the model" for path in paths[:_SHOWN]) + more
