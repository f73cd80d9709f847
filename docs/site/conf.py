"""Sphinx settings of the documentation site; ``make docs`` builds it.

The pages are the README, CONTRIBUTING, the changelog and the Markdown of docs/, as they lie in the
repository. This file adds what Markdown does not have: the navigation.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import icl_patch

ROOT = Path(__file__).resolve().parents[2]

NAVIGATION = {
    "Start": ["docs/installing"],
    "Your own model": [
        "docs/usage",
        "Static patches <docs/static>",
        "docs/models",
        "Many prompts, many devices <docs/scale>",
        "docs/batch_invariance",
    ],
    "How it works": ["docs/how_it_works", "docs/glossary"],
    "Kernels": ["docs/kernels", "docs/performance"],
    "The papers": [
        "Statement by statement <docs/papers/statements>",
        "On a pretrained model <docs/papers/real-model>",
        "Goldwaser et al.: images, bf16 <docs/papers/context-parameter-equivalence>",
        "Dherin et al.: linear regression <docs/papers/linear-regression>",
        "Table 1 <docs/papers/table-1>",
        "What the discussions leave open <docs/papers/discussion>",
        "Static patches, measured <docs/static-results>",
    ],
    "Reference": [
        "docs/site/api",
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
    f"```{{image}} \\g<{scheme}>\n:alt: \\g<alt>\n```\n````\n"
    for scheme in ("light", "dark")
)

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
maximum_signature_line_length = 120

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


def with_navigation(_: Sphinx, name: str, source: list[str]) -> None:
    """Adds the navigation, and shows pictures for light and dark in the site's own way."""
    source[0] = PICTURE.sub(SHOWN, source[0])
    if name == root_doc:
        source[0] += "".join(toctree(*part) for part in NAVIGATION.items())
    elif name == "docs/performance":
        source[0] += toctree("Results", ["bench/results/*"])
    elif name.startswith("bench/results/"):  # several have one title
        benchmark, _, device = name.rpartition("/")[2].partition("-")
        source[0] = f"# {benchmark}, {device}\n{source[0].partition(chr(10))[2]}"


def with_references(app: Sphinx, tree: nodes.document) -> None:
    """Links the functions in the papers' tables to the reference. A name that is not there is a
    warning, which fails the build.
    """
    if app.env.docname != STATEMENTS:
        return
    for table in tree.findall(nodes.table):
        heads = [
            entry.astext() for entry in next(iter(table.findall(nodes.thead))).findall(nodes.entry)
        ]
        for row in next(iter(table.findall(nodes.tbody))).findall(nodes.row):
            cells = dict(zip(heads, row.children, strict=True))
            for name in (
                list(cells["function"].findall(nodes.literal)) if "function" in cells else ()
            ):
                if "::" not in name.astext():
                    name.replace_self(reference(app, name))


def reference(app: Sphinx, name: nodes.literal) -> addnodes.pending_xref:
    """A name below ``icl_patch`` as a reference to its entry."""
    target = f"icl_patch.{name.astext()}"
    place = {"refdoc": app.env.docname, "refdomain": "py", "reftype": "obj", "refwarn": True}
    return addnodes.pending_xref("", name.deepcopy(), reftarget=target, refexplicit=True, **place)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", with_navigation)
    app.connect("doctree-read", with_references)
