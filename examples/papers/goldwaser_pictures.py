"""Figure 5 of Goldwaser et al. and what moves bf16, drawn from their numbers, and the page that
holds them beside the paper's claims.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from figure_page import FigurePage, table
from goldwaser_experiments import LAZY, MERGED
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from icl_patch.evaluation.figures import visible
from icl_patch.evaluation.report import percent

matplotlib.use("Agg")

TITLES = {
    "5": "Figure 5: an image in the context",
    "held": "What moves the agreement in bf16",
}
CLAIMS = {
    "5": "the method continues to work with an image as part of the context",
    "held": (
        "the plain update divides by numbers near 0, hence extreme sensitivity to data type and"
        " platform; the stable one mitigates it"
    ),
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
PAPER = {("bfloat16", "direct"): 87.5, ("bfloat16", "stable"): 98}
COLOURS = {"direct": "#d95f02", "stable": "#1f78b4", "exact": "#1b9e77"}
_MEASURES = {"linf": "L∞ of logits / max |logit|", "tvd": "total variation distance"}
_TOP, _LOWEST = 30.0, -14  # of the logarithmic axes; the exponent is that of the curves


def draw(name: str, numbers: dict[str, Any], path: Path) -> None:
    """Draw a figure from the numbers of :mod:`goldwaser_experiments`."""
    figure = {"5": _figure_5, "held": _held}[name](numbers)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def dtypes_of(groups: Iterable[dict[str, Any]]) -> list[str]:
    """The dtypes that were measured, in order."""
    return list(dict.fromkeys(group["dtype"] for group in groups))


def _logarithmic(axis: Axes, lowest: int) -> float:
    """A logarithmic axis from ``10**lowest``, below it a strip for exact zeros; returns where in
    the strip a zero is drawn.
    """
    axis.set_yscale("log")
    bottom, zero = 10 ** (1.12 * lowest), 10 ** (1.06 * lowest)
    axis.set_ylim(bottom, _TOP)
    decades = range(lowest, 2, 2)
    axis.set_yticks(
        [zero, *(10.0**decade for decade in decades)],
        ["0", *(f"$10^{{{decade}}}$" for decade in decades)],
    )
    axis.minorticks_off()
    axis.axhspan(bottom, 10 ** (1.01 * lowest), color="0.93", zorder=0)
    axis.grid(alpha=0.3)
    return zero


def _curves(axes: Any, curves: list[dict[str, Any]]) -> None:
    """A row of panels a dtype, a column a measure."""
    for row, dtype in zip(axes, dtypes_of(curves), strict=True):
        own = [curve for curve in curves if curve["dtype"] == dtype]
        for axis, (measure, label) in zip(row, _MEASURES.items(), strict=True):
            zero = _logarithmic(axis, _LOWEST)
            for curve in own:
                _curve(axis, curve, measure, zero)
            axis.axhline(
                own[0]["noise_floor"][f"{measure}_max"], linestyle=":", linewidth=1.3, color="0.4"
            )
            axis.set_ylabel(f"{DTYPES[dtype]}: {label}")
            tokens = own[0]["tokens"]
            axis.set_xticks(range(len(tokens)), [visible(token) for token in tokens])
            axis.tick_params(axis="x", labelrotation=90, labelsize=8, labelfontfamily="monospace")
            axis.margins(x=0.01)


def _curve(axis: Axes, curve: dict[str, Any], measure: str, zero: float) -> None:
    lazy = curve["held"] == LAZY
    values = [
        _TOP / 2 if value is None else max(value, 10**_LOWEST) if value else zero
        for value in curve[measure]
    ]
    style: dict[str, Any] = (
        {"linewidth": 1.5, "marker": "o"}
        if lazy
        else {"linewidth": 1.0, "marker": "^", "linestyle": "--", "alpha": 0.8}
    )
    axis.plot(values, color=COLOURS[curve["update"]], markersize=3.5, **style)
    wrong = [place for place, match in enumerate(curve["match"]) if not match]
    axis.plot(
        wrong,
        [values[place] for place in wrong],
        "X",
        color="red",
        markersize=7,
        markeredgecolor="white",
        zorder=5,
    )


def _legend(figure: Figure) -> None:
    """The legend of colours and marks, above all panels."""
    handles = [
        plt.Line2D([], [], color=color, marker="o", markersize=4, label=update)
        for update, color in COLOURS.items()
    ]
    handles += [
        plt.Line2D(
            [],
            [],
            color=COLOURS[update],
            marker="^",
            markersize=4,
            linestyle="--",
            label=f"{update}, merged into the weights",
        )
        for update in ("direct", "stable")
    ]
    handles.append(
        plt.Line2D(
            [],
            [],
            color="0.4",
            linestyle=":",
            label="noise floor: the untouched model against itself",
        )
    )
    handles.append(plt.Line2D([], [], color="red", marker="X", linestyle="", label="another token"))
    figure.legend(
        handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9
    )


def _figure_5(numbers: dict[str, Any]) -> Figure:
    rows = len(dtypes_of(numbers["curves"]))
    figure = plt.figure(figsize=(16, 1.5 + 3.2 * rows), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 4.6))
    axes = left.subplots(max(rows, 2), 1)
    axes[0].imshow(numbers["image"])
    axes[0].set_title("the image in the context", fontsize=10)
    axes[0].set_axis_off()
    for axis in axes[1:]:
        axis.set_axis_off()
    if "answers_right" in numbers:
        _answers(axes[1], numbers["answers_right"])
    panels = right.subplots(rows, 2, squeeze=False)
    _curves(panels, numbers["curves"])
    right.supxlabel(f"generated tokens, after the image and {numbers['question']!r}", fontsize=10)
    _legend(figure)
    return figure


def _answers(axis: Axes, right: dict[str, dict[str, float]]) -> None:
    axis.set_axis_on()
    bars = {
        "with_image": "its image",
        "with_another_image": "another image",
        "without_image": "no image",
        "chance": "chance",
    }
    means = [sum(shares[name] for shares in right.values()) / len(right) for name in bars]
    drawn = axis.barh(
        list(bars.values()), [100 * mean for mean in means], color=["C0", "0.6", "0.6", "0.8"]
    )
    axis.bar_label(drawn, [f"{100 * mean:.1f} %" for mean in means], padding=3, fontsize=9)
    axis.set_xlim(0, 130)
    axis.invert_yaxis()
    axis.set_title("held-out questions answered right,\nby what the model sees", fontsize=10)
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def _boxes(axis: Axes, groups: list[dict[str, Any]], measure: str) -> None:
    """A line from the smallest to the largest value of each group, a bar for the middle half, and
    the median.
    """
    zero = _logarithmic(axis, -10)
    for place, group in enumerate(groups):
        found, color = group[measure], COLOURS[group["update"]]
        if found["median"] is not None:
            least, lower, median, upper, most = (
                max(found[name], 1e-10) if found[name] else zero
                for name in ("min", "lower", "median", "upper", "max")
            )
            axis.vlines(place, least, most, color=color, linewidth=2)
            axis.vlines(place, lower, upper, color=color, linewidth=18, alpha=0.6)
            axis.hlines(median, place - 0.3, place + 0.3, color="black", linewidth=1.3)
        if found["not_finite"]:
            axis.text(place, _TOP / 1.3, "∞", ha="center", va="top", color="red", fontsize=13)
    axis.set_xlim(-0.6, len(groups) - 0.4)
    axis.set_ylabel(_MEASURES[measure])


def _agreement(axis: Axes, groups: list[dict[str, Any]]) -> None:
    """Bars of the share of tokens that agree; the paper's shares over the bars that they are of."""
    shares = [100 * group["token_match"] for group in groups]
    bars = axis.bar(
        range(len(groups)),
        shares,
        color=[COLOURS[group["update"]] for group in groups],
        alpha=0.75,
        width=0.7,
    )
    axis.bar_label(
        bars,
        [percent(group["token_match"]).removesuffix(" %") for group in groups],
        fontsize=9,
        padding=2,
    )
    papers = [PAPER.get((group["dtype"], group["update"])) for group in groups]
    for place, share in enumerate(papers):
        if share is not None:
            axis.hlines(share, place - 0.46, place + 0.46, color="black", linestyle="--")
    lowest = min(shares + [share for share in papers if share is not None])
    axis.set_ylim(80 if lowest > 82 else 0, 103 if lowest > 82 else 112)
    axis.set_ylabel("tokens that agree, %")
    axis.grid(alpha=0.3, axis="y")


def _paper_handle() -> Any:
    shares = ", ".join(f"{update} {share} %" for (_, update), share in PAPER.items())
    label = f"the paper, Gemma 3 1B, bf16: {shares}"
    return plt.Line2D([], [], color="black", linestyle="--", label=label)


def _held(numbers: dict[str, Any]) -> Figure:
    groups = [group for group in numbers["groups"] if group["dtype"] == "bfloat16"]
    names = list(dict.fromkeys(group["held"] for group in groups))
    groups = [group for name in names for group in groups if group["held"] == name]
    figure, axes = plt.subplots(
        2, 1, sharex=True, figsize=(13, 9), layout="constrained", height_ratios=(3, 2)
    )
    _boxes(axes[0], groups, "linf")
    _agreement(axes[1], groups)
    each = len(groups) // len(names)
    labels = [name.replace(", ", ",\n", 1).replace("before it", "\nbefore it") for name in names]
    axes[1].set_xticks([place * each + (each - 1) / 2 for place in range(len(names))], labels)
    for axis in axes:
        for place in range(1, len(names)):
            axis.axvline(place * each - 0.5, color="0.7", linewidth=0.8)
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=color, alpha=0.75, label=f"{update}, bf16")
        for update, color in COLOURS.items()
    ]
    handles.append(plt.Line2D([], [], color="black", label="median; the middle half; all"))
    handles.append(_paper_handle())
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return figure


# -- words


def _of(groups: Iterable[dict[str, Any]], **wanted: str) -> dict[str, Any]:
    """The one group with these entries."""
    [found] = [
        group for group in groups if all(group[name] == value for name, value in wanted.items())
    ]
    return found


def measured(name: str, numbers: dict[str, Any]) -> str:
    """The line that stands beside the paper's claim: numbers only."""
    if name == "5":
        match = [same for curve in numbers["curves"] for same in curve["match"]]
        agreeing = f"{sum(match)} of {len(match)} tokens agree, over all dtypes and updates"
        return agreeing + (_images(numbers) if "groups" in numbers else "")
    rows = []
    for held in (LAZY, MERGED):
        shares = {
            update: _of(numbers["groups"], dtype="bfloat16", update=update, held=held)[
                "token_match"
            ]
            for update in COLOURS
        }
        rows.append(
            f"{held}: "
            + ", ".join(f"{update} {percent(share)}" for update, share in shares.items())
        )
    return (
        f"tokens that agree in bf16, of {numbers['groups'][0]['tokens']} in"
        f" {numbers['generations']} generations: " + "; ".join(rows)
    )


def worst_table(numbers: dict[str, Any]) -> str:
    """The largest L∞ by dtype and update, as a Markdown table."""
    curves = numbers["curves"]
    names = {curve["update"] + " merged" * (curve["held"] != LAZY): "" for curve in curves}
    rows = [
        [DTYPES[dtype]]
        + [
            "not finite" if None in curve["linf"] else _short(max(curve["linf"]))
            for curve in curves
            if curve["dtype"] == dtype
        ]
        for dtype in dtypes_of(curves)
    ]
    return table(["largest L∞", *names], rows)


def _images(numbers: dict[str, Any]) -> str:
    right = numbers["answers_right"].values()
    shares = {
        name: sum(entry[name] for entry in right) / len(right)
        for name in ("with_image", "with_another_image", "without_image", "chance")
    }
    replayed = [group["replay_right"] for group in numbers["groups"]]
    shown = " to ".join(dict.fromkeys(percent(share) for share in (min(replayed), max(replayed))))
    return (
        f"; answers right on held-out scenes: {percent(shares['with_image'])} with the image,"
        f" {percent(shares['with_another_image'])} with another scene's,"
        f" {percent(shares['without_image'])} with none (chance {percent(shares['chance'])}); whole"
        f" answers that a replay without the image gives right: {shown}"
    )


def held_table(numbers: dict[str, Any]) -> str:
    """Agreement and median L∞ in bf16 by how the patch is held, as a Markdown table."""
    groups = [group for group in numbers["groups"] if group["dtype"] == "bfloat16"]
    rows = [
        [name]
        + [_agreeing(_of(groups, dtype="bfloat16", update=update, held=name)) for update in COLOURS]
        for name in dict.fromkeys(group["held"] for group in groups)
    ]
    same = _agreeing(_of(numbers["untouched"], dtype="bfloat16"))
    rows.append(["no patch: the untouched model, one pass against token by token", same, "", ""])
    return table(["the patch is held", *COLOURS], rows)


def _agreeing(group: dict[str, Any]) -> str:
    return f"{percent(group['token_match'])}, {_short(group['linf']['median'])}"


def _short(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _more(name: str, numbers: dict[str, Any]) -> str:
    if name == "5":
        return worst_table(numbers)
    return "Share of tokens that agree in bf16, and median L∞:\n\n" + held_table(numbers)


PAGE = FigurePage(
    "context-parameter-equivalence.md",
    "The experiments of Goldwaser et al.",
    Path(__file__).with_name("goldwaser_notes.md"),
    CLAIMS,
    TITLES.__getitem__,
    "goldwaser-{}".format,
    draw,
    measured,
    _more,
)
