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
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from regression_experiments import FIGURES, FULL, QUICK
from regression_pictures import CLAIMS, draw, measured, stem, title, write_page

from icl_patch.bench.results import environment
from icl_patch.evaluation.report import write_json

_NOTES = Path(__file__).with_name("linear_regression_notes.md")


def rounded(value: Any) -> Any:
    """Floats with nine digits, which tell any two fp32 numbers apart."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _figure(name: str) -> int | str:
    return int(name) if name.isdigit() else name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the figures that are asked for."""
    parser = argparse.ArgumentParser(
        description="Figures 2 to 6 and Appendix E of Dherin et al., from training to picture."
    )
    parser.add_argument(
        "--figure",
        type=_figure,
        choices=list(FIGURES),
        action="append",
        help="one of them; may be repeated (default: all)",
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
    for figure in options.figure or list(FIGURES):
        started = time.process_time()
        numbers = FIGURES[figure](sizes, options.seed)
        quick = " --quick" if options.quick else ""
        head = {
            "figure": figure,
            "claim": CLAIMS[figure],
            "measured": measured(figure, numbers),
            "command": (
                f"python examples/papers/linear_regression.py --figure {figure} --seed"
                f" {options.seed}{quick}"
            ),
            "seed": options.seed,
            "sizes": asdict(sizes),
            "environment": environment(torch.device("cpu")),
        }
        write_json(options.out / f"{stem(figure)}.json", rounded(head | numbers))
        draw(figure, numbers, options.out / f"{stem(figure)}.png")
        print(
            f"{title(figure)}: {head['measured']} [{time.process_time() - started:.0f} s]",
            file=sys.stderr,
            flush=True,
        )
    write_page(options.out, _NOTES.read_text(encoding="utf-8").strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
