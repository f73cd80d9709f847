"""How much memory a call takes at once."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NewStorages(TorchDispatchMode):
    """The largest storage, in elements, that an op made which was not one of its arguments'."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.ops = 0

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = function(*args, **kwargs or {})
        trees = ((args, kwargs), out)
        inputs, made = ([x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in trees)
        given = {x.untyped_storage().data_ptr() for x in inputs}
        for x in made:
            if x.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        self.ops += 1
        return out


def largest_of(call: Callable[[], Any]) -> tuple[int, Any]:
    with NewStorages() as storages:
        result = call()
    assert storages.ops > 100  # it does see what happens
    return storages.largest, result
