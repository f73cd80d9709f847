"""The linear-regression experiments of Dherin et al., "Learning without training": Figures 2 to 6
and Appendix E.

    python examples/papers/linear_regression.py                 # everything, as in docs/papers
    python examples/papers/linear_regression.py --redraw        # pictures and page, from numbers
    python examples/papers/linear_regression.py --quick         # tiny sizes, seconds: does it run?

One thread, fixed seeds.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pages import Numbers, Page, band, panels, parse
from regression_experiments import FIGURES, FULL, QUICK

Panel = Callable[[Axes, Numbers], Any]


def _drawn(*made: Panel) -> Callable[[Numbers], Figure]:
    """Draws a figure of these panels from the numbers of :mod:`regression_experiments`."""

    def draw(numbers: Numbers) -> Figure:
        figure, axes = panels(1, len(made), (4.8 * len(made), 3.8))
        for axis, panel in zip(axes[0], made, strict=True):
            panel(axis, numbers)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(frameon=False, fontsize=8)
        return figure

    return draw


def _mean(axis: Axes, x: list[int], values: Numbers, label: str, color: str) -> None:
    pairs = zip(values["mean"], values["standard_error"], strict=True)
    band(axis, x, [(mean - error, mean, mean + error) for mean, error in pairs], color, label)


def _losses(axis: Axes, found: Numbers) -> None:
    curves = found["curves"]
    for name, label, style in (
        ("training_loss", "training", {"color": "0.6", "linewidth": 1}),
        ("validation_loss_context", "validation, context", {"linewidth": 3, "alpha": 0.5}),
        ("validation_loss_patched", "validation by ΔW, without it", {"ls": "--", "color": "C3"}),
    ):
        axis.plot(curves["step"], curves[name], label=label, **style)
    axis.set(yscale="log", xlabel="training step", ylabel="loss", title="losses while training")


def _plane(axis: Axes, found: Numbers) -> None:
    plane = found["plane"]
    values = list(zip(*plane["mean_absolute_difference"], strict=True))
    axis.grid(visible=False)
    image = axis.pcolormesh(plane["axis"], plane["axis"], values, shading="nearest")
    axis.figure.colorbar(image, ax=axis)
    title = "mean |difference| over tasks"
    axis.set(aspect="equal", xlabel="$x_1$", ylabel="$x_2$", title=title)


def _convergence(axis: Axes, found: Numbers) -> None:
    found = found.get("convergence", found)
    change = {key: value[3:] for key, value in found["change"].items()}
    _mean(axis, found["context_length"][3:], change, "mean ± standard error", "C0")
    axis.set(title="change of ΔW by one more token", xlabel="context length i")
    axis.set(ylabel=r"$\|\Delta W_{i+1} - \Delta W_i\|_2$", ylim=(0, None))


def _test_losses(axis: Axes, found: Numbers) -> None:
    _mean(axis, found["steps"], found["gd_test_loss"], f"SGD on W, rate {found['rate']}", "C1")
    _mean(axis, found["steps"], found["implicit_test_loss"], "ΔW of the context", "C0")
    axis.set(yscale="log", xlabel="SGD steps, or context length", ylabel="test loss")
    axis.set_title("test loss, mean ± standard error")


def _alignment(axis: Axes, found: Numbers) -> None:
    steps, ceiling = found["steps"][1:], found["inner_product_ceiling"]["mean"]
    _mean(axis, steps, found["inner_product"], "mean ± standard error", "C2")
    axis.plot(steps, ceiling, "--", color="0.5", label="most that any ΔW of this query can reach")
    axis.set(ylim=(0, 1.05), xlabel="SGD steps, and context length", title="the two changes of W")
    axis.set_ylabel("normalised Frobenius inner product")


def _blocks(axis: Axes, found: Numbers) -> None:
    mean, error = found["difference"]["mean"], found["difference"]["standard_error"]
    axis.errorbar(found["block"], mean, yerr=error, fmt="o-", capsize=3)
    axis.set(xticks=found["block"], ylim=(0, None), xlabel="block")
    axis.set(ylabel="L² norm of the difference", title="difference of block outputs")


def _factors(axis: Axes, found: Numbers) -> None:
    axis.plot(found["token"], found["step_median"], label="absorbed from $c_1$ on")
    axis.plot(found["token"], found["step_growing_median"], "--", label="growing (Prop. 3.1)")
    axis.set(yscale="log", xlabel="token i", ylabel=r"$\|W_i - W_{i-1}\|$, median")
    axis.set_title("change of W by one token")


PAGE = Page(
    "linear-regression",
    tuple(FIGURES),
    {
        "dherin-figure-2": _drawn(_losses, _plane),
        "dherin-figure-3": _drawn(_convergence),
        "dherin-figure-4": _drawn(_test_losses, _alignment),
        "dherin-figure-5": _drawn(_losses, _blocks),
        "dherin-figure-6": _drawn(_losses, _convergence),
        "dherin-appendix-e": _drawn(_factors),
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write numbers, pictures and page."""
    options = parse("Figures 2 to 6 and Appendix E of Dherin et al.", arguments)
    sizes = QUICK if options.quick else FULL
    PAGE.run(options, lambda name: FIGURES[name](sizes, 0), sizes=asdict(sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
