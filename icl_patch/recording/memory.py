"""Which memory a tensor lies in; also of fake tensors, which have no address."""

from torch import Tensor


def memory_of(tensor: Tensor) -> int:
    """A number that is equal for tensors in one memory, and differs for others as long as their
    memory is in use.
    """
    number: int = tensor.untyped_storage()._cdata
    return number


def same_place(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one layout are the same numbers in the same memory."""
    return x.storage_offset() == y.storage_offset() and memory_of(x) == memory_of(y)
