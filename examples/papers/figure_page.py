"""A page of figures: each with the paper's claim, a picture, its numbers and its command. And the
tables and paragraphs of all pages.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

matplotlib.use("Agg")

Numbers = dict[str, Any]


@dataclass(frozen=True)
class FigurePage:
    """A page and the figures on it.

    Attributes:
        name: of the page. heading: its first line. notes: the file of its text.
        claims: what the paper says, by figure.
        title, stem: of a figure, and the name of its files.
        draw: makes the picture, of the figures that have one. dpi: of the pictures.
        measured: the line that stands beside the claim, numbers only.
        more: further text about a figure.
    """

    name: str
    heading: str
    notes: Path
    claims: Mapping[Any, str]
    title: Callable[[Any], str]
    stem: Callable[[Any], str]
    draw: Mapping[Any, Callable[[Numbers], Any]]
    dpi: int
    measured: Callable[[Any, Numbers], str]
    more: Callable[[Any, Numbers], str] = lambda _figure, _numbers: ""

    def parser(self, description: str) -> argparse.ArgumentParser:
        """The options of a script that makes the page."""
        parser = argparse.ArgumentParser(description=description)
        text = "repeatable (default: all)"
        parser.add_argument(
            "--figure", choices=[*map(str, self.claims)], action="append", help=text
        )
        text = "for page, pictures and numbers"
        parser.add_argument("--out", type=Path, default=Path("docs/papers"), help=text)
        parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
        parser.add_argument("--quick", action="store_true", help="tiny sizes")
        text = "measure nothing: draw the numbers"
        parser.add_argument("--redraw", action="store_true", help=text)
        return parser

    def run(
        self,
        options: argparse.Namespace,
        script: str,
        head: Numbers,
        measure: Callable[[Any], Numbers],
    ) -> None:
        """Measure the chosen figures, unless asked to redraw, and write all files.

        script: its name, and options beside those of :meth:`parser`. head: stands before a figure's
        numbers.
        """
        options.out.mkdir(parents=True, exist_ok=True)
        for figure, claim in self.claims.items():
            if options.figure and str(figure) not in options.figure:
                continue
            path = options.out / f"{self.stem(figure)}.json"
            if not options.redraw:
                numbers = measure(figure)
                name, *further = script.split()
                command = ["python", f"examples/papers/{name}", f"--figure {figure}"]
                command += [f"--seed {options.seed}", *further, *["--quick"] * options.quick]
                entry = {
                    "figure": figure,
                    "claim": claim,
                    "measured": self.measured(figure, numbers),
                    "command": " ".join(command),
                    "seed": options.seed,
                    **head,
                    **numbers,
                }
                text = json.dumps(rounded(entry), ensure_ascii=False)
                path.write_text(f"{text}\n", encoding="utf-8")
                print(f"{self.title(figure)}: {entry['measured']}", file=sys.stderr, flush=True)
            if figure in self.draw:
                picture = self.draw[figure](json.loads(path.read_text(encoding="utf-8")))
                picture.savefig(path.with_suffix(".png"), dpi=self.dpi)
                plt.close(picture)
        self.write(options.out)

    def write(self, folder: Path) -> None:
        """Write the page: the notes, then each figure whose numbers are in the folder."""
        parts = [f"# {self.heading}", self.notes.read_text(encoding="utf-8").strip()]
        for figure, claim in self.claims.items():
            path = folder / f"{self.stem(figure)}.json"
            if path.exists():
                found = json.loads(path.read_text(encoding="utf-8"))
                parts += [
                    f"## {self.title(figure)}",
                    f"![{self.title(figure)}]({path.stem}.png)" if figure in self.draw else "",
                    f"- The paper: {claim}.\n- Measured: {found['measured']}.\n- Numbers:"
                    f" [{path.name}]({path.name})\n- Command: `{found['command']}`",
                    self.more(figure, found),
                ]
        text = "\n\n".join(part for part in parts if part) + "\n"
        (folder / self.name).write_text(text, encoding="utf-8")


def rounded(value: Any) -> Any:
    """Floats with nine digits, which tell any two fp32 numbers apart."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def wrapped(text: str) -> str:
    """Markdown with its paragraphs and list entries filled to 100 characters a line."""
    parts = []
    for part in text.strip().split("\n\n"):
        if part.startswith("- "):
            entries = part[2:].split("\n- ")
            parts.append("\n".join(_filled("- " + entry, "  ") for entry in entries))
        else:
            parts.append(part if part.startswith(("#", "|", "    ", "!")) else _filled(part, ""))
    return "\n\n".join(parts) + "\n"


def _filled(text: str, indent: str) -> str:
    options: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(" ".join(text.split()), 100, subsequent_indent=indent, **options)
