"""Pages of results: files of numbers, pictures drawn from them, and texts in which they stand.

The texts are templates of jinja in the folder ``pages``. A page is written from its files of
numbers alone, so it can be written again without measuring anything.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers.utils import logging as transformers_logging

from icl_patch.bench.results import environment
from icl_patch.evaluation.report import format_value, markdown, percent, to_json, visible_text

matplotlib.use("Agg")

Numbers = dict[str, Any]
TEMPLATES = Path(__file__).with_name("pages")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def parse(
    description: str, arguments: Sequence[str] | None, of_model: bool = False
) -> argparse.Namespace:
    """The options of all scripts that write pages, some of them of a model in a folder."""
    return read_options(parser_of(description, of_model), arguments)


def parser_of(description: str, of_model: bool = False) -> argparse.ArgumentParser:
    """The parser of :func:`parse`, for further options."""
    parser = argparse.ArgumentParser(description=description)
    if of_model:
        parser.add_argument("folder", type=Path, nargs="?", help="a model and its tokenizer")
    default = "build/papers/NAME" if of_model else "docs/papers"
    text = f"for page, pictures and numbers (default: {default})"
    parser.add_argument("--out", type=Path, help=text)
    parser.set_defaults(default_out=default)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    text = "measure nothing: write the page from the numbers in --out"
    parser.add_argument("--redraw", action="store_true", help=text)
    return parser


def read_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """The options, checked; one thread, and no progress bars of transformers."""
    options = parser.parse_args(arguments)
    folder = getattr(options, "folder", None)
    if hasattr(options, "folder") and options.redraw == (folder is not None):
        parser.error("expected a folder, or --redraw with --out")
    name = folder.resolve().name if folder else "NAME"
    options.out = options.out or Path(options.default_out.replace("NAME", name))
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    return options


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        name: of the page and of its template.
        numbers: the names of its files of numbers.
        pictures: how each is drawn, by its name, which begins with the name of its numbers.
        template: its name, if it is not that of the page.
    """

    name: str
    numbers: Sequence[str]
    pictures: Mapping[str, Callable[[Numbers], Figure]]
    template: str = ""

    def run(
        self,
        options: argparse.Namespace,
        measure: Callable[[str], Numbers],
        only: Sequence[str] = (),
        **about: Any,
    ) -> None:
        """Measure, unless asked to redraw, and write all files; ``about`` goes into the numbers.

        only: the numbers to measure, all by default; the others are in the folder.
        """
        options.out.mkdir(parents=True, exist_ok=True)
        for name in () if options.redraw else only or self.numbers:
            print(name, file=sys.stderr, flush=True)
            found = about | {"environment": environment(torch.device("cpu"))} | measure(name)
            (options.out / f"{name}.json").write_text(to_json(rounded(found)) + "\n", "utf-8")
        numbers = self.read(options.out)
        for name, draw in self.pictures.items():
            [own] = (found for stem, found in numbers.items() if name.startswith(stem))
            figure = draw(own)
            figure.savefig(options.out / f"{name}.png", dpi=110, metadata={"Software": None})
            plt.close(figure)
        (options.out / f"{self.name}.md").write_text(self.text(numbers), "utf-8")

    def read(self, folder: Path) -> dict[str, Numbers]:
        """All its numbers, by the names of the files."""
        return {x: json.loads((folder / f"{x}.json").read_text("utf-8")) for x in self.numbers}

    def text(self, numbers: Mapping[str, Numbers]) -> str:
        """The page. In the template stands ``files`` for all numbers; where they are one file,
        they stand for themselves.
        """
        own = next(iter(numbers.values())) if len(numbers) == 1 else {}
        template = _templates().get_template(f"{self.template or self.name}.md")
        return wrapped(template.render(own, files=numbers, page=self.name))


def _templates() -> Environment:
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "percent": percent,
        "error": format_value,
        "form": lambda value, form: format(value, form),
        "interval": interval,
        "mean": lambda values: sum(values) / len(values),
        "median": lambda values: float(np.median(values)),
        "apart": lambda values, others: max(np.abs(np.subtract(values, others))),
    }
    found.globals |= {"DTYPES": DTYPES, "pivot": pivot}
    return found


def interval(entry: Numbers) -> str:
    """``99.1 % (98.6 to 99.5)``."""
    low, high = (f"{100 * x:.2f}".rstrip("0").rstrip(".") for x in entry["interval"])
    return percent(entry["share"]) + ("" if low == high else f" ({low} to {high})")


def pivot(
    entries: Sequence[Numbers], row: str, column: str, cell: Callable[[Numbers], str], head: str
) -> str:
    """A table with a row and a column for each value of two keys of the entries. A cell is the text
    that a macro makes of its entry, or empty.
    """
    rows, columns = (list(dict.fromkeys(x[key] for x in entries)) for key in (row, column))
    texts = {(x[row], x[column]): str(cell(x)).strip() for x in entries}
    lines = [[DTYPES.get(x, x), *(texts.get((x, y), "") for y in columns)] for x in rows]
    return markdown([head, *(DTYPES.get(x, x) for x in columns)], lines)


def rounded(value: Any) -> Any:
    """Floats with nine digits, which tell any two fp32 numbers apart."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def wrapped(text: str) -> str:
    """Markdown with its paragraphs and list entries filled to 100 characters a line."""
    options: Any = {"break_long_words": False, "break_on_hyphens": False}
    parts = []
    for part in text.strip().split("\n\n"):
        if part and not part.startswith(("#", "|", "    ", "!")):
            entries = part.removeprefix("- ").split("\n- ") if part.startswith("- ") else [part]
            mark, indent = ("- ", "  ") if part.startswith("- ") else ("", "")
            part = "\n".join(
                textwrap.fill(mark + " ".join(x.split()), 100, subsequent_indent=indent, **options)
                for x in entries
            )
        parts.append(part.strip("\n"))
    return "\n\n".join(part for part in parts if part) + "\n"


# pictures


def panels(
    rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, Any]:
    """A figure and its (rows, columns) panels."""
    options |= {"squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(rows, columns, figsize=size, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def band(axis: Axes, x: Sequence[float], values: Any, color: str, label: str | None = None) -> None:
    """The middle of (low, middle, high) as a line, and the area between the others."""
    low, middle, high = np.transpose(values)
    axis.plot(x, middle, color=color, label=label, linewidth=1.4)
    axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def legend(figure: Figure, axis: Axes, columns: int) -> None:
    """That of one panel, above all of them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)


def error_curves(
    axis: Axes, dtype: str, tokens: Sequence[str], curves: Sequence[tuple[Any, Any, Numbers]]
) -> None:
    """L∞ at each generated token, on a logarithmic axis with a strip for exact zeros; a red X where
    the token is another. A curve is its errors, whether the tokens are the same, and its style.
    """
    lowest, top = 1e-8, 30.0
    axis.set_yscale("log")
    axis.set_ylim(lowest / 10, top)
    axis.axhspan(lowest / 10, lowest, color="0.93", zorder=0)
    zero = lowest / 3
    decades = [10.0**decade for decade in range(-6, 2, 2)]
    axis.set_yticks([zero, *decades], ["0", *(f"$10^{{{x}}}$" for x in range(-6, 2, 2))])
    axis.minorticks_off()
    for errors, same, style in curves:
        values = np.array([top / 2 if x is None else x for x in errors])  # None: not finite
        drawn = np.where(values > 0, values.clip(min=lowest), zero)
        axis.plot(drawn, marker="o", markersize=3, **style)
        wrong = np.flatnonzero(~np.array(same, dtype=bool))
        axis.plot(wrong, drawn[wrong], "X", color="red", markersize=7, zorder=5)
    axis.plot([], [], "X", color="red", markersize=7, label="another token")
    names = [visible_text(token).replace("$", r"\$") for token in tokens]  # $ is markup here
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    axis.set_ylabel(f"{DTYPES[dtype]}: L∞ / max |logit|")
