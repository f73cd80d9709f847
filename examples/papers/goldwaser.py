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
    parser = PAGE.parser("Figure 5 of Goldwaser et al., and how a patch is held in bf16.")
    text = "a Gemma 3: a local folder or a hub id, whose page goes to build/papers/NAME"
    parser.add_argument("--model", default="embedded", help=text)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, … (default: cpu)")
    options = parser.parse_args(arguments)
    subject = Subject(options.model, options.device, options.seed)
    if subject.own and options.device == "cpu":
        torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    further = "" if options.device == "cpu" else f" --device {options.device}"
    if not subject.own:
        further = f" --model {options.model}{further}"
        if options.out == parser.get_default("out"):
            options.out = Path("build/papers") / Path(options.model).name
    sizes = QUICK if options.quick else FULL
    head = {
        "model": options.model,
        "sizes": asdict(sizes),
        "environment": environment(torch.device(options.device)),
    }
    script = f"goldwaser.py{further}"
    PAGE.run(options, script, head, lambda figure: EXPERIMENTS[figure](subject, sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
