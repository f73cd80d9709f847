"""The pictures of the page on a pretrained model, drawn from its numbers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from goldwaser_experiments import LAZY
from goldwaser_pictures import DTYPES, logarithmic
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from real_fidelity import KEPT, NOISE, REPLAYS, RUNS
from real_page import runs_shown

from icl_patch.evaluation.figures import visible

COLOURS = {
    "exact": "#1b9e77",
    "stable": "#1f78b4",
    "direct": "#d95f02",
    KEPT: "#7570b3",
    "two rows": "0.75",
    "no cache": "0.55",
    "token by token": "0.35",
}
LABELS = {name: f"the model itself, {name}" if name in NOISE else name for name in RUNS}


def draw(numbers: dict[str, Any], folder: Path) -> None:
    """Draw every picture as a PNG."""
    for name, picture in PICTURES.items():
        figure = picture(numbers)
        figure.savefig(folder / f"real-model-{name}.png", dpi=100, metadata={"Software": None})
        plt.close(figure)


def _figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    return plt.subplots(rows, columns, squeeze=False, figsize=size, layout="constrained", **options)


def dependence(numbers: dict[str, Any]) -> Figure:
    """Errors by block, by place among the kept tokens and by the context's length."""
    dtypes = list(numbers["by_block"])
    figure, axes = _figure(3, len(dtypes), (4.6 * len(dtypes), 10.5))
    for column, dtype in enumerate(dtypes):
        for run in runs_shown(numbers):
            style = {"color": COLOURS[run], "label": LABELS[run]}
            blocks = np.array(numbers["by_block"][dtype][run])
            _band(axes[0, column], range(len(blocks)), blocks, **style)
            places = numbers["by_place"][dtype]
            rows = [(x, y) for x, y in zip(places["from"], places[run], strict=True) if y]
            _band(
                axes[1, column], [x + 1 for x, _ in rows], np.array([y for _, y in rows]), **style
            )
            # the noise has no place there: for most lengths it is 0, as the calls are the same
            if run in REPLAYS and (lengths := numbers["by_length"][dtype].get(run)):
                linf = np.array([entry["linf"][:2] for entry in lengths])
                _band(axes[2, column], [entry["length"] for entry in lengths], linf, **style)
        axes[0, column].set_title(DTYPES[dtype])
        axes[0, column].set_xlabel("block")
        axes[1, column].set_xlabel("place among the kept tokens (bins), from 1")
        axes[2, column].set_xlabel("tokens of the context")
        for axis in axes[1:, column]:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        for axis in axes[:, column]:
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("relative error of the block's output")
    for axis in axes[1:, 0]:
        axis.set_ylabel("L∞ / max |logit|")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


def _band(axis: Axes, x: Sequence[float], values: np.ndarray, color: str, label: str) -> None:
    """The median as a line, up to the 90 % quantile as a band; nothing for exact zeros."""
    if not len(values) or not values.any():
        return
    axis.plot(x, values[:, 0], color=color, label=label, marker=".", markersize=4)
    axis.fill_between(x, values[:, 0], values[:, 1], color=color, alpha=0.15, linewidth=0)


def sensitivity(numbers: dict[str, Any]) -> Figure:
    """The attention sink, and the growth of a disturbance."""
    figure, axes = _figure(1, 2, (12, 4.4))
    axis = axes[0, 0]
    low, middle, high = 100 * np.array(numbers["attention"]["by_block"]).T
    axis.plot(middle, color="0.3")
    axis.fill_between(range(len(middle)), low, high, color="0.3", alpha=0.15, linewidth=0)
    axis.set_xlabel("block")
    axis.set_ylabel("attention on the text's first token, %")
    axis.set_ylim(0, 100)
    axis = axes[0, 1]
    colours = ("0.3", "0.65", COLOURS["exact"], COLOURS[KEPT])
    for (name, values), colour in zip(numbers["disturbed"].items(), colours, strict=True):
        low, middle, high = np.array(values).T
        axis.plot(middle, color=colour, label=name)
        axis.fill_between(range(len(middle)), low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set_yscale("log")
    axis.set_xlabel("block")
    axis.set_ylabel("disturbance, relative; 1 after block 0")
    axis.legend(fontsize=9)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    return figure


def changes(numbers: dict[str, Any]) -> Figure:
    """Sizes of the changes by block, and the space that they span."""
    sizes, spans = numbers["sizes"], numbers["spanned"]
    modules = list(sizes["exact"])
    figure, axes = _figure(2, len(modules), (4.6 * len(modules), 7.6), sharey="row", sharex=True)
    for column, module in enumerate(modules):
        axis = axes[0, column]
        for run, colour, name in (
            ("exact", COLOURS["exact"], "all of the context absorbed"),
            (KEPT, COLOURS[KEPT], "its first token kept"),
        ):
            low, middle, high = np.array(sizes[run][module]["quantiles"]).T
            axis.plot(middle, color=colour, label=name)
            axis.fill_between(range(len(middle)), low, high, color=colour, alpha=0.15, linewidth=0)
            axis.plot(
                sizes[run][module]["first"],
                ":",
                color=colour,
                label=f"{name}: first of the kept tokens",
            )
        axis.set_yscale("log")
        axis.set_title(module)
        axis = axes[1, column]
        for prefix, colour in (("0", COLOURS["exact"]), ("1", COLOURS[KEPT])):
            directions = np.array(spans[prefix][f"{module}/directions per token"])
            for index, (style, name) in enumerate(((":", "50 %"), ("-", "90 %"), ("--", "99 %"))):
                axis.plot(100 * directions[:, index], style, color=colour, label=name)
        axis.set_xlabel("block")
        axis.set_ylim(0, 105)
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("‖ΔW‖ / ‖W‖: median, 5 to 95 % of tokens")
    axes[1, 0].set_ylabel("directions that hold 50, 90, 99 %\nof the squared norm, % of the tokens")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False
    )
    axes[1, 0].legend(*(x[:3] for x in axes[1, 0].get_legend_handles_labels()), fontsize=9)
    return figure


def growth(numbers: dict[str, Any]) -> Figure:
    """Steps of the weights, and the answers, as a few-shot context grows."""
    figure, axes = _figure(1, 2, (12, 4.4))
    for (name, found), colour in zip(
        numbers["grown"].items(), (COLOURS["exact"], "0.5"), strict=True
    ):
        low, middle, high = np.array(found["steps"]).T
        pairs = range(1, len(middle) + 1)
        axes[0, 0].plot(pairs, middle, color=colour, marker=".", label=f"{name} answers")
        axes[0, 0].fill_between(pairs, low, high, color=colour, alpha=0.15, linewidth=0)
        axes[0, 1].plot(found["right"], color=colour, marker=".", label=f"{name} answers")
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("step / whole change, quartiles")
    axes[0, 1].set_ylabel("mean probability of the right answer")
    axes[0, 1].set_ylim(0, 1)
    for axis in axes[0]:
        axis.set_xlabel("pairs in the context")
        axis.grid(alpha=0.3)
        axis.legend()
    return figure


def protocol(numbers: dict[str, Any]) -> Figure:
    """The paper's prompt, token by token."""
    dtypes = list(numbers["protocol"])
    figure, axes = _figure(len(dtypes), 1, (13, 1.2 + 2.9 * len(dtypes)))
    for (axis,), dtype in zip(axes, dtypes, strict=True):
        found, zero = numbers["protocol"][dtype], logarithmic(axis, -8)
        for curve, errors in zip(found["curves"], found["first"]["errors"], strict=True):
            match, linf, _ = np.array(errors).T
            drawn = np.where(linf > 0, linf, zero)
            colour = COLOURS[
                KEPT if curve["kept"] and curve["update"] != "exact" else curve["update"]
            ]
            style = "-" if curve["held"] == LAZY else "--"
            label = _named(curve)
            if curve["update"] == "exact" and curve["kept"]:
                continue  # on the line of zeros, as without it
            axis.plot(drawn, style, color=colour, marker="o", markersize=3, label=label)
            wrong = np.flatnonzero(match == 0)
            axis.plot(wrong, drawn[wrong], "X", color="red", markersize=7, zorder=5)
        tokens = [visible(token) for token in found["first"]["tokens"]]
        axis.set_xticks(range(len(tokens)), tokens, rotation=60, ha="right", fontsize=8)
        axis.set_ylabel(f"{DTYPES[dtype]}: L∞ / max |logit|")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    handles.append(plt.Line2D([], [], color="red", marker="X", ls="", label="another token"))
    figure.legend(
        handles, [*labels, "another token"], loc="outside upper center", ncols=3, frameon=False
    )
    return figure


def _named(curve: dict[str, Any]) -> str:
    kept = ", first token kept" if curve["kept"] else ""
    return f"{curve['update']}{kept}" + (
        "" if curve["held"] == LAZY else ", merged into the weights"
    )


PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "dependence": dependence,
    "sensitivity": sensitivity,
    "protocol": protocol,
    "changes": changes,
    "growth": growth,
}
