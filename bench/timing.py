"""Timing calls side by side, on the CPU and on a GPU."""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Call = Callable[[], object]
Seconds = dict[str, float]
"""One call's ``median``, and the middle half's ends ``low`` and ``high``."""

LEAST, MOST = 5e-3, 4.0
"""On a CPU: seconds in which a fast call is repeated, and that all rounds of a slow one take."""

COLD = 2**29
"""More bytes than a cache has."""


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


def compare(
    calls: Mapping[str, Call], device: torch.device, rounds: int = 15
) -> dict[str, Seconds]:
    """Time calls side by side.

    On a CPU every round times each call once, in another order, so that a drift of the machine
    meets all of them; a slow call is in fewer rounds. On a GPU Triton times them: an
    :class:`InTurn` call in a CUDA graph of many calls, any other with L2 overwritten before it.
    """
    if device.type == "cuda":
        return {name: _on_gpu(call) for name, call in calls.items()}
    # The first, cold call of a very slow one is its only sample.
    first = {name: _on_cpu(call) for name, call in calls.items()}
    samples = {name: [value] if value > MOST else [] for name, value in first.items()}
    for turn in range(rounds):
        # a call may wait for the writes of the one before it
        for name in random.Random(turn).sample(list(calls), len(calls)):
            if first[name] * (turn + 1) <= MOST or not samples[name]:
                samples[name].append(_on_cpu(calls[name]))
    return {name: _summary(values) for name, values in samples.items()}


def _on_cpu(call: Call) -> float:
    calls, start = 0, time.perf_counter()
    while not calls or time.perf_counter() - start < LEAST:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls


def _on_gpu(call: Call) -> Seconds:
    from triton import testing

    bench = testing.do_bench_cudagraph if isinstance(call, InTurn) else testing.do_bench
    low, median, high = bench(call, quantiles=(0.25, 0.5, 0.75))
    return {"median": median / 1e3, "low": low / 1e3, "high": high / 1e3}


def _summary(samples: list[float]) -> Seconds:
    several = samples if len(samples) > 1 else samples * 2
    low, median, high = statistics.quantiles(several, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}
