"""Timing calls side by side, on the CPU and on a GPU, and the bandwidth they are compared with."""

import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], object]


class InTurn:
    """A call that takes the next of several inputs each time, so that its input is in no cache.

    Calls on the same inputs share the counter ``turn``: the next call does not read the input that
    the last one has read. On a GPU :func:`compare` replays such calls as a CUDA graph.
    """

    def __init__(
        self,
        function: Callable[[Any], object],
        inputs: Sequence[Any],
        turn: Iterator[int] | None = None,
    ) -> None:
        self.inputs = inputs
        self._function, self._turn = function, itertools.count() if turn is None else turn

    def __call__(self) -> object:
        return self._function(self.inputs[next(self._turn) % len(self.inputs)])


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the rounds and the middle half's ends."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        """The summary of some samples, of one as well."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


def compare(
    calls: Mapping[str, Call],
    device: torch.device,
    rounds: int = 15,
    least_seconds: float = 0.02,
    most_seconds: float = math.inf,
) -> dict[str, Timing]:
    """Time calls side by side: every round times each of them once, in another order, so that a
    drift of the machine meets all of them.

    On the CPU a round repeats a call until ``least_seconds`` have passed and takes the mean; other
    calls, or :class:`InTurn`, keep its inputs out of the caches. On a GPU an :class:`InTurn` call
    is replayed as a CUDA graph of many calls, at least one for each input; any other call is timed
    once between two events, after L2 is overwritten. A slow call gets fewer rounds, about
    ``most_seconds`` in all.
    """
    timers = {name: _timer(call, device, least_seconds) for name, call in calls.items()}
    first = {name: timer() for name, timer in timers.items()}
    counts = {
        name: max(1, int(min(rounds, most_seconds / max(value, 1e-9))))
        for name, value in first.items()
    }
    # The first, cold call of a very slow one is its only sample.
    samples: dict[str, list[float]] = {
        name: [value] if value > most_seconds else [] for name, value in first.items()
    }
    order, shuffle = list(timers), random.Random(0).shuffle
    for turn in range(rounds):
        shuffle(order)  # a call may wait for the writes of the one before it
        for name in order:
            if turn < counts[name] and not (turn == 0 and samples[name]):
                samples[name].append(timers[name]())
    return {name: Timing.of(values) for name, values in samples.items()}


def _timer(call: Call, device: torch.device, least_seconds: float) -> Callable[[], float]:
    """A function that times one warm call in seconds."""
    if device.type != "cuda":
        return lambda: _host_seconds(call, least_seconds)
    call()
    return _graph_timer(call) if isinstance(call, InTurn) else _event_timer(call, device)


def _host_seconds(call: Call, least: float) -> float:
    calls, start = 0, time.perf_counter()
    while not calls or time.perf_counter() - start < least:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls


def _elapsed(run: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _event_timer(call: Call, device: torch.device) -> Callable[[], float]:
    flush = torch.empty(
        2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device
    )

    def seconds() -> float:
        flush.zero_()
        return _elapsed(call)

    return seconds


def _graph_timer(call: InTurn) -> Callable[[], float]:
    """Replays of a graph that takes every input at least once and lasts 2 ms, of up to 1,000
    calls.
    """
    count = len(call.inputs)
    graph = captured(call, count)
    again = int(2e-3 / max(_elapsed(graph.replay), 1e-6))
    if again > 1:
        count *= min(again, max(1, 1000 // count))
        graph = captured(call, count)
    graph.replay()
    return lambda: _elapsed(graph.replay) / count


def captured(call: Call, count: int) -> "torch.cuda.CUDAGraph":
    """A CUDA graph of ``count`` calls that has run once. ``torch.cuda.graph`` would collect garbage
    first, which takes longer than the rest.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # libraries choose their workspaces here, before the capture
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            for _ in range(count):
                call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def last_level_cache(device: torch.device) -> int:
    """The size in bytes that CUDA or Linux reports; else 64 MiB."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return max(
        (int(path.read_text().strip().removesuffix("K")) * 1024 for path in sizes),
        default=64 * 2**20,
    )


@functools.cache
def ceiling(device: torch.device) -> float:
    """The best bandwidth in bytes a second: of sums of 256 MiB on a CPU (the fastest quarter of
    them), of a large copy on a GPU.
    """
    if device.type == "cuda":
        return copy_bandwidth(device)
    buffers = [torch.ones(2**26, device=device) for _ in range(4)]
    read = InTurn(torch.sum, buffers)
    return buffers[0].nbytes / compare({"": read}, device, rounds=11, least_seconds=2e-3)[""].low


@functools.cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by copies between tensors of 1 GiB, a quarter of the free
    memory at most.
    """
    size = min(2**30, torch.cuda.mem_get_info(device)[0] // 8)
    source = [torch.randint(-128, 127, (size,), dtype=torch.int8, device=device) for _ in range(2)]
    target = torch.empty_like(source[0])
    return (
        2 * size / compare({"copy": InTurn(target.copy_, source)}, device, rounds=15)["copy"].median
    )
