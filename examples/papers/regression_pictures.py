"""Figures 2 to 6 and Appendix E of Dherin et al. drawn from their numbers, and the page that holds
them beside the paper's claims.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from figure_page import FigurePage

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

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


def draw(figure: int | str, numbers: dict[str, Any], path: Path) -> None:
    """Draw a figure from the numbers of :mod:`regression_experiments`; ``path`` ends in .png, .svg
    or .pdf.
    """
    panels: dict[int | str, tuple[Callable[[Axes, dict[str, Any]], None], ...]] = {
        2: (_losses, _close_up, _plane),
        3: (_convergence,),
        4: (_test_losses, _alignment),
        5: (_losses, _close_up, _blocks),
        6: (_losses, _close_up, lambda axis, found: _convergence(axis, found["convergence"])),
        "E": (_factor_steps, _factor_sizes),
    }
    drawn = panels[figure]
    made, axes = plt.subplots(
        1, len(drawn), figsize=(4.6 * len(drawn) + 0.4, 3.8), layout="constrained", squeeze=False
    )
    for axis, panel in zip(axes[0], drawn, strict=True):
        panel(axis, numbers)
        if panel is not _plane:
            axis.grid(alpha=0.3)
    made.savefig(path, dpi=150)
    plt.close(made)


def _band(axis: Axes, x: list[int], values: dict[str, list[float]], label: str, color: str) -> None:
    mean, error = values["mean"], values["standard_error"]
    axis.plot(x, mean, color=color, linewidth=1.4, label=label)
    low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
    axis.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)


def _losses(axis: Axes, found: dict[str, Any]) -> None:
    curves = found["curves"]
    axis.plot(curves["step"], curves["training_loss"], color="0.6", linewidth=1.0, label="training")
    axis.plot(
        curves["step"],
        curves["validation_loss_context"],
        color="C0",
        linewidth=3,
        alpha=0.5,
        label=f"validation {_CONTEXT}",
    )
    axis.plot(
        curves["step"],
        curves["validation_loss_patched"],
        color="C3",
        linewidth=1.1,
        linestyle="--",
        label=f"validation {_PATCHED}",
    )
    axis.set_yscale("log")
    axis.set_xlabel("training step")
    axis.set_ylabel("loss")
    axis.set_title("losses while training")
    axis.legend(frameon=False, fontsize=8)


def _close_up(axis: Axes, found: dict[str, Any]) -> None:
    curves = found["curves"]
    last = slice(-max(2, len(curves["step"]) // 4), None)
    axis.plot(
        curves["step"][last],
        curves["validation_loss_context"][last],
        "o-",
        color="C0",
        markersize=7,
        alpha=0.5,
        label=_CONTEXT,
    )
    axis.plot(
        curves["step"][last],
        curves["validation_loss_patched"][last],
        "x--",
        color="C3",
        markersize=5,
        linewidth=1,
        label=_PATCHED,
    )
    axis.set_xlabel("training step")
    axis.set_ylabel("validation loss")
    axis.set_title(
        f"close-up: predictions at most {curves['largest_difference']:.1e} apart", fontsize=11
    )
    axis.margins(y=0.25)
    axis.legend(frameon=False, fontsize=8, loc="upper right")


def _plane(axis: Axes, found: dict[str, Any]) -> None:
    plane = found["plane"]
    image = axis.pcolormesh(
        plane["axis"],
        plane["axis"],
        list(zip(*plane["mean_absolute_difference"], strict=True)),
        shading="nearest",
    )
    axis.figure.colorbar(image, ax=axis)
    axis.set_aspect("equal")
    axis.set_xlabel("$x_1$")
    axis.set_ylabel("$x_2$")
    axis.set_title("mean |difference| over tasks", fontsize=11)


def _convergence(axis: Axes, found: dict[str, Any]) -> None:
    _band(
        axis,
        found["context_length"][3:],
        {key: value[3:] for key, value in found["change"].items()},
        "mean ± standard error",
        "C0",
    )
    axis.plot(
        found["context_length"][3:],
        found["median"][3:],
        color="C1",
        linewidth=1.1,
        linestyle="--",
        label="median",
    )
    axis.set_ylim(bottom=0)
    axis.set_xlabel("context length i")
    axis.set_ylabel(r"$\|\Delta W_{i+1} - \Delta W_i\|_2$")
    axis.set_title("change of ΔW by one more token", fontsize=11)
    axis.legend(frameon=False, fontsize=8)


def _test_losses(axis: Axes, found: dict[str, Any]) -> None:
    _band(axis, found["steps"], found["gd_test_loss"], f"SGD on W, rate {found['rate']}", "C1")
    _band(axis, found["steps"], found["implicit_test_loss"], "ΔW of the context", "C0")
    axis.set_yscale("log")
    axis.set_xlabel("SGD steps, or context length")
    axis.set_ylabel("test loss")
    axis.set_title("test loss, mean ± standard error", fontsize=11)
    axis.legend(frameon=False, fontsize=8)


def _alignment(axis: Axes, found: dict[str, Any]) -> None:
    _band(axis, found["steps"][1:], found["inner_product"], "mean ± standard error", "C2")
    ceiling = found["inner_product_ceiling"]["mean"]
    axis.plot(
        found["steps"][1:],
        ceiling,
        color="0.5",
        linewidth=1.1,
        linestyle="--",
        label="most that any ΔW of this query can reach",
    )
    axis.set_ylim(min(0, *found["inner_product"]["mean"]), 1.05)
    axis.set_xlabel("SGD steps, and context length")
    axis.set_ylabel("normalised Frobenius inner product")
    axis.set_title("the two changes of W", fontsize=11)
    axis.legend(frameon=False, fontsize=8, loc="upper right")


def _blocks(axis: Axes, found: dict[str, Any]) -> None:
    axis.errorbar(
        found["block"],
        found["difference"]["mean"],
        yerr=found["difference"]["standard_error"],
        fmt="o-",
        capsize=3,
    )
    axis.set_xticks(found["block"])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("block")
    axis.set_ylabel("L² norm of the difference")
    axis.set_title("difference of block outputs", fontsize=11)


def _factor_steps(axis: Axes, found: dict[str, Any]) -> None:
    axis.plot(
        found["token"],
        found["step_median"],
        color="C0",
        linewidth=1.4,
        label=r"$\|W_i - W_{i-1}\|$, absorbed from $c_1$ on",
    )
    axis.plot(
        found["token"],
        found["step_growing_median"],
        color="C1",
        linewidth=1.1,
        linestyle="--",
        label="context growing (Prop. 3.1)",
    )
    axis.set_yscale("log")
    axis.set_xlabel("token i")
    axis.set_ylabel("Frobenius norm, median")
    axis.set_title("change of W by one token", fontsize=11)
    axis.legend(frameon=False, fontsize=8)


def _factor_sizes(axis: Axes, found: dict[str, Any]) -> None:
    axis.plot(
        found["token"],
        found["size_median"],
        color="C0",
        linewidth=1.4,
        label=r"$W_0\,\Pi(1 + h_j A_j)$, absorbed from $c_1$ on",
    )
    axis.plot(
        found["token"],
        found["size_growing_median"],
        color="C1",
        linewidth=1.1,
        linestyle="--",
        label="context growing (Prop. 3.1)",
    )
    axis.set_xlabel("token i")
    axis.set_ylabel(r"$\|W_i - W_0\|$, median")
    axis.set_title("change of W so far", fontsize=11)
    axis.legend(frameon=False, fontsize=8)


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
    draw,
    measured,
)
