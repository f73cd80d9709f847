"""A decode step's program as a CUDA graph, for which the GPU does not wait for the host."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from icl_patch.recording.memory import memory_of

_ALIGNMENT = 16  # bytes, which kernels are specialised on


class CapturedStep:
    """A program as a CUDA graph. The first call runs the program once, which creates what is
    created at first use, and captures it.

    A graph writes into the same memory at every call. So its last operators gather the output in
    one tensor, and each call returns a copy of this: an output outlives later steps.

    Args:
        program: the program; it neither reads numbers on the host nor copies from there.
        device: the CUDA device that it runs on.
    """

    def __init__(self, program: Callable[[], Sequence[Tensor]], device: torch.device) -> None:
        self._program, self._device = program, device
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        """Run the current token; returns what the program does."""
        with torch.cuda.device(self._device):  # streams and graphs are the current one's
            if self._graph is None:
                self._graph = self._captured()
            self._graph.replay()
            copy = self._gathered.clone()
        return tuple(place.tensor_in(copy) for place in self._places)

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._program()
        torch.cuda.current_stream().wait_stream(stream)
        # another thread may allocate memory meanwhile, or capture a graph of its own
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._gathered, self._places = _gathered(self._program())
        return graph


class _Place(NamedTuple):
    """Where a tensor lies in one of bytes."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor_in(self, gathered: Tensor) -> Tensor:
        """The tensor, in these bytes."""
        typed = gathered.view(self.dtype)
        return typed.as_strided(self.shape, self.stride, self.start // self.dtype.itemsize)


def _gathered(tensors: Sequence[Tensor]) -> tuple[Tensor, list[_Place]]:
    """One tensor of bytes with a copy of the memory of all of these, and their places in it."""
    memories: dict[int, Tensor] = {}
    starts, places, size = {}, [], 0
    for x in tensors:
        memory = memory_of(x)
        if memory not in memories:
            whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
            memories[memory] = whole.view(torch.uint8)
            starts[memory] = size
            size += -(-len(memories[memory]) // _ALIGNMENT) * _ALIGNMENT
        start = starts[memory] + int(x.storage_offset()) * x.itemsize
        places.append(_Place(start, x.dtype, tuple(x.shape), x.stride()))
    gathered = tensors[0].new_empty(size, dtype=torch.uint8)
    copies = [gathered[starts[memory] :][: len(x)] for memory, x in memories.items()]
    torch._foreach_copy_(copies, [*memories.values()])
    return gathered, places
