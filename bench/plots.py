"""Draw the pictures of the results files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

DTYPES = ("bfloat16", "float16", "float32")


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """The share of the bandwidth by shape and the ratio to ``F.linear`` by rows, as PNG and SVG.

    Args:
        results: a results file of the benchmark ``linear``, see
            :func:`icl_patch.bench.results.load_all`.
        folder: where the pictures are written, named after the file.
    """
    ours = [
        row
        for row in results["rows"]
        if row["ours"] and "seconds" in row and row["parameters"]["rank"] == 1
    ]
    plain = {
        row["case"]: row
        for row in results["rows"]
        if row["call"] == "F.linear" and "seconds" in row
    }
    if not ours:
        return []
    title = _device(results)
    written = _save(_bandwidth(ours, title), folder / f"{results['file']}-bandwidth")
    ratios = {
        row["case"]: row["seconds"]["median"] / plain[row["case"]]["seconds"]["median"]
        for row in ours
        if row["case"] in plain
    }
    return written + _save(
        _ratios([row for row in ours if row["case"] in ratios], ratios, title),
        folder / f"{results['file']}-ratio",
    )


def draw_steps(results: dict[str, Any], folder: Path) -> list[Path]:
    """The time of a decode step against the context's length and against the batch, as PNG and SVG:
    two pictures for each model.

    Args:
        results: a results file of the benchmark ``generation``.
        folder: where the pictures are written, named after the file and the model.
    """
    rows = [row for row in results["rows"] if "seconds" in row]
    written = []
    for model in dict.fromkeys(row["parameters"]["model"] for row in rows):
        mine = [row for row in rows if row["parameters"]["model"] == model]
        for along, across in (("context", "batch"), ("batch", "context")):
            if panels := _with_lines(mine, along, across):
                figure = _steps(
                    mine, f"{model}, random weights: {_device(results)}", along, across, panels
                )
                written += _save(figure, folder / f"{results['file']}-{model.lower()}-{along}")
    return written


def _device(results: dict[str, Any]) -> str:
    environment = results["environment"]
    return (
        f"{environment['device']}, {environment['threads']} threads"
        if environment["cuda"] is None
        else str(environment["device"])
    )


def _with_lines(rows: list[dict[str, Any]], along: str, across: str) -> list[int]:
    """The values of one parameter at which there is more than one value of the other."""
    values: dict[int, set[int]] = {}
    for row in rows:
        values.setdefault(row["parameters"][across], set()).add(row["parameters"][along])
    return sorted(value for value, others in values.items() if len(others) > 1)


def _steps(
    rows: list[dict[str, Any]], title: str, along: str, across: str, panels: list[int]
) -> Figure:
    """Milliseconds along one parameter: a line for each way, a panel for each other value."""
    ticks = sorted({row["parameters"][along] for row in rows})
    styles = _styles(list(dict.fromkeys(row["call"] for row in rows)))
    figure = Figure(figsize=(max(8.0, 3.4 + 3.2 * len(panels)), 5.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, value in zip(axes, panels, strict=True):
        for call, style in styles.items():
            mine = [
                row for row in rows if row["call"] == call and row["parameters"][across] == value
            ]
            mine.sort(key=lambda row: row["parameters"][along])
            width = 2.6 if any(row["ours"] for row in mine) else 1.2
            milliseconds = [1e3 * row["seconds"]["median"] for row in mine]
            axis.plot(
                [row["parameters"][along] for row in mine],
                milliseconds,
                label=call,
                linewidth=width,
                markersize=5,
                **style,
            )
        axis.set_title(f"{across} {value}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, map(str, ticks))
        axis.minorticks_off()
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.set_xlabel("tokens of context" if along == "context" else "batch")
    axes[0].set_ylabel("ms a step (one token for every row)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center")
    figure.suptitle(title, fontsize=11)
    return figure


def _styles(calls: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour for each kind of way (its name up to the comma); lines and markers for its forms."""
    kinds: dict[str, list[str]] = {}
    for call in calls:
        kinds.setdefault(call.split(",")[0], []).append(call)
    styles: dict[str, dict[str, Any]] = {}
    for number, forms in enumerate(kinds.values()):
        for spec, call in enumerate(forms):
            styles[call] = {
                "color": f"C{number % 10}",
                "linestyle": ("-", "--", ":", "-.")[spec % 4],
                "marker": "osD^vP"[spec % 6],
            }
    return styles


def _panels(
    rows: Iterable[dict[str, Any]], title: str, label: str
) -> tuple[Figure, dict[str, Any]]:
    """A figure with one panel for each dtype."""
    present = {row["parameters"]["dtype"] for row in rows}
    dtypes = [dtype for dtype in DTYPES if dtype in present]
    figure = Figure(figsize=(max(7.0, 5.5 * len(dtypes)), 4.6), layout="constrained")
    axes = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for axis, dtype in zip(axes, dtypes, strict=True):
        axis.set_title(dtype, fontsize=10)
        axis.axhline(1, color="0.4", linewidth=1, linestyle="--")
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel(label)
    figure.suptitle(title, fontsize=11)
    return figure, dict(zip(dtypes, axes, strict=True))


def _bandwidth(rows: list[dict[str, Any]], title: str) -> Figure:
    figure, axes = _panels(
        rows, f"patched_linear, rank 1: {title}", "share of the bandwidth measured there"
    )
    for dtype, axis in axes.items():
        mine = [
            row
            for row in rows
            if row["parameters"]["dtype"] == dtype and row["parameters"]["rows"] <= 16
        ]
        shapes = sorted(
            {(p["n"] * p["k"], p["matrix"]) for p in (row["parameters"] for row in mine)}
        )
        counts = sorted({row["parameters"]["rows"] for row in mine})
        place = {matrix: number for number, (_, matrix) in enumerate(shapes)}
        width = 0.8 / len(counts)
        for number, count in enumerate(counts):
            chosen = [row for row in mine if row["parameters"]["rows"] == count]
            x = [
                place[row["parameters"]["matrix"]] + (number - (len(counts) - 1) / 2) * width
                for row in chosen
            ]
            axis.bar(
                x,
                [row["of ceiling"] for row in chosen],
                width,
                label=f"M = {count}",
                color=_shade(number, len(counts)),
            )
        names = [
            f"{matrix}\n{elements * (4 if dtype == 'float32' else 2) / 1e6:.0f} MB"
            for elements, matrix in shapes
        ]
        axis.set_xticks(range(len(shapes)), names, rotation=40, ha="right", fontsize=8)
        axis.legend(fontsize=8, ncols=len(counts), loc="upper center")
    first = next(iter(axes.values()))
    first.set_ylim(
        0, 1.2 * max(1.0, *(row["of ceiling"] for row in rows if row["parameters"]["rows"] <= 16))
    )
    return figure


def _ratios(rows: list[dict[str, Any]], ratios: dict[str, float], title: str) -> Figure:
    figure, axes = _panels(rows, f"patched_linear, rank 1: {title}", "time over that of F.linear")
    matrices = list(dict.fromkeys(row["parameters"]["matrix"] for row in rows))
    for dtype, axis in axes.items():
        for number, matrix in enumerate(matrices):
            mine = [
                row
                for row in rows
                if (row["parameters"]["dtype"], row["parameters"]["matrix"]) == (dtype, matrix)
            ]
            mine.sort(key=lambda row: row["parameters"]["rows"])
            style = {
                "marker": "osD^vP*X"[number % 8],
                "markersize": 5,
                "linewidth": 1.2,
                "color": f"C{number % 10}",
            }
            axis.plot(
                [row["parameters"]["rows"] for row in mine],
                [ratios[row["case"]] for row in mine],
                label=matrix,
                **style,
            )
        counts = sorted({row["parameters"]["rows"] for row in rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, map(str, counts))
        axis.set_xlabel("rows M")
    next(iter(axes.values())).set_ylim(bottom=0)
    next(iter(axes.values())).legend(fontsize=8)
    return figure


def _shade(number: int, count: int) -> Any:
    return colormaps["viridis"](0.9 * number / max(1, count - 1))


def _save(figure: Figure, path: Path) -> list[Path]:
    """As PNG and SVG, with the same bytes for the same numbers."""
    written = [path.with_name(f"{path.name}{suffix}") for suffix in (".png", ".svg")]
    with rc_context({"svg.hashsalt": "icl-patch", "svg.fonttype": "none"}):
        figure.savefig(written[0], dpi=130, metadata={"Software": None})
        figure.savefig(written[1], metadata={"Date": None})
    return written
