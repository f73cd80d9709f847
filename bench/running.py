"""Run benchmarks by name, and draw their results."""

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from icl_patch.bench import BENCHMARKS, plots
from icl_patch.bench.harness import measure, part_of
from icl_patch.bench.results import Results, load_all, markdown, write_whole


@dataclass(frozen=True)
class BenchOptions:
    """The part of a benchmark to measure: see ``icl-patch bench --help``."""

    device: torch.device
    quick: bool = False
    part: tuple[int, int] = (1, 1)
    fresh: bool = False
    seconds: float = math.inf


def measure_benchmark(results: Results, options: BenchOptions) -> Iterator[tuple[str, bool]]:
    """Measure the cases without results; yields progress and whether nothing failed so far."""
    if results.dropped is not None:
        yield results.dropped, True
    benchmark = importlib.import_module(f"icl_patch.bench.cases.{results.benchmark}")
    cases = benchmark.cases(options.device, options.quick, results)
    cases = part_of(cases, options.part)
    missing = [case for case in cases if options.fresh or not results.has(case.name)]
    if options.device.type == "cuda" and missing and hasattr(benchmark, "prepare"):
        yield f"compiling for {len(missing)} cases", True
        benchmark.prepare(missing, options.device)
    yield from measure(
        cases,
        results,
        rounds=7 if options.quick else 15,
        fresh=options.fresh,
        seconds=options.seconds,
    )
    results.sort([case.name for case in benchmark.cases(options.device, False, results)])
    results.write()


def redraw(folder: Path) -> list[Path]:
    """Write the tables and pictures of every results file in the folder again."""
    written = []
    for benchmark in BENCHMARKS:
        for data in load_all(folder, benchmark):
            path = folder / f"{data['file']}.md"
            write_whole(path, markdown(data))
            written.append(path)
            draw = {"linear": plots.draw, "generation": plots.draw_steps}.get(benchmark)
            written += [] if draw is None else draw(data, folder)
    return written
