"""Figures 2 to 6 and Appendix E of Dherin et al. drawn from their numbers, and the page that holds
them beside the paper's claims.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from figure_page import FigurePage
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Panel = Callable[[Axes, dict[str, Any]], None]

CLAIMS: dict[int | str, str] = {
    2: (
        "the losses by context and by ΔW are the same at every checkpoint; the outputs agree over"
        " the plane to the order of 1e-7"
    ),
    3: "the change of ΔW from one more context token decreases and vanishes as the context grows",
    4: (
        "fine-tuning and implicit updates minimise the loss in similar ways, and the two changes of"
        " W remain highly aligned"
    ),
    5: (
        "the losses are the same, and the output of each of the ten blocks agrees to the order of"
        " 1e-6"
    ),
    6: "the weight transfer is exact with an RNN too, but the changes of ΔW fail to converge",
    "E": (
        "absorbed from its first token on, the context multiplies W_0 by factors 1 + h_i A_i; the"
        " output is the same at every step"
    ),
}
_CONTEXT, _PATCHED = "with the context", "by ΔW, without it"


def title(figure: int | str) -> str:
    """The paper's name for it."""
    return f"Figure {figure}" if isinstance(figure, int) else f"Appendix {figure}"


def stem(figure: int | str) -> str:
    """The name of its files, without the ending."""
    return f"dherin-{title(figure).lower().replace(' ', '-')}"


def _drawn(*panels: Panel) -> Callable[[dict[str, Any]], Figure]:
    """Draws a figure of these panels from the numbers of :mod:`regression_experiments`."""

    def draw(numbers: dict[str, Any]) -> Figure:
        size = (4.6 * len(panels) + 0.4, 3.8)
        figure, axes = plt.subplots(
            1, len(panels), figsize=size, layout="constrained", squeeze=False
        )
        for axis, panel in zip(axes[0], panels, strict=True):
            panel(axis, numbers)
            if panel is not _plane:
                axis.grid(alpha=0.3)
        return figure

    return draw


def _labelled(axis: Axes, x: str, y: str, title: str, legend: str | None = "best") -> None:
    axis.set(xlabel=x, ylabel=y)
    axis.set_title(title, fontsize=11)
    if legend:
        axis.legend(frameon=False, fontsize=8, loc=legend)


def _dashed(axis: Axes, x: list[int], y: list[float], label: str, color: str = "C1") -> None:
    axis.plot(x, y, "--", color=color, linewidth=1.1, label=label)


def _band(axis: Axes, x: list[int], values: dict[str, list[float]], label: str, color: str) -> None:
    mean, error = values["mean"], values["standard_error"]
    axis.plot(x, mean, color=color, linewidth=1.4, label=label)
    low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
    axis.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)


def _losses(axis: Axes, found: dict[str, Any]) -> None:
    curves = found["curves"]
    step, context = curves["step"], curves["validation_loss_context"]
    axis.plot(step, curves["training_loss"], color="0.6", linewidth=1.0, label="training")
    label = f"validation {_CONTEXT}"
    axis.plot(step, context, color="C0", linewidth=3, alpha=0.5, label=label)
    _dashed(axis, step, curves["validation_loss_patched"], f"validation {_PATCHED}", "C3")
    axis.set_yscale("log")
    _labelled(axis, "training step", "loss", "losses while training")


def _close_up(axis: Axes, found: dict[str, Any]) -> None:
    curves = found["curves"]
    last = slice(-max(2, len(curves["step"]) // 4), None)
    step, context, patched = (
        curves[name][last]
        for name in ("step", "validation_loss_context", "validation_loss_patched")
    )
    axis.plot(step, context, "o-", color="C0", markersize=7, alpha=0.5, label=_CONTEXT)
    axis.plot(step, patched, "x--", color="C3", markersize=5, linewidth=1, label=_PATCHED)
    axis.margins(y=0.25)
    title = f"close-up: predictions at most {curves['largest_difference']:.1e} apart"
    _labelled(axis, "training step", "validation loss", title, "upper right")


def _plane(axis: Axes, found: dict[str, Any]) -> None:
    plane = found["plane"]
    values = list(zip(*plane["mean_absolute_difference"], strict=True))
    image = axis.pcolormesh(plane["axis"], plane["axis"], values, shading="nearest")
    axis.figure.colorbar(image, ax=axis)
    axis.set_aspect("equal")
    _labelled(axis, "$x_1$", "$x_2$", "mean |difference| over tasks", None)


def _convergence(axis: Axes, found: dict[str, Any]) -> None:
    length = found["context_length"][3:]
    change = {key: value[3:] for key, value in found["change"].items()}
    _band(axis, length, change, "mean ± standard error", "C0")
    _dashed(axis, length, found["median"][3:], "median")
    axis.set_ylim(bottom=0)
    y = r"$\|\Delta W_{i+1} - \Delta W_i\|_2$"
    _labelled(axis, "context length i", y, "change of ΔW by one more token")


def _test_losses(axis: Axes, found: dict[str, Any]) -> None:
    _band(axis, found["steps"], found["gd_test_loss"], f"SGD on W, rate {found['rate']}", "C1")
    _band(axis, found["steps"], found["implicit_test_loss"], "ΔW of the context", "C0")
    axis.set_yscale("log")
    title = "test loss, mean ± standard error"
    _labelled(axis, "SGD steps, or context length", "test loss", title)


def _alignment(axis: Axes, found: dict[str, Any]) -> None:
    steps, ceiling = found["steps"][1:], found["inner_product_ceiling"]["mean"]
    _band(axis, steps, found["inner_product"], "mean ± standard error", "C2")
    _dashed(axis, steps, ceiling, "most that any ΔW of this query can reach", "0.5")
    axis.set_ylim(min(0, *found["inner_product"]["mean"]), 1.05)
    x, y = "SGD steps, and context length", "normalised Frobenius inner product"
    _labelled(axis, x, y, "the two changes of W", "upper right")


def _blocks(axis: Axes, found: dict[str, Any]) -> None:
    mean, error = found["difference"]["mean"], found["difference"]["standard_error"]
    axis.errorbar(found["block"], mean, yerr=error, fmt="o-", capsize=3)
    axis.set_xticks(found["block"])
    axis.set_ylim(bottom=0)
    title = "difference of block outputs"
    _labelled(axis, "block", "L² norm of the difference", title, None)


def _factors(key: str, own: str, y: str, title: str) -> Panel:
    """A panel of the medians over the tokens, of both ways to absorb a context."""

    def panel(axis: Axes, found: dict[str, Any]) -> None:
        token, label = found["token"], f"{own}, absorbed from $c_1$ on"
        axis.plot(token, found[f"{key}_median"], color="C0", linewidth=1.4, label=label)
        _dashed(axis, token, found[f"{key}_growing_median"], "context growing (Prop. 3.1)")
        axis.set_yscale("log" if key == "step" else "linear")
        _labelled(axis, "token i", y, title)

    return panel


_FACTORS = (
    _factors("step", r"$\|W_i - W_{i-1}\|$", "Frobenius norm, median", "change of W by one token"),
    _factors("size", r"$W_0\,\Pi(1 + h_j A_j)$", r"$\|W_i - W_0\|$, median", "change of W so far"),
)


def measured(figure: int | str, numbers: dict[str, Any]) -> str:
    """The line that stands beside the paper's claim: numbers only."""
    if figure == 3:
        return _converges(numbers)
    if figure == "E":
        return _factorises(numbers)
    if figure == 4:
        aligned = numbers["inner_product"]["mean"]
        return (
            f"test loss from {numbers['gd_test_loss']['mean'][0]:.2g} to"
            f" {numbers['gd_test_loss']['mean'][-1]:.2g} by SGD (rate {numbers['rate']}) and to"
            f" {numbers['implicit_test_loss']['mean'][-1]:.2g} by ΔW; inner product"
            f" {aligned[0]:.2f} after one step and {aligned[-1]:.2f} at the end, of at most"
            f" {numbers['inner_product_ceiling']['mean'][-1]:.2f} there"
        )
    curves = numbers["curves"]
    context, patched = curves["validation_loss_context"], curves["validation_loss_patched"]
    apart = max(abs(a - b) for a, b in zip(context, patched, strict=True))
    line = (
        f"validation loss from {context[0]:.2g} to {context[-1]:.2g}; by ΔW at most {apart:.1e}"
        f" from it at {len(context)} checkpoints, single predictions at most"
        f" {curves['largest_difference']:.1e} apart"
    )
    if figure == 2:
        plane = numbers["plane"]
        return (
            f"{line}; over the plane {plane['average']:.1e} on average, {plane['largest_mean']:.1e}"
            f" at the worst point, {plane['largest']:.1e} for the worst task there"
            f" ({numbers['largest_in_fp64']:.0e} with the same weights in fp64)"
        )
    if figure == 5:
        return (
            f"{line}; blocks differ by {max(numbers['difference']['mean']):.1e} on average at most,"
            f" {numbers['largest']:.1e} for the worst task, beside outputs of norm"
            f" {numbers['output_norm']:.2g} ({numbers['largest_in_fp64']:.0e} in fp64)"
        )
    return f"{line}; {_converges(numbers['convergence'])}"


def _factorises(found: dict[str, Any]) -> str:
    return (
        f"predictions at most {found['largest_difference']:.1e} apart over {len(found['token'])}"
        f" steps ({found['largest_difference_in_fp64']:.0e} in fp64); the growing context's ΔW and"
        f" this one do the same to A(x), to {found['largest_difference_on_the_query']:.0e}, and are"
        f" two matrices: norms {found['total_norm_growing_median']:.2g} and"
        f" {found['total_norm_median']:.2g} (medians), cosine {found['cosine']['mean'][0]:.2f} on"
        f" average; the step is {found['step_median'][0]:.2g} for the first token and"
        f" {found['step_median'][-1]:.2g} for the last (medians);"
        f" {100 * found['share_of_factors_that_reverse']:.2g} % of the factors have a negative"
        f" determinant, the one nearest 0 is {found['determinant_nearest_0']:.1e}"
    )


def _converges(found: dict[str, Any]) -> str:
    return (
        f"mean change of ΔW {found['first_tenth']:.2g} over the first tenth of context lengths and"
        f" {found['last_tenth']:.2g} over the last"
        f" ({found['last_tenth'] / found['first_tenth']:.2g} of it; slope"
        f" {found['slope_log_log']:.2f} on log scales; ‖W‖₂ is {found['weight_norm']:.2g})"
    )


PAGE = FigurePage(
    "linear-regression.md",
    "The linear-regression experiments of Dherin et al.",
    Path(__file__).with_name("linear_regression_notes.md"),
    CLAIMS,
    title,
    stem,
    {
        2: _drawn(_losses, _close_up, _plane),
        3: _drawn(_convergence),
        4: _drawn(_test_losses, _alignment),
        5: _drawn(_losses, _close_up, _blocks),
        6: _drawn(_losses, _close_up, lambda axis, found: _convergence(axis, found["convergence"])),
        "E": _drawn(*_FACTORS),
    },
    150,
    measured,
)
