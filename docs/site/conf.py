"""Sphinx settings of the documentation site; ``make docs`` builds it.

The pages are the README, CONTRIBUTING, the changelog and the Markdown of docs/, as they lie in the
repository. This file adds what Markdown does not have: the navigation.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

import icl_patch

ROOT = Path(__file__).resolve().parents[2]

NAVIGATION = {
    "Start": ["docs/installing"],
    "Your own model": [
        "docs/usage",
        "docs/static",
        "docs/models",
        "docs/scale",
        "docs/batch_invariance",
        "docs/notebooks/*",
    ],
    "How it works": ["docs/how_it_works", "docs/glossary"],
    "Kernels": ["docs/kernels", "docs/performance", "bench/results/*"],
    "The papers": [
        "docs/papers/statements",
        "docs/papers/real-model",
        "docs/papers/context-parameter-equivalence",
        "docs/papers/linear-regression",
        "docs/papers/table-1",
        "docs/static-results",
    ],
    "Reference": ["docs/site/api", "docs/design", "docs/model_classes"],
    "Project": ["CONTRIBUTING", "CHANGELOG"],
}
"""Captions and pages; a pattern may match none."""

project = "icl-patch"
author = "The icl-patch authors"
version = release = icl_patch.__version__
html_title = f"icl-patch {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**", "bench/results/**"]
exclude_patterns = ["build", "dist", ".venv", ".git", "**/__pycache__"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # the changelog's sections begin at ###

default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_use_ivar = True
maximum_signature_line_length = 88

html_theme = "furo"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False


def pages(pattern: str) -> list[str]:
    """The documents that match, without suffix, as entries of a toctree."""
    found = sorted(ROOT.glob(f"{pattern}.md")) + sorted(ROOT.glob(f"{pattern}.rst"))
    names = [str(path.relative_to(ROOT).with_suffix("")) for path in found]
    if not pattern.startswith("bench"):
        return names
    return [f"{name.rpartition('/')[2].replace('-', ', ', 1)} <{name}>" for name in names]


def with_navigation(_: Sphinx, name: str, source: list[str]) -> None:
    """The navigation behind the README, and pictures for light and dark in the site's own way."""
    source[0] = re.sub(
        r"<picture>.*?srcset=\"(?P<dark>\S+)\".*?alt=\"(?P<alt>.*?)\".*?src=\"(?P<light>\S+)\".*?"
        r"</picture>",
        r"```{image} \g<light>"
        "\n:alt: \\g<alt>\n:class: only-light\n```\n"
        r"```{image} \g<dark>"
        "\n:alt: \\g<alt>\n:class: only-dark\n```\n",
        source[0],
        flags=re.S,
    )
    if name == root_doc:
        for caption, patterns in NAVIGATION.items():
            entries = "\n".join(entry for pattern in patterns for entry in pages(pattern))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", with_navigation)
