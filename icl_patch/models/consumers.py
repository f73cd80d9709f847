"""The readers of a norm's output, found by watching one pass of the model instead of by a table of
families.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

LINEAR = (nn.Linear, Conv1D)


@dataclass
class Consumers:
    """The observed readers of one norm's output.

    Attributes:
        calls: how often the norm ran.
        linear: paths of the linear maps that took the output as their input, in order.
        elsewhere: every other reader, in words.
    """

    calls: int = 0
    linear: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


class _Watch(TorchFunctionMode):
    """Follows the outputs of norms through views to the operations that read them."""

    def __init__(self, found: dict[str, Consumers]) -> None:
        super().__init__()
        self.found = found
        self.inside: list[str] = []  # paths of the modules that are running
        # for each, whether it is a linear map: operations inside one are not readers of their own
        self.reading: list[bool] = []
        self.source: dict[int, str] = {}
        self.alive: list[Tensor] = []  # an id is good only as long as its tensor lives
        self.foreign: set[str] = set()  # linear maps that ran on something else too

    def follow(self, tensor: Tensor, norm: str) -> None:
        self.source[id(tensor)] = norm
        self.alive.append(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources = (
            []
            if any(self.reading)
            else [t for t in _tensors((args, kwargs)) if id(t) in self.source]
        )
        versions = [tensor._version for tensor in sources]
        result = func(*args, **kwargs)
        made = list(_tensors(result))
        if not sources or not made:
            return result
        unchanged = [tensor._version for tensor in sources] == versions
        for tensor in sources:
            norm = self.source[id(tensor)]
            if unchanged and all(_is_view(view, tensor) for view in made):
                for view in made:
                    self.follow(view, norm)
            else:
                where = self.inside[-1] if self.inside else "the model"
                self.found[norm].elsewhere.append(
                    f"{getattr(func, '__name__', str(func))} in {where or 'the model'}"
                )
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for item in value:
            yield from _tensors(item)


def _is_view(view: Tensor, tensor: Tensor) -> bool:
    """Whether ``view`` holds rows of ``tensor`` as they are."""
    if view is tensor:
        return True
    same_storage = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return (
        same_storage
        and view.dtype == tensor.dtype
        and view.shape[-1:] == tensor.shape[-1:]
        and view.stride(-1) == tensor.stride(-1) == 1
    )


@contextmanager
def watch_consumers(model: nn.Module, norms: Iterable[str]) -> Iterator[dict[str, Consumers]]:
    """Within this context passes of ``model`` record the operations that read the outputs of
    ``norms``.

    A view that keeps the rows whole (``view``, a slice of the tokens) is followed. All other
    operations on an output, outside of linear maps, are named in :attr:`Consumers.elsewhere`: a
    residual sum, a rotation of queries, a gather of experts. So is a linear map that ran on another
    input as well.

    Args:
        norms: paths of modules of the model.

    Yields:
        :class:`Consumers` by path, complete when the block is left.
    """
    found = {path: Consumers() for path in norms}
    watch = _Watch(found)
    handles: list[Any] = []

    def enter(path: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, args: tuple) -> None:
            watch.inside.append(path)
            linear = isinstance(module, LINEAR)
            if linear and not any(watch.reading):
                norm = watch.source.get(id(args[0])) if args else None
                if norm is None:
                    watch.foreign.add(path)
                elif path not in found[norm].linear:
                    found[norm].linear.append(path)
            watch.reading.append(linear)

        return hook

    def leave(path: str) -> Any:
        def hook(_module: nn.Module, _args: tuple, output: Any) -> None:
            watch.inside.pop()
            watch.reading.pop()
            if path in found:
                found[path].calls += 1
                watch.follow(output, path)

        return hook

    try:
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path, module)))
            handles.append(module.register_forward_hook(leave(path)))
        with watch:
            yield found
    finally:
        for handle in handles:
            handle.remove()
    for path, readers in found.items():
        for reader in readers.linear:
            others = [
                other for other, seen in found.items() if other != path and reader in seen.linear
            ]
            if reader in watch.foreign or others:
                readers.elsewhere.append(
                    f"{reader}, which also reads {others[0] if others else 'something else'}"
                )
