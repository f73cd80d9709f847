"""Count the tokens of the code: its size without layout, comments and the length of names.

    build/python tools/code_tokens.py             # of this repository
    build/python tools/code_tokens.py FOLDER      # of another checkout

In Python the names, operators, numbers and strings that ``tokenize`` finds. Comments, line ends,
indentation and the docstrings of modules, classes and functions do not count. An f-string is one
token in every version of Python. In C++ and CUDA what pygments finds,
without layout and comments.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

from pygments.lexers import CppLexer
from pygments.token import Comment

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("icl_patch", "triton_kernels", "bench", "examples", "tools", "tests/support", "csrc")
PACKAGE = FOLDERS[:3]

_LAYOUT = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")


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
        kind = tokenize.tok_name[token.type]
        if kind == "STRING" and token.start[0] in docstrings:
            docstrings.remove(token.start[0])
        elif kind not in _LAYOUT and depth == 0:
            count += 1
        # from Python 3.12 on an f-string comes in pieces, between these
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return count


def cpp_tokens(text: str) -> int:
    """How many tokens a C++ or CUDA file has."""
    kinds = [kind for kind, part in CppLexer().get_tokens(text) if part.strip()]
    return sum(kind not in Comment.Multiline and kind not in Comment.Single for kind in kinds)


def count_folder(folder: Path) -> int:
    """The tokens of a folder."""
    cpp = folder.name == "csrc"
    suffixes, count = ((".h", ".cpp", ".cu"), cpp_tokens) if cpp else ((".py",), python_tokens)
    files = [path for path in folder.rglob("*") if path.suffix in suffixes]
    return sum(count(path.read_text(encoding="utf-8")) for path in files)


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    counted = {name: count_folder(root / name) for name in FOLDERS}
    counted["the package, its kernels and benchmarks"] = sum(map(counted.get, PACKAGE))
    for name, tokens in counted.items():
        print(f"{tokens:8,} {name}")
