"""Draw the pictures of the results files."""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

PICTURES = {
    "linear": ("F.linear", ("dtype",), "matrix", "rows"),
    "generation": ("plain step", ("model", "batch"), "call", "context"),
}
"""The call whose time is 1, and what names the panels, the lines and the x axis."""

Points = dict[str, dict[str, dict[int, float]]]
"""Times over the baseline's, by panel, line and x."""


def draw(data: dict[str, Any], folder: Path) -> list[Path]:
    """Draw times over a baseline's as SVG, named after the file, with the same bytes for the same
    numbers; a benchmark without a picture, or with one value a line, has none.

    Args:
        data: a results file, see :func:`icl_patch.bench.results.load_all`.
        folder: receives the picture.
    """
    if data["benchmark"] not in PICTURES:
        return []
    baseline, _, _, x_name = PICTURES[data["benchmark"]]
    panels = {
        panel: lines
        for panel, lines in _points(data).items()
        if any(len(values) > 1 for values in lines.values())
    }
    if not panels:
        return []
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    figure = Figure(figsize=(4 + 3.6 * len(panels), 5.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
        for number, name in enumerate(names):
            values = sorted(lines.get(name, {}).items())
            style = {"color": f"C{number % 10}", "marker": "osD^vP*X"[number // 10 % 8]}
            axis.plot([x for x, _ in values], [y for _, y in values], label=name, **style)
        axis.axhline(1, color="0.4", linewidth=1, linestyle="--")
        axis.set_xscale("log", base=2)
        axis.set(title=panel, xlabel=x_name)
        axis.grid(alpha=0.3)
    axes[0].set(yscale="log", ylabel=f"time over that of {baseline}")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.suptitle(data["environment"]["device"])
    path = folder / f"{data['file']}.svg"
    with rc_context({"svg.hashsalt": "icl-patch", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    return [path]


def _points(data: dict[str, Any]) -> Points:
    baseline, panel_names, line_name, x_name = PICTURES[data["benchmark"]]
    rows = [row for row in data["rows"] if "seconds" in row]
    base = {row["case"]: row["seconds"]["median"] for row in rows if row["call"] == baseline}
    points: Points = {}
    for row in rows:
        values = row["parameters"] | {"call": row["call"]}
        of_line = line_name == "call" or (row["ours"] and values["rank"] == 1)
        if of_line and row["case"] in base:
            panel = ", ".join(f"{name} {values[name]}" for name in panel_names)
            line = points.setdefault(panel, {}).setdefault(values[line_name], {})
            line[values[x_name]] = row["seconds"]["median"] / base[row["case"]]
    return points
