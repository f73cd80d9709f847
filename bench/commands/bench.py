"""``icl-patch bench``: time the kernels and decode steps, and write the tables."""

import argparse
import math
import sys
from pathlib import Path

from icl_patch.bench import BENCHMARKS
from icl_patch.cli import common

HELP = "time the kernels beside the code that they replace, and write the tables"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "name", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)} (default: all)"
    )
    common.add_device(parser, "cpu")
    parser.add_argument(
        "--threads", type=common.positive, metavar="N", help="of the CPU (default: torch's)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few minutes: the most telling shapes, fewer rounds"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="measure every case again, those in the tables too",
    )
    parser.add_argument(
        "--seconds",
        type=common.positive,
        metavar="S",
        default=math.inf,
        help="begin no case of a benchmark after S seconds",
    )
    parser.add_argument(
        "--plots",
        action="store_true",
        help="measure nothing: draw the pictures and tables of the results again",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the tables (default: $ICL_RESULTS, else bench/results)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, or draw; 1 if a call failed."""
    import torch

    from icl_patch.bench.results import Results, default_folder, tables
    from icl_patch.bench.running import BenchOptions, measure_benchmark, redraw

    if unknown := [name for name in options.name if name not in BENCHMARKS]:
        raise ValueError(
            f"expected a benchmark of {', '.join(BENCHMARKS)}, got {', '.join(unknown)}"
        )
    folder = options.out or default_folder()
    if options.plots:
        files = [str(path) for path in redraw(folder)]
        common.print_result(options, {"files": files}, *files)
        return 0
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    bench_options = BenchOptions(options.device, options.quick, options.fresh, options.seconds)
    measured = [Results(name, options.device, folder) for name in options.name or BENCHMARKS]
    passed = True
    for results in measured:
        for line, passed_so_far in measure_benchmark(results, bench_options):
            print(f"{results.benchmark}: {line}", file=sys.stderr, flush=True)
            passed = passed and passed_so_far
        if not options.json:
            common.print_result(
                options, {}, *tables(results.to_dict()), f"written to {results.path}"
            )
    if options.json:
        by_name = {results.benchmark: results.to_dict() for results in measured}
        common.print_result(options, by_name)
    return 0 if passed else 1
