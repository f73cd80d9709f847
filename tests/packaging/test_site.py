"""The documentation site: its table of the papers names what exists, every public name has a
docstring, and the check of the built pages finds what it should.
"""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build_site
import pytest

from tools import reference

REPOSITORY = Path(__file__).parents[2]
PAPERS = REPOSITORY / "docs" / "papers"
PUBLIC = ("icl_patch", "icl_patch.ops", "icl_patch.static", "icl_patch.scale")
PUBLIC += ("icl_patch.evaluation.embedded",)


def rows() -> list[dict[str, str]]:
    """The cells of the statements' tables, by column."""
    text = (PAPERS / "statements.md").read_text(encoding="utf-8")
    found = []
    for table in text.split("\n\n"):
        if table.startswith("| statement"):
            heads, _, *lines = (
                [cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()
            )
            found += [dict(zip(heads, line, strict=True)) for line in lines]
    return found


def definitions(path: Path) -> set[str]:
    """The functions and classes of a file, with the methods of classes as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{x.name}" for x in inner if isinstance(x, ast.FunctionDef)}
    return found


def resolve(name: str) -> Any:
    """What a dotted name below ``icl_patch`` stands for."""
    return pkgutil.resolve_name(f"icl_patch.{name.removeprefix('icl_patch.')}")


def test_the_papers_functions_and_tests_exist() -> None:
    assert len(rows()) > 40
    for row in rows():
        named = re.findall(r"`([\w.:/]+)`", re.sub(r"\(.*?\)", "", row["function"]))
        tested = re.findall(r"`([\w./]+)::(\w+)`", row["test"])
        assert named and tested, row
        for name in named:
            file, _, member = name.partition("::")
            if member:
                assert member in definitions(REPOSITORY / "examples" / "papers" / file), name
            else:
                assert f"icl_patch.{name}" in reference.places(), name
        for file, test in tested:
            assert test in definitions(REPOSITORY / "tests" / file), test


def test_every_numbered_statement_has_a_row() -> None:
    """Those that the two papers number, as the glossary of their texts counts them."""
    named = " ".join(row["statement"] for row in rows())
    goldwaser = [f"Lemma {n}" for n in range(6, 13)] + [f"Theorem {n}" for n in (1, 2, 5)]
    goldwaser += ["Definitions 3, 4", "Definition 13", "Algorithm 1", "Table 1"]
    dherin = ["Definition 2.1", "Theorem 2.2", "Corollary 2.5.1", "Corollary 2.6.1"]
    dherin += ["Proposition 3.1", "Definition B.1", "Theorem B.2", "Corollary E.0.1"]
    dherin += [f"Remark {n}" for n in ("2.3", "2.4", "2.5", "2.6", "3.2")]
    appendices = [f"Appendix {name}" for name in ("B.1", "B.2", "C", "D", "E")]
    figures = [f"Figure {n}" for n in range(1, 7)]
    assert [x for x in goldwaser + dherin + appendices + figures if x not in named] == []
    assert all(named.count(figure) == 2 for figure in figures[:5])  # one of each paper


def test_the_papers_numbers_stand_on_the_page_behind_them() -> None:
    compared = 0
    for row in rows():
        measured = row.get("measured", "")
        for text, page in re.findall(r"([^()]*)\([^()[]*\[[^]]*\]\((\S+?)\)\)", measured):
            shown = (PAPERS / page).read_text(encoding="utf-8")
            for number in re.findall(r"\d+\.\d+(?:e-\d+)?|\d{4,}", text):
                assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", shown), (number, page)
                compared += 1
    assert compared > 30


def public() -> Iterator[tuple[str, Any]]:
    """Every public name that has a docstring of its own, and the public methods of classes."""
    for module in PUBLIC:
        package = importlib.import_module(module)
        yield module, package
        for name in package.__all__:
            value = getattr(package, name)
            if not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            yield f"{module}.{name}", value
            for member, method in vars(value).items() if inspect.isclass(value) else ():
                has_docstring = inspect.isroutine(method) or isinstance(method, property)
                if has_docstring and not member.startswith("_"):
                    yield f"{module}.{name}.{member}", method


def test_every_public_name_has_a_docstring_whose_links_lead_somewhere() -> None:
    found = dict(public())
    assert len(found) > 100
    for name, value in found.items():
        text = value.__doc__
        assert text and not text.startswith(f"{name.rpartition('.')[2]}("), name
        for target in re.findall(r":\w+:`~?(icl_patch[\w.]*)`", text):
            resolve(target)


def test_the_reference_has_every_public_name_in_its_place() -> None:
    """As ``tools/reference.py`` writes it from the docstrings: names, signatures and links."""
    pages = reference.pages()
    folder = {path.name: path.read_text("utf-8") for path in reference.FOLDER.glob("*.md")}
    assert pages.keys() == folder.keys()
    assert [name for name in pages if pages[name] != folder[name]] == []
    for name, value in public():
        page, _, anchor = reference.places()[name].partition("#")
        assert not anchor or f"\n## `{name.rpartition('.')[2]}`\n" in pages[page], name
        for argument in inspect.signature(value).parameters if inspect.isfunction(value) else ():
            assert argument == "self" or re.search(rf"\b{argument}\b", pages[page]), (
                name,
                argument,
            )
    classes = re.findall(r"^ *- \[`?(\w+)", pages["README.md"], re.M)
    assert classes[0] == "ContextPatcher"
    compute = pages["ContextPatcher.md"].partition("## `compute`")[2].partition("\n## ")[0]
    assert "        kept_ids: Tensor | None = None,\n        *,\n" in compute
    assert "\n- `context_mask`, `kept_mask`: bool, True = token.\n" in compute


def test_every_op_has_a_section_in_the_page_of_kernels() -> None:
    kernels = (REPOSITORY / "docs" / "kernels.md").read_text(encoding="utf-8")
    ops = importlib.import_module("icl_patch.ops")
    functions = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    shown = re.findall(r"`(\w+)`", " ".join(re.findall(r"^## (.*)", kernels, re.M)))
    has = {"has_gated_product", "has_kernels", "has_triton"}
    assert functions - set(shown) == has


@pytest.mark.parametrize(
    ("page", "finding"),
    [
        ('<script src="https://elsewhere/x.js"></script>', "loads https://elsewhere/x.js"),
        ('<link rel="stylesheet" href="//elsewhere/x.css">', "loads //elsewhere/x.css"),
        ('<link rel="preload" href="none.css">', "leads to none.css, which there is not"),
        ('<a href="none.html">x</a>', "leads to none.html, which there is not"),
        ('<a href="other.html#none">x</a>', "a place that other.html does not have"),
        ('<a href="#none">x</a>', "a place that page.html does not have"),
        ("<style></style>", "style.css loads https://elsewhere/font"),
    ],
)
def test_the_check_of_the_pages_finds(page: str, finding: str, tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="there">x</h1>', encoding="utf-8")
    (tmp_path / "style.css").write_text("a {color: red}", encoding="utf-8")
    good = '<a href="other.html#there">x</a><a href="https://elsewhere">x</a><img src="data:,">'
    (tmp_path / "page.html").write_text(good, encoding="utf-8")
    assert list(build_site.findings(tmp_path)) == []
    (tmp_path / "page.html").write_text(good + page, encoding="utf-8")
    if "style.css" in finding:
        (tmp_path / "style.css").write_text("a {src: url('https://elsewhere/font')}", "utf-8")
    found = list(build_site.findings(tmp_path))
    assert len(found) == 1 and finding in found[0]
