"""Figure 5 of Goldwaser et al. and what moves bf16, drawn from their numbers, and the page that
holds them beside the paper's claims.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from figure_page import FigurePage
from goldwaser_experiments import LAZY, MERGED
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from icl_patch.evaluation.figures import visible
from icl_patch.evaluation.report import markdown as table
from icl_patch.evaluation.report import percent

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
_TOP, _LOWEST = 30.0, -14  # of the logarithmic axes; the lowest is an exponent


def dtypes_of(groups: Iterable[dict[str, Any]]) -> list[str]:
    """The dtypes that were measured, in order."""
    return list(dict.fromkeys(group["dtype"] for group in groups))


def logarithmic(axis: Axes, lowest: int) -> float:
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
            zero = logarithmic(axis, _LOWEST)
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
    axis = left.subplots()
    axis.imshow(numbers["image"])
    axis.set_title("the image in the context", fontsize=10)
    axis.set_axis_off()
    panels = right.subplots(rows, 2, squeeze=False)
    _curves(panels, numbers["curves"])
    right.supxlabel(f"generated tokens, after the image and {numbers['question']!r}", fontsize=10)
    _legend(figure)
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
    {"5": _figure_5},
    110,
    measured,
    _more,
)
