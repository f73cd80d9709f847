"""Draw the README's picture, two streams and one replay, for light and dark pages.

build/python tools/readme_picture.py            # writes docs/pictures/streams-{light,dark}.svg
build/python tools/readme_picture.py --png DIR  # the same as PNG, on the page's colour
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SIDE = 0.42
PATCH = """the patch: for each question token, the difference
between its two streams, as a change of the weights"""


@dataclass(frozen=True)
class Theme:
    """The colours of a page."""

    page: str
    text: str
    faint: str
    context: str
    question: str
    model: str
    patch: str


THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#818b98", "#54aeff", "#fb8f44", "#eff2f5", "#4ac26b"),
    "dark": Theme("#0d1117", "#e6edf3", "#7d8590", "#1f6feb", "#bd561d", "#21262d", "#238636"),
}


def box(
    axis: Axes, x: float, y: float, w: float, h: float, face: str, edge: str, **style: Any
) -> None:
    """A rounded box with its lower left corner at (x, y)."""
    shape = FancyBboxPatch(
        (x, y), w, h, boxstyle="round,pad=0,rounding_size=0.06", facecolor=face, edgecolor=edge,
        **({"linewidth": 1.0} | style),
    )  # fmt: skip
    axis.add_patch(shape)


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """A straight arrow."""
    axis.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=colour, lw=1.4)
    )


def tokens(axis: Axes, theme: Theme, x: float, y: float, context: bool) -> None:
    """Four context tokens, dashed where they are hidden, and two of the question."""
    for place in range(6):
        left = x + place * (SIDE + 0.08) + (0.12 if place >= 4 else 0)
        if place >= 4:
            box(axis, left, y, SIDE, SIDE, theme.question, theme.question)
        elif context:
            box(axis, left, y, SIDE, SIDE, theme.context, theme.context)
        else:
            box(axis, left, y, SIDE, SIDE, "none", theme.faint, linestyle=(0, (3, 2)))


def compute_panel(axis: Axes, theme: Theme) -> None:
    """The run of the model that computes a patch."""
    text = {"color": theme.text, "fontsize": 11}
    axis.text(0, 4.62, "compute: two streams", weight="bold", **text | {"fontsize": 13})
    box(axis, 3.75, 1.75, 2.1, 2.35, theme.model, theme.faint)
    axis.text(4.8, 2.93, "the model,\nunchanged", ha="center", va="center", **text)
    for y, label, context in (
        (3.4, "context and question", True),
        (2.05, "the same, context not visible", False),
    ):
        tokens(axis, theme, 0, y, context)
        axis.text(0, y + SIDE + 0.13, label, **text)
        arrow(axis, (3.15, y + SIDE / 2), (3.75, y + SIDE / 2), theme.text)
    arrow(axis, (5.85, 3.61), (6.35, 3.61), theme.text)
    axis.text(6.42, 3.61, "logits", va="center", **text)
    arrow(axis, (4.8, 1.75), (4.8, 1.2), theme.patch)
    box(axis, 2.2, 0.3, 5.2, 0.9, theme.patch, theme.patch)
    axis.text(
        4.8, 0.75, PATCH, ha="center", va="center", fontsize=10.5,
        color="#ffffff" if theme.page != "#ffffff" else theme.text,
    )  # fmt: skip


def replay_panel(axis: Axes, theme: Theme, left: float) -> None:
    """The replay of the question without the context."""
    text = {"color": theme.text, "fontsize": 11}
    axis.text(left, 4.62, "forward: one replay", weight="bold", **text | {"fontsize": 13})
    for place in range(2):
        box(axis, left + place * 0.5, 2.72, SIDE, SIDE, theme.question, theme.question)
    axis.text(left, 3.27, "question alone", **text)
    arrow(axis, (left + 1.0, 2.93), (left + 1.5, 2.93), theme.text)
    box(axis, left + 1.5, 1.75, 2.1, 2.35, theme.model, theme.patch, linewidth=2.2)
    axis.text(left + 2.55, 2.93, "the model\n+ patch", ha="center", va="center", **text)
    arrow(axis, (left + 3.6, 2.93), (left + 4.1, 2.93), theme.text)
    axis.text(left + 4.17, 2.93, "the same\nlogits", va="center", **text)
    axis.plot([7.4, left + 2.55], [0.75, 0.75], color=theme.patch, lw=1.4)
    arrow(axis, (left + 2.55, 0.75), (left + 2.55, 1.75), theme.patch)
    axis.text(left, 2.28, "at its positions,\nno context,\nno cache of it", va="center", **text)


def draw(theme: Theme) -> Figure:
    """The whole picture."""
    figure = Figure(figsize=(11.4, 4.3), facecolor=theme.page)
    axis = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axis.set(xlim=(-0.1, 13.2), ylim=(0.1, 5.0))
    axis.set_axis_off()
    compute_panel(axis, theme)
    axis.plot([7.62, 7.62], [1.6, 4.8], color=theme.faint, lw=0.8)
    replay_panel(axis, theme, 8.0)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the README's picture.")
    parser.add_argument("--png", type=Path, metavar="DIR", help="write PNG files there instead")
    options = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "icl-patch"  # the same picture gives the same file
    for name, theme in THEMES.items():
        figure = draw(theme)
        if options.png:
            figure.savefig(options.png / f"streams-{name}.png", dpi=90)
        else:
            FOLDER.mkdir(exist_ok=True)
            figure.savefig(
                FOLDER / f"streams-{name}.svg", transparent=True, metadata={"Date": None}
            )
