"""A page of figures: each with the paper's claim, a picture, its numbers and its command. And the
tables and paragraphs of all pages.
"""

import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figure = int | str
Numbers = dict[str, Any]


@dataclass(frozen=True)
class FigurePage:
    """A page and the figures on it.

    Attributes:
        name: of the page. heading: its first line. notes: the file of its text.
        claims: what the paper says, by figure.
        title, stem: of a figure, and the name of its files.
        draw: writes a picture. measured: the line that stands beside the claim, numbers only.
        more: further text about a figure.
    """

    name: str
    heading: str
    notes: Path
    claims: Mapping[Any, str]
    title: Callable[[Any], str]
    stem: Callable[[Any], str]
    draw: Callable[[Any, Numbers, Path], None]
    measured: Callable[[Any, Numbers], str]
    more: Callable[[Any, Numbers], str] = lambda _figure, _numbers: ""

    def add(self, folder: Path, figure: Figure, head: Numbers, numbers: Numbers) -> None:
        """Write the numbers of a figure, with their head, and its picture."""
        measured = self.measured(figure, numbers)
        entry = {"figure": figure, "claim": self.claims[figure], "measured": measured, **head}
        path = folder / f"{self.stem(figure)}.json"
        text = json.dumps(rounded(entry | numbers), ensure_ascii=False)
        path.write_text(f"{text}\n", encoding="utf-8")
        self.draw(figure, numbers, path.with_suffix(".png"))
        print(f"{self.title(figure)}: {measured}", file=sys.stderr, flush=True)

    def write(self, folder: Path) -> None:
        """Write the page: the notes, then each figure whose numbers are in the folder."""
        parts = [f"# {self.heading}", self.notes.read_text(encoding="utf-8").strip()]
        for figure, claim in self.claims.items():
            path = folder / f"{self.stem(figure)}.json"
            if path.exists():
                found = json.loads(path.read_text(encoding="utf-8"))
                parts += [
                    f"## {self.title(figure)}",
                    f"![{self.title(figure)}]({path.stem}.png)",
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


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
