"""The experiments of Goldwaser et al., "Equivalence of Context and Parameter Updates": Figure 5,
and what moves bf16. Figures 3 and 4 are measured on a pretrained model, by real_experiments.py.

    python examples/papers/goldwaser.py              # everything, as in docs/papers
    python examples/papers/goldwaser.py --redraw     # the picture and the page, from their numbers
    python examples/papers/goldwaser.py --quick      # tiny sizes, seconds: does it run?

One thread on the CPU, fixed seeds, the embedded model, and for images one that is trained first,
once, into build/papers.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict

from goldwaser_experiments import EXPERIMENTS, FULL, LAZY, QUICK
from matplotlib.figure import Figure
from pages import Numbers, Page, error_curves, legend, panels, parse

COLOURS = {"direct": "#d95f02", "stable": "#1f78b4", "exact": "#1b9e77"}


def figure_5(numbers: Numbers) -> Figure:
    """The image, and the errors of all updates by dtype."""
    dtypes = list(dict.fromkeys(curve["dtype"] for curve in numbers["curves"]))
    figure, axes = panels(len(dtypes), 2, (13, 1.2 + 2.9 * len(dtypes)), width_ratios=(1, 4))
    for axis in axes[:, 0]:
        axis.set_axis_off()
    axes[0, 0].imshow(numbers["image"])
    axes[0, 0].set_title("the image in the context", fontsize=10)
    for axis, dtype in zip(axes[:, 1], dtypes, strict=True):
        own = [curve for curve in numbers["curves"] if curve["dtype"] == dtype]
        curves = [(x["linf"], x["match"], _style(x["update"], x["held"])) for x in own]
        error_curves(axis, dtype, own[0]["tokens"], curves)
        label = "noise floor: the untouched model against itself"
        axis.axhline(own[0]["noise_floor"]["linf_max"], linestyle=":", color="0.4", label=label)
    axis.set_xlabel(f"generated tokens, after the image and {numbers['question']!r}")
    legend(figure, axis, 4)
    return figure


def _style(update: str, held: str) -> Numbers:
    merged = held != LAZY
    label = f"{update}, merged into the weights" if merged else update
    return {"color": COLOURS[update], "linestyle": "--" if merged else "-", "label": label}


PAGE = Page("context-parameter-equivalence", tuple(EXPERIMENTS), {"goldwaser-5": figure_5})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write numbers, picture and page."""
    description = "Figure 5 of Goldwaser et al., and how a patch is held in bf16."
    options = parse(description, arguments)
    sizes = QUICK if options.quick else FULL
    PAGE.run(options, lambda name: EXPERIMENTS[name](sizes), sizes=asdict(sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
