"""Count the tokens of the code: its size without layout, comments and the length of names.

    build/python tools/code_tokens.py             # of this repository
    build/python tools/code_tokens.py FOLDER      # of another checkout

Python (``icl_patch``, ``triton_kernels``, ``bench``): the names, operators, numbers and strings
that Python's ``tokenize`` finds. Comments, line ends, indentation and the docstrings of modules,
classes and functions do not count. An f-string is one token in every version of Python.

C++ (``csrc``): the identifiers, numbers, strings and operators of ``.h``, ``.cpp`` and ``.cu``
files. Preprocessor directives count, comments do not.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PYTHON_FOLDERS = ("icl_patch", "triton_kernels", "bench")
CPP_FOLDERS = ("csrc",)
CPP_SUFFIXES = (".h", ".cpp", ".cu")

_LAYOUT = frozenset(
    (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    )
)
# From Python 3.12 on an f-string comes in pieces, between these.
_FSTRING_START = getattr(tokenize, "FSTRING_START", None)
_FSTRING_END = getattr(tokenize, "FSTRING_END", None)
_CPP = re.compile(
    r"""
      (?P<comment> //(?:\\\n|[^\n])* | /\*.*?\*/ )
    | (?P<space>   \s+ | \\\n )
    | (?:u8|[uUL])?R"(?P<end>[^()\\\s]*)\(.*?\)(?P=end)"          # raw string
    | (?:u8|[uUL])?(?:"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')    # string, character
    | \.?\d(?:[eEpP][+-]|'\w|[\w.])*                              # number
    | [^\W\d]\w*                                                  # identifier, keyword
    | <=>|<<=|>>=|\.\.\.|->\*|\#\#                                # operators of 3 and 2 characters
    | ::|->|\.\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=
    | .
    """,
    re.X | re.S,
)


def _docstrings(text: str) -> set[int]:
    """The lines on which a docstring begins; none has another string before it."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return {node.body[0].lineno for node in nodes if ast.get_docstring(node) is not None}


def python_tokens(text: str) -> int:
    """How many tokens a Python file has."""
    docstrings = _docstrings(text)
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and token.start[0] in docstrings:
            docstrings.remove(token.start[0])
        elif token.type not in _LAYOUT and depth == 0:
            count += 1
        depth += (token.type == _FSTRING_START) - (token.type == _FSTRING_END)
    return count


def cpp_tokens(text: str) -> int:
    """How many tokens a C++ or CUDA file has."""
    return sum(found.lastgroup not in ("comment", "space") for found in _CPP.finditer(text))


def count_folder(folder: Path) -> tuple[int, int]:
    """Files and tokens of a folder."""
    cpp = folder.name in CPP_FOLDERS
    suffixes, count = (CPP_SUFFIXES, cpp_tokens) if cpp else ((".py",), python_tokens)
    files = [path for path in folder.rglob("*") if path.suffix in suffixes]
    return len(files), sum(count(path.read_text(encoding="utf-8")) for path in files)


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Count the tokens of the code in Python and C++.")
    text = "a checkout (default: this one)"
    parser.add_argument("root", type=Path, nargs="?", default=ROOT, metavar="FOLDER", help=text)
    root = parser.parse_args(arguments).root
    if missing := [name for name in (*PYTHON_FOLDERS, *CPP_FOLDERS) if not (root / name).is_dir()]:
        parser.error(f"expected a checkout, got {root} without {', '.join(missing)}")
    table = Table("code", "files", "tokens")
    for language, folders in (("Python", PYTHON_FOLDERS), ("C++", CPP_FOLDERS)):
        counted = {name: count_folder(root / name) for name in folders}
        for name, (files, tokens) in counted.items():
            table.add_row(name, f"{files:,}", f"{tokens:,}")
        totals = (f"{sum(column):,}" for column in zip(*counted.values(), strict=True))
        table.add_row(f"{language} in all", *totals, end_section=True, style="bold")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
