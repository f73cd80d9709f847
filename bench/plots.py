"""Draw the pictures of the results files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Point = tuple[str, str, int, float]
"""A value: the title of its panel, the name of its line, x and y."""


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw a results file's pictures as PNG and SVG, named after the file; several benchmarks have
    none.

    Args:
        results: a results file, see :func:`icl_patch.bench.results.load_all`.
        folder: receives the pictures.
    """
    pictures = {"linear": _linear, "generation": _generation}.get(results["benchmark"])
    written = []
    for name, figure in pictures(results) if pictures else ():
        written += _save(figure, folder / f"{results['file']}-{name}")
    return written


def _linear(results: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """The share of the bandwidth and the ratio to ``F.linear`` by rows, a panel for each dtype."""
    rows = [row for row in results["rows"] if "seconds" in row and row["parameters"]["rank"] == 1]
    plain = {row["case"]: row["seconds"]["median"] for row in rows if row["call"] == "F.linear"}
    bandwidth: list[Point] = []
    ratio: list[Point] = []
    for row in rows:
        if row["ours"]:
            parameters = row["parameters"]
            place = (parameters["dtype"], parameters["matrix"], parameters["rows"])
            bandwidth.append((*place, row["of ceiling"]))
            if row["case"] in plain:
                ratio.append((*place, row["seconds"]["median"] / plain[row["case"]]))
    title = f"patched_linear, rank 1: {_device(results)}"
    for name, label, points in (
        ("bandwidth", "share of the bandwidth measured there", bandwidth),
        ("ratio", "time over that of F.linear", ratio),
    ):
        if points:
            figure, axes = _figure(points, title, "rows M", label)
            for axis in axes:
                axis.set_ylim(bottom=0)
                axis.axhline(1, color="0.4", linewidth=1, linestyle="--")
            yield name, figure


def _generation(results: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """The time of a decode step of each model by the context's length and by the batch."""
    rows = [row for row in results["rows"] if "seconds" in row]
    labels = {"context": "tokens of context", "batch": "batch"}
    for model in dict.fromkeys(row["parameters"]["model"] for row in rows):
        for along, across in (("context", "batch"), ("batch", "context")):
            points = [
                (
                    f"{across} {row['parameters'][across]}",
                    row["call"],
                    row["parameters"][along],
                    1e3 * row["seconds"]["median"],
                )
                for row in sorted(rows, key=lambda row: row["parameters"][across])
                if row["parameters"]["model"] == model
            ]
            panels = {panel for panel, *_ in points}
            drawn = {p for p in panels if len({x for panel, _, x, _ in points if panel == p}) > 1}
            if points := [point for point in points if point[0] in drawn]:
                title = f"{model}, random weights: {_device(results)}"
                label = "ms a step (one token for every row)"
                figure, axes = _figure(points, title, labels[along], label)
                axes[0].set_yscale("log")
                yield f"{model.lower().replace(' ', '-')}-{along}", figure


def _figure(
    points: Sequence[Point], title: str, x_label: str, y_label: str
) -> tuple[Figure, Sequence[Axes]]:
    """A figure of lines over a logarithmic x, with a panel for each title, and its panels."""
    panels = list(dict.fromkeys(panel for panel, *_ in points))
    styles = _styles(list(dict.fromkeys(line for _, line, *_ in points)))
    figure = Figure(figsize=(max(8.0, 3.4 + 3.6 * len(panels)), 5.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    ticks = sorted({x for _, _, x, _ in points})
    for axis, panel in zip(axes, panels, strict=True):
        for line, style in styles.items():
            values = sorted((x, y) for p, name, x, y in points if (p, name) == (panel, line))
            axis.plot(*zip(*values, strict=True) if values else ([], []), label=line, **style)
        axis.set_title(panel, fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, map(str, ticks))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.set_xlabel(x_label)
    axes[0].set_ylabel(y_label)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.suptitle(title, fontsize=11)
    return figure, axes


def _device(results: dict[str, Any]) -> str:
    environment = results["environment"]
    threads = f", {environment['threads']} threads" if environment["cuda"] is None else ""
    return f"{environment['device']}{threads}"


def _styles(lines: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour for each kind of line (its name up to the comma); strokes and markers for the forms
    of a kind.
    """
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(line.split(",")[0], []).append(line)
    return {
        line: {
            "color": f"C{number % 10}",
            "linestyle": ("-", "--", ":", "-.")[form % 4],
            "marker": "osD^vP*X"[(form + number // 10) % 8],
            "markersize": 5,
            "linewidth": 2.4 if number == 0 else 1.2,
        }
        for number, forms in enumerate(kinds.values())
        for form, line in enumerate(forms)
    }


def _save(figure: Figure, path: Path) -> list[Path]:
    """As PNG and SVG, with the same bytes for the same numbers."""
    written = [path.with_name(f"{path.name}{suffix}") for suffix in (".png", ".svg")]
    with rc_context({"svg.hashsalt": "icl-patch", "svg.fonttype": "none"}):
        figure.savefig(written[0], dpi=130, metadata={"Software": None})
        figure.savefig(written[1], metadata={"Date": None})
    return written
