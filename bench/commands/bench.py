"""``icl-patch bench``: time the kernels and decode steps, and write the tables."""

import argparse
import importlib
import math
import sys
from pathlib import Path

from icl_patch.bench import BENCHMARKS, OF_A_MODEL
from icl_patch.cli import arguments, output

HELP = "time the kernels and the code that they replace, and write the tables"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "name", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)} (default: all)"
    )
    arguments.add_device(parser, "cpu")
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
        type=arguments.positive,
        metavar="S",
        default=math.inf,
        help="begin no case of a benchmark after S seconds",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="of generation (in place of random models), answer and passes: a folder or hub id",
    )
    parser.add_argument(
        "--tables",
        action="store_true",
        help="measure nothing: write the tables of the results again",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("icl-patch-bench"),
        help="folder of the tables (default: icl-patch-bench)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, or write the tables again; 1 if a call failed."""
    from icl_patch.atomic_file import write_atomically
    from icl_patch.bench.results import Results, load_all, page, table

    if unknown := [name for name in options.name if name not in BENCHMARKS]:
        raise ValueError(
            f"expected a benchmark of {', '.join(BENCHMARKS)}, got {', '.join(unknown)}"
        )
    if options.model is not None and not set() < {*options.name} <= {*OF_A_MODEL}:
        raise ValueError(f"expected --model with none but {', '.join(OF_A_MODEL)}")
    folder, names = options.out, options.name or BENCHMARKS
    if options.tables:
        files = []
        for data in (data for name in names for data in load_all(folder, name)):
            files.append(str(folder / f"{data['file']}.md"))
            write_atomically(files[-1], [page(data).encode()])
        output.print_result(options, {"files": files}, *files)
        return 0
    passed, measured = True, {}
    for name in names:
        results = Results(name, options.device, folder)
        cases = importlib.import_module(f"icl_patch.bench.cases.{name}").cases
        of_model = {} if options.model is None else {"model": options.model}
        chosen = cases(options.device, options.quick, **of_model)
        rounds = 7 if options.quick else 15
        for line, good in results.measure(chosen, rounds, options.fresh, options.seconds):
            print(f"{name}: {line}", file=sys.stderr, flush=True)
            passed = passed and good
        measured[name] = results.data
        if not options.json:
            lines = table(results.data["rows"])
            output.print_result(options, {}, *lines, f"written to {results.path}")
    if options.json:
        output.print_result(options, measured)
    return 0 if passed else 1
