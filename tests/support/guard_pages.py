"""Memory between pages that nobody may touch: an access beyond either end kills the process."""

import ctypes
import faulthandler
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

GUARD = 16 * mmap.PAGESIZE
POISON = 0xFF  # in every byte: NaN as a float, -1 as an integer
_PROT_NONE = 0  # of mprotect
_LIBC = ctypes.CDLL(None)


def between_guards(x: Tensor, *, at_start: bool = False) -> Tensor:
    """A copy of x with the same strides, and the same memory between its elements, that ends at a
    guard page; with ``at_start`` it begins behind one.
    """
    values = memory_of(x)
    room = mmap.PAGESIZE * max(-(-values.nbytes // mmap.PAGESIZE), 1)
    memory = mmap.mmap(-1, GUARD + room + GUARD)
    inside = torch.frombuffer(memory, dtype=torch.uint8, offset=GUARD, count=room).fill_(POISON)
    for guard in (inside.data_ptr() - GUARD, inside.data_ptr() + room):
        assert not _LIBC.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(GUARD), _PROT_NONE)
    taken = inside[: values.nbytes] if at_start else inside[room - values.nbytes :]
    copy = taken.view(x.dtype).copy_(values)
    return copy.as_strided(x.shape, x.stride(), copy.storage_offset())


def memory_of(x: Tensor) -> Tensor:
    """All elements from the first to the last in memory, those between them included."""
    extent = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data.as_strided((extent if x.numel() else 0,), (1,))


def is_poisoned_around(x: Tensor) -> bool:
    """Whether nothing was written next to what :func:`between_guards` gave."""
    inside = torch.tensor([], dtype=torch.uint8).set_(x.untyped_storage())
    start = x.storage_offset() * x.element_size()
    end = start + memory_of(x).nbytes
    return bool((inside[:start] == POISON).all() and (inside[end:] == POISON).all())


def status_of_child(call: Callable[[], object]) -> int:
    """How a process of its own ends that makes the call: 0, or the signal that kills it."""
    if (child := os.fork()) == 0:
        faulthandler.disable()
        status = 1
        try:
            call()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]
