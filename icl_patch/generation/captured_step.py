"""A decode step as a CUDA graph, for which the GPU does not wait for the host."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from icl_patch.generation.decode_step import RunStep, StepOutput
from icl_patch.recording.memory import memory_of

_ALIGNMENT = 16  # bytes, which kernels are specialised on


class CapturedStep:
    """A step as a CUDA graph. The first call runs the step once, which creates what is created at
    first use, and captures it.

    A graph writes into the same memory at every call. So its last operators gather the output in
    one tensor, and each call returns a copy of this: an output outlives later steps.

    Args:
        run: the step; it neither reads numbers on the host nor copies from there.
        device: the CUDA device that it runs on.
    """

    def __init__(self, run: RunStep, device: torch.device) -> None:
        self._run, self._device = run, device
        self._graph: torch.cuda.CUDAGraph | None = None
        # The leaves of the step's output; of those that the graph writes, their places.
        self._leaves: list[Any] = []
        self._tree: Any = None

    def __call__(self) -> StepOutput:
        """Run the current token."""
        with torch.cuda.device(self._device):  # streams and graphs are the current one's
            if self._graph is None:
                self._graph = self._captured()
            self._graph.replay()
            copy = self._gathered.clone()

        def leaf(number: int) -> Any:
            leaf = self._leaves[number]
            return leaf.tensor_in(copy) if isinstance(leaf, _Place) else leaf

        return StepOutput.of_leaves(leaf, self._tree)

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()
        torch.cuda.current_stream().wait_stream(stream)
        # another thread may allocate memory meanwhile, or capture a graph of its own
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            leaves, self._tree = tree_flatten(self._run().parts)
            numbers = [n for n, leaf in enumerate(leaves) if _is_on(self._device, leaf)]
            self._gathered, places = _gathered([leaves[number] for number in numbers])
        for number, place in zip(numbers, places, strict=True):
            leaves[number] = place
        self._leaves = leaves
        return graph


def _is_on(device: torch.device, leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device == device


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
    """One tensor of bytes with a copy of all of these, and their places in it. Tensors in the same
    memory share a copy.
    """
    together: dict[int, list[Tensor]] = defaultdict(list)
    for x in tensors:
        together[memory_of(x)].append(x)
    memories, shifts, size = [], {}, 0
    for memory, views in together.items():
        start = _aligned(min(map(_start, views)) - _ALIGNMENT + 1)
        stop = max(_start(x) + _extent(x) for x in views)
        narrow = min(views, key=lambda x: x.itemsize)
        part = narrow.as_strided(
            ((stop - start) // narrow.itemsize,), (1,), start // narrow.itemsize
        )
        memories.append(part.view(torch.uint8))
        shifts[memory] = size - start
        size += _aligned(stop - start)
    gathered = tensors[0].new_empty(size, dtype=torch.uint8)
    parts = gathered.split([_aligned(len(x)) for x in memories])
    torch._foreach_copy_([y[: len(x)] for x, y in zip(memories, parts, strict=True)], memories)
    return gathered, [
        _Place(shifts[memory_of(x)] + _start(x), x.dtype, tuple(x.shape), x.stride())
        for x in tensors
    ]


def _aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _start(x: Tensor) -> int:
    """Where a tensor begins in its memory, in bytes."""
    return int(x.storage_offset()) * x.itemsize


def _extent(x: Tensor) -> int:
    """How many bytes there are from its first to its last element."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize if x.numel() else 0
