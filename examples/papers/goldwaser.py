"""The experiments of Goldwaser et al., "Equivalence of Context and Parameter Updates": Figure 5,
and what moves bf16. Figures 3 and 4 are measured on a pretrained model, by real_experiments.py.

    python examples/papers/goldwaser.py              # everything, as in docs/papers
    python examples/papers/goldwaser.py --figure 5   # one figure
    python examples/papers/goldwaser.py --redraw     # the pictures and the page, from their numbers
    python examples/papers/goldwaser.py --quick      # tiny sizes, seconds: does it run?

The paper's own model for images:

    python examples/papers/goldwaser.py --model google/gemma-3-4b-it --figure 5 --device cuda

Each figure writes a picture and its numbers, and they are collected on one page beside the paper's
claims. One thread on the CPU, fixed seeds. The models of this repository are used unless another is
named: the embedded one, and for images one that is trained first, once, into build/papers.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from goldwaser_experiments import EXPERIMENTS, FULL, QUICK, Subject
from goldwaser_pictures import PAGE
from transformers.utils import logging as transformers_logging

from icl_patch.bench.results import environment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the figures that are asked for."""
    parser = argparse.ArgumentParser(
        description="Figure 5 of Goldwaser et al., and how a patch is held in bf16."
    )
    parser.add_argument(
        "--figure", choices=EXPERIMENTS, action="append", help="repeatable (default: all)"
    )
    parser.add_argument(
        "--model",
        default="embedded",
        help="a Gemma 3: a local folder or a hub id (default: the models of this repository)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, … (default: cpu)")
    parser.add_argument(
        "--out",
        type=Path,
        help="for pictures and numbers (default: docs/papers; of another model build/papers/NAME)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the prompts and of the vision model's training"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: draw the numbers")
    options = parser.parse_args(arguments)
    subject = Subject(options.model, options.device, options.seed)
    if subject.own and options.device == "cpu":
        torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    own = Path("docs/papers") if subject.own else Path("build/papers") / Path(options.model).name
    out = options.out or own
    out.mkdir(parents=True, exist_ok=True)
    sizes = QUICK if options.quick else FULL
    for figure in options.figure or EXPERIMENTS:
        if options.redraw:
            path = out / f"{PAGE.stem(figure)}.json"
            PAGE.draw(
                figure, json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png")
            )
            continue
        command = f"python examples/papers/goldwaser.py --figure {figure} --seed {options.seed}"
        for name in ("model", "device"):
            if (value := getattr(options, name)) != parser.get_default(name):
                command += f" --{name} {value}"
        head = {
            "command": command + " --quick" * options.quick,
            "seed": options.seed,
            "model": options.model,
            "sizes": asdict(sizes),
            "environment": environment(torch.device(options.device)),
        }
        PAGE.add(out, figure, head, EXPERIMENTS[figure](subject, sizes))
    PAGE.write(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
