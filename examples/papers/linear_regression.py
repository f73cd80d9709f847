"""The linear-regression experiments of Dherin et al., "Learning without training": Figures 2 to 6
and Appendix E.

    python examples/papers/linear_regression.py                 # everything, as in docs/papers
    python examples/papers/linear_regression.py --figure 3      # one figure, or E
    python examples/papers/linear_regression.py --redraw        # pictures and page, from numbers
    python examples/papers/linear_regression.py --quick         # tiny sizes, seconds: does it run?

Each figure writes a picture and its numbers, and they are collected on one page beside the paper's
claims. One thread, fixed seeds.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch
from regression_experiments import FIGURES, FULL, QUICK
from regression_pictures import PAGE

from icl_patch.bench.results import environment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the figures that are asked for."""
    options = PAGE.parser("Figures 2 to 6 and Appendix E of Dherin et al.").parse_args(arguments)
    torch.set_num_threads(1)
    sizes = QUICK if options.quick else FULL
    head = {"sizes": asdict(sizes), "environment": environment(torch.device("cpu"))}
    PAGE.run(
        options,
        "linear_regression.py",
        head,
        lambda figure: FIGURES[figure](sizes, options.seed),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
