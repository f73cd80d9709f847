"""Overriding a module's forward for one pass: for an instance alone, undone by taking it away, and
cheaper than a hook.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from icl_patch import ops
from icl_patch.layers.attachment import Forward, PassForward, take_ended
from icl_patch.layers.device_hooks import hooks_of, run_aligned
from icl_patch.layers.patched_module import (
    like_rows_of,
    rows_of,
    untouched,
)
from icl_patch.models.block_spec import Block


def overridable(module: nn.Module) -> bool:
    """Whether the module's forward is its class's own, and not one that somebody else put there."""
    return "forward" not in vars(module)


@dataclass(eq=False)
class FusedModule:
    """A module's forward in fewer launches, ``run``, for a call with one input, of the width and
    dtype of the module's own weight; other calls run the forward of its class. Both run inside
    accelerate's hooks.
    """

    module: Any
    run: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        self._aligned = bool(hooks_of(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        if self._aligned:
            return run_aligned(self.module, self._call, args, kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            x, weight = args[0], self.module._parameters.get("weight")
            if weight is None or (x.dtype == weight.dtype and x.shape[-1:] == weight.shape):
                return self.run(x)
        return type(self.module).forward(self.module, *args, **kwargs)


class ForwardOverrides:
    """Within ``with`` each module runs the paired function as its forward, in this thread.

    Other threads, and this one afterwards, run the forward that was there before. Contexts of
    several threads may end in any order. The functions are made once and entered at every token:
    made anew, they would be most of a step's garbage, and a collection takes as long as many steps.
    Not to be entered within itself. A copy of a module has none of it.
    """

    def __init__(self, forwards: Iterable[tuple[nn.Module, Forward]]) -> None:
        self._thread = [0]
        self._forwards = [PassForward(module, run, self._thread) for module, run in forwards]

    def __enter__(self) -> None:
        self._thread[0] = threading.get_ident()
        try:
            for forward in self._forwards:
                forward.put()
        except BaseException:  # an interrupt
            self._restore()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        except BaseException:  # an interrupt
            self._restore()
            raise

    def _restore(self) -> None:
        """Let the modules run the forwards from before: it may be called again at any place."""
        self._thread[0] = 0
        for forward in self._forwards:
            take_ended(forward.module)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is a linear map of torch's own that nobody has touched: one that
    :func:`icl_patch.ops.patched_linear` replaces.
    """
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and untouched(module)


def linear_forward(module: nn.Linear) -> Forward:
    """A forward of a linear map through our ops, which read the weights once for the few rows of a
    decode step.

    Under autocast it is the module's own, in the dtype that autocast says.
    """

    def forward(x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return type(module).forward(module, x)
        return like_rows_of(x, ops.patched_linear(rows_of(x), module.weight, bias=module.bias))

    return forward


def plain_linears(model: nn.Module, blocks: Iterable[Block]) -> list[nn.Linear]:
    """The linear maps in these blocks that are not patched ones."""
    modules = (model.get_submodule(block.path).modules() for block in blocks)
    return [module for module in chain.from_iterable(modules) if is_plain_linear(module)]
