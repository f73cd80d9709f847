"""Build the documentation site, strictly: ``python docs/site/build_site.py FOLDER``.

A warning of Sphinx fails, and so does a page that leads nowhere or loads anything from elsewhere.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).resolve().parent
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "object": "data"}
"""Attributes of elements from which a browser loads; ``link`` is loaded but for some relations."""
NOT_LOADED = {"search", "index", "genindex", "next", "prev", "author", "copyright", "canonical"}


class Page(HTMLParser):
    """The anchors of a page, the addresses that it loads, and those that a reader may follow."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.followed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what an element names."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if address := values.get(LOADED.get(tag, "")):
            self.loaded.append(address)
        if address := values.get("href"):
            follows = tag == "a" or set(values.get("rel", "").split()) & NOT_LOADED
            (self.followed if follows else self.loaded).append(address)


def is_foreign(address: str) -> bool:
    """Whether a browser asks another host for it."""
    return urlsplit(address).scheme not in ("", "data") or address.startswith("//")


def findings(site: Path) -> Iterator[str]:
    """What is wrong with the built pages, one line each."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name} loads {link}" for link in page.loaded if is_foreign(link))
        for link in {*page.loaded, *page.followed}:
            parts = urlsplit(link)
            if is_foreign(link) or parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{name} leads to {link}, which there is not"
            elif target in pages and unquote(parts.fragment) not in {"", *pages[target].anchors}:
                yield f"{name} leads to {link}, a place that {target.name} does not have"
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"(?:url\(|@import|xlink:href=)\s*[\"']?([^\"')]+)", text):
            if is_foreign(link):
                yield f"{path.relative_to(site)} loads {link}"


def main(arguments: list[str] | None = None) -> int:
    """Build and check; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("folder", type=Path)
    site = parser.parse_args(arguments).folder.resolve()
    from sphinx.cmd.build import build_main  # noqa: PLC0415 -- the checks need no Sphinx

    options = [
        "-E",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-d",
        f"{site}.cache",
        "-c",
        str(HERE),
    ]
    if status := build_main([*options, str(HERE.parents[1]), str(site)]):
        return int(status)
    shutil.copy(site / "README.html", site / "index.html")
    found = sorted(findings(site))
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{site / 'index.html'}: {len(list(site.rglob('*.html')))} pages")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
