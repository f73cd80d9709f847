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
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from goldwaser_experiments import EXPERIMENTS, FULL, QUICK, Subject
from goldwaser_pictures import CLAIMS, draw, measured, write_page
from linear_regression import rounded
from transformers.utils import logging as transformers_logging

from icl_patch.bench.results import environment

_NOTES = Path(__file__).with_name("goldwaser_notes.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the figures that are asked for."""
    parser = argparse.ArgumentParser(
        description="Figure 5 of Goldwaser et al., and how a patch is held in bf16."
    )
    parser.add_argument(
        "--figure",
        choices=EXPERIMENTS,
        action="append",
        help="one of them; may be repeated (default: all)",
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
        help=(
            "folder for pictures and numbers (default: docs/papers; of another model"
            " build/papers/NAME)"
        ),
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the prompts and of the vision model's training"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: draw the numbers")
    options = parser.parse_args(arguments)
    torch.set_num_threads(
        1 if options.device == "cpu" and options.model == "embedded" else torch.get_num_threads()
    )
    transformers_logging.disable_progress_bar()
    subject = Subject(options.model, options.device, options.seed)
    out = options.out or (
        Path("docs/papers") if subject.own else Path("build/papers") / Path(options.model).name
    )
    out.mkdir(parents=True, exist_ok=True)
    if options.redraw:
        redraw(out)
        return 0
    sizes = QUICK if options.quick else FULL
    for figure in options.figure or EXPERIMENTS:
        started = time.process_time()
        numbers = EXPERIMENTS[figure](subject, sizes)
        command = f"python examples/papers/goldwaser.py --figure {figure} --seed {options.seed}"
        command += "".join(
            f" --{name} {value}"
            for name in ("model", "device")
            if (value := getattr(options, name)) != parser.get_default(name)
        )
        head = {
            "figure": figure,
            "claim": CLAIMS[figure],
            "measured": measured(figure, numbers),
            "command": command + (" --quick" if options.quick else ""),
            "seed": options.seed,
            "model": options.model,
            "sizes": asdict(sizes),
            "environment": environment(torch.device(options.device)),
        }
        path = out / f"goldwaser-{figure}"
        path.with_suffix(".json").write_text(
            json.dumps(rounded(head | numbers), ensure_ascii=False) + "\n", encoding="utf-8"
        )
        draw(figure, numbers, path)
        print(
            f"{figure}: {head['measured']} [{time.process_time() - started:.0f} s]",
            file=sys.stderr,
            flush=True,
        )
    write_page(out, _NOTES.read_text(encoding="utf-8").strip())
    return 0


def redraw(folder: Path) -> None:
    """Draw the pictures and write the page again, from the numbers in a folder."""
    for path in sorted(folder.glob("goldwaser-*.json")):
        numbers = json.loads(path.read_text(encoding="utf-8"))
        draw(numbers["figure"], numbers, path.with_suffix(""))
    write_page(folder, _NOTES.read_text(encoding="utf-8").strip())


if __name__ == "__main__":
    sys.exit(main())
