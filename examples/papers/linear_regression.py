"""The linear-regression experiments of Dherin et al., "Learning without training": Figures 2 to 6
and Appendix E.

    python examples/papers/linear_regression.py                 # everything, as in docs/papers
    python examples/papers/linear_regression.py --figure 3      # one figure, or E
    python examples/papers/linear_regression.py --quick         # tiny sizes, seconds: does it run?

Each figure writes a picture and its numbers, and they are collected on one page beside the paper's
claims. One thread, fixed seeds.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from regression_experiments import FIGURES, FULL, QUICK
from regression_pictures import PAGE

from icl_patch.bench.results import environment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the figures that are asked for."""
    parser = argparse.ArgumentParser(
        description="Figures 2 to 6 and Appendix E of Dherin et al., from training to picture."
    )
    parser.add_argument(
        "--figure", choices=[*map(str, FIGURES)], action="append", help="repeatable (default: all)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/papers"), help="folder for pictures and numbers"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the training")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = QUICK if options.quick else FULL
    for figure, measure in FIGURES.items():
        if options.figure is None or str(figure) in options.figure:
            command = f"python examples/papers/linear_regression.py --figure {figure}"
            head = {
                "command": f"{command} --seed {options.seed}{' --quick' * options.quick}",
                "seed": options.seed,
                "sizes": asdict(sizes),
                "environment": environment(torch.device("cpu")),
            }
            PAGE.add(options.out, figure, head, measure(sizes, options.seed))
    PAGE.write(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
