"""Sphinx settings of the documentation site; ``make docs`` builds it.

The pages are the README, CONTRIBUTING, the changelog and the Markdown of docs/, as they lie in the
repository. This file adds what Markdown does not have: the navigation, and links from the papers'
tables into the reference.
"""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import icl_patch
from tools.reference import places

ROOT = Path(__file__).resolve().parents[2]
NAVIGATION = {
    "Start": ["docs/installing"],
    "Your own model": [
        "docs/usage",
        "docs/activations",
        "Static patches <docs/static>",
        "docs/models",
        "Many prompts, many devices <docs/scale>",
        "docs/batch_invariance",
    ],
    "How it works": ["docs/how_it_works", "docs/glossary"],
    "Kernels": ["docs/kernels", "docs/performance"],
    "The papers": [
        "Statement by statement <docs/papers/statements>",
        "On pretrained models: SmolLM2 <docs/papers/real-model>",
        "On pretrained models: Gemma 3 270M <docs/papers/gemma-3-270m>",
        "Goldwaser et al.: Figures 3 and 4 <docs/papers/figures-3-and-4>",
        "Goldwaser et al.: images, bf16 <docs/papers/context-parameter-equivalence>",
        "Dherin et al.: linear regression <docs/papers/linear-regression>",
        "Table 1 <docs/papers/table-1>",
        "What the discussions leave open <docs/papers/discussion>",
        "Static patches, measured <docs/static-results>",
    ],
    "Reference": [
        "docs/reference/README",
        "docs/design",
        "docs/blocks",
        "docs/patch-file",
        "docs/private-interfaces",
        "Model classes <docs/model_classes>",
    ],
    "Project": ["CONTRIBUTING", "CHANGELOG"],
}
"""Captions and pages."""

STATEMENTS = "docs/papers/statements"
PICTURE = re.compile(
    r"<picture>.*?srcset=\"(?P<dark>\S+)\".*?alt=\"(?P<alt>.*?)\".*?src=\"(?P<light>\S+)\""
    r".*?</picture>",
    re.S,
)
SHOWN = "".join(
    f"````{{container}} picture only-{scheme}\n"
    f"```{{image}} \\g<{scheme}>\n:alt: \\g<alt>\n```\n"
    f"```{{image}} \\g<{scheme}>\n:alt:\n:class: second-half\n```\n````\n"
    for scheme in ("light", "dark")
)

project = "icl-patch"
author = "The icl-patch authors"
version = release = icl_patch.__version__
html_title = f"icl-patch {version}"

extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**", "bench/results/**"]
exclude_patterns = ["build", "dist", ".venv", ".git", "**/__pycache__"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # the changelog's sections begin at ###

html_theme = "furo"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_show_search_summary = False  # a page of a file may not fetch others


def entries(patterns: list[str]) -> str:
    """The entries of a toctree: a pattern stands for the documents that it matches."""
    found = []
    for pattern in patterns:
        matches = sorted(ROOT.glob(f"{pattern}.md")) if "*" in pattern else []
        names = [f"/{path.relative_to(ROOT).with_suffix('')}" for path in matches]
        found += names if "*" in pattern else [pattern]
    return "\n".join(found)


def toctree(caption: str, patterns: list[str]) -> str:
    """A part of the navigation."""
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries(patterns)}\n```\n"


def with_references(text: str) -> str:
    """The statements of the papers, with the names below ``icl_patch`` as links."""

    def link(name: re.Match[str]) -> str:
        place = places().get(f"icl_patch.{name[1]}")
        return f"[{name[0]}](../reference/{place})" if place else name[0]

    return re.sub(r"(?<!\[)`([\w.]+)`", link, text)


def with_navigation(_: Sphinx, name: str, source: list[str]) -> None:
    """Adds the navigation, and shows pictures for light and dark in the site's own way."""
    source[0] = PICTURE.sub(SHOWN, source[0])
    if name == root_doc:
        source[0] += "".join(toctree(*part) for part in NAVIGATION.items())
    elif name == "docs/reference/README":
        source[0] += toctree("Reference", re.findall(r"^ *- \[.*?\]\((\w+)\.md\)", source[0], re.M))
    elif name == "docs/performance":
        source[0] += toctree("Results", ["bench/results/*"])
    elif name == STATEMENTS:
        source[0] = with_references(source[0])
    elif name.startswith("bench/results/"):  # several have one title
        benchmark, _, device = name.rpartition("/")[2].partition("-")
        source[0] = f"# {benchmark}, {device}\n{source[0].partition(chr(10))[2]}"


def with_breaks(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _: Any) -> None:
    """Long names in code may break behind their dots, slashes and underscores."""

    def broken(name: re.Match[str]) -> str:
        return re.sub(r"(::|[./]|(?<=\w\w)_)(?=\w\w)", r"\1<wbr>", name[0])

    if "body" in context:
        context["body"] = re.sub(r'(?<=<span class="pre">)[^<]+', broken, context["body"])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", with_navigation)
    app.connect("html-page-context", with_breaks)
