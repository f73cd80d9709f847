"""docs/private-interfaces.md lists every private name of another package that the code uses."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "private-interfaces.md").read_text(encoding="utf-8")


def is_private(name: object) -> bool:
    return any(re.fullmatch(r"_[a-zA-Z]\w*", part) for part in str(name).split("."))


def own_names(nodes: list[ast.AST]) -> Iterator[str]:
    """Names that this package defines."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def used_names(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            yield node.attr
        elif isinstance(node, ast.Import):
            yield from [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("icl_patch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [str(node.module)] if is_private(node.module) else names
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            yield from [x.value for x in node.args[1:2] if isinstance(x, ast.Constant)]


def test_the_page_lists_them_with_tests_that_are_there() -> None:
    files = (
        x for name in ("icl_patch", "triton_kernels") for x in (REPOSITORY / name).rglob("*.py")
    )
    sources = [file.read_text(encoding="utf-8") for file in files]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    own = {*own_names(nodes)} - {*dir(nn.Module()), *dir(Tensor)} | {"_replace"}  # of a NamedTuple
    used = {name for name in used_names(nodes) if is_private(name) and name not in own}
    listed = {name for name in re.findall(r"`([\w.]+)`", PAGE) if is_private(name)}
    assert used <= listed
    assert all(any(name.split(".")[-1] in x for x in sources) for name in listed)
    assert all((REPOSITORY / test).is_file() for test in re.findall(r"`(tests/[\w/.]+)`", PAGE))
