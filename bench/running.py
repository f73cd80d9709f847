"""Run benchmarks: check the results of a case's calls, time the correct ones, record the rows.

The table is written after every case, so that an interrupted run keeps its rows and a later one
resumes.
"""

import importlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from icl_patch.bench import BENCHMARKS, plots
from icl_patch.bench.harness import UNFINISHED, Case, Comparison, describe, reason
from icl_patch.bench.results import Results, load_all, page
from icl_patch.bench.timing import Timing, compare
from icl_patch.patch.atomic_file import write_atomically


@dataclass(frozen=True)
class BenchOptions:
    """How to measure a benchmark: see ``icl-patch bench --help``."""

    device: torch.device
    quick: bool = False
    fresh: bool = False
    seconds: float = math.inf


def measure_benchmark(results: Results, options: BenchOptions) -> Iterator[tuple[str, bool]]:
    """Measure the cases without results; yields progress and whether nothing failed so far."""
    if results.dropped is not None:
        yield results.dropped, True
    benchmark = importlib.import_module(f"icl_patch.bench.cases.{results.benchmark}")
    cases = benchmark.cases(options.device, options.quick, results)
    missing = [case for case in cases if options.fresh or not results.has(case.name)]
    if options.device.type == "cuda" and missing and hasattr(benchmark, "prepare"):
        yield f"compiling for {len(missing)} cases", True
        benchmark.prepare(missing, options.device)
    rounds = 7 if options.quick else 15
    yield from measure(cases, results, rounds, options.fresh, options.seconds)
    results.sort([case.name for case in benchmark.cases(options.device, False, results)])
    results.write()


def redraw(folder: Path) -> list[Path]:
    """Write the tables and pictures of every results file in the folder again."""
    written = []
    for benchmark in BENCHMARKS:
        for data in load_all(folder, benchmark):
            path = folder / f"{data['file']}.md"
            write_atomically(path, [page(data).encode()])
            written += [path, *plots.draw(data, folder)]
    return written


def measure(
    cases: Sequence[Case],
    results: Results,
    rounds: int = 15,
    fresh: bool = False,
    seconds: float = math.inf,
) -> Iterator[tuple[str, bool]]:
    """Measure the cases that have no results yet; yields lines of progress, each with whether
    nothing has failed so far.

    Args:
        cases: the most important first.
        results: receives the rows.
        rounds: how often each call is timed.
        fresh: measure every case again.
        seconds: begin no case after this time.
    """
    end = time.monotonic() + seconds
    missing = [case for case in cases if fresh or not results.has(case.name)]
    passed = True
    if done := len(cases) - len(missing):
        yield f"{done} of {len(cases)} cases were measured before, with this code", passed
    for number, case in enumerate(missing, 1):
        if time.monotonic() > end:
            yield f"out of time: {len(missing) - number + 1} of {len(missing)} cases left", passed
            return
        yield f"{number}/{len(missing)} {case.name}", passed
        rows: list[dict[str, Any]] = []
        for rows in _rows(case, results.device, rounds):
            results.add(case, rows)
        passed = passed and not any("failed" in row for row in rows)
        yield "  " + describe(rows), passed


def _rows(case: Case, device: torch.device, rounds: int) -> Iterator[list[dict[str, Any]]]:
    """The rows known so far, yielded after every stage: an interrupted case keeps them."""
    head = {"case": case.name, **({"parameters": dict(case.parameters)} if case.parameters else {})}
    try:
        comparison = case.build()
    except Exception as error:  # the other cases still run
        yield [head | {"call": "", "ours": True, "failed": reason(error)}]
        return
    known: dict[str, dict[str, Any]] = {}
    errors: dict[str, float | None] = {}
    timings: dict[str, Timing] = {}
    order = list(comparison.calls)
    for apart in (False, True):
        calls = {}
        for name in order:
            if (name in comparison.apart) is apart:
                known[name] = head | {"call": name, "ours": name == comparison.ours}
                try:
                    errors[name] = comparison.check(name, comparison.calls[name]())
                    calls[name] = comparison.calls[name]
                except Exception as problem:
                    known[name]["failed"] = reason(problem)
        try:
            timings |= compare(
                calls, device, rounds, comparison.least_seconds, comparison.most_seconds
            )
        except Exception as problem:
            for name in calls:
                known[name]["failed"] = reason(problem)
        for name in calls.keys() & timings.keys():
            known[name] |= _numbers(comparison, name, timings, errors[name]) | {UNFINISHED: True}
        yield sorted(known.values(), key=lambda row: order.index(row["call"]))
    for name, timing in timings.items():
        del known[name][UNFINISHED]
        known[name] |= _costs(comparison, name, timing)
    yield [known[name] for name in order]


def _costs(comparison: Comparison, name: str, timing: Timing) -> Mapping[str, Any]:
    """The call's further numbers; if the profiler fails, the reason, and the time stays."""
    if comparison.costs is None:
        return {}
    try:
        return comparison.costs(name, timing.median)
    except Exception as problem:
        return {"not profiled": reason(problem)}


def _numbers(
    comparison: Comparison, name: str, timings: Mapping[str, Timing], error: float | None
) -> dict[str, Any]:
    timing, ours, units = timings[name], timings.get(comparison.ours), comparison.units
    row: dict[str, Any] = {"seconds": vars(timing)}
    if ours is not None:
        per_unit = ours.median / units.get(comparison.ours, 1)
        row["ratio"] = timing.median / units.get(name, 1) / per_unit
    if name in comparison.nbytes:
        bandwidth = comparison.nbytes[name] / timing.median
        row["GB/s"] = bandwidth / 1e9
        if ceiling := _ceiling(comparison, timings):
            row["of ceiling"] = bandwidth / ceiling
            if name == comparison.ours:
                row["ceiling GB/s"] = ceiling / 1e9
    if name in units:
        row |= {"unit": f"{comparison.unit}/s", "rate": units[name] / timing.median}
    if error is not None:
        row["error"] = error
    return row | (dict(comparison.notes) if name == comparison.ours else {})


def _ceiling(comparison: Comparison, timings: Mapping[str, Timing]) -> float | None:
    ceiling = comparison.ceiling
    if not isinstance(ceiling, str):
        return ceiling
    return comparison.nbytes[ceiling] / timings[ceiling].median if ceiling in timings else None
