"""The count of the code's tokens."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import code_tokens

PYTHON = '''"""A module."""
# a comment
import os


class A:
    """Documented."""

    b = "no docstring"

    def f(self, x=1.5):
        """Documented,
        at length."""
        return f"{x!r} {os.name:>{self.width}}"  # another comment
'''
CPP = r"""
#include <a.h>  // a comment
/* another,
   of two lines */
float x = 1'000.5e-3f; char c = '\'';
const char* s = "a // b" R"(c " d)";
#define MAX(a) \
    (a ->* b <<= 2)
"""


def test_tokens_of_python() -> None:
    # import os | class A : | b = "" | def f ( self , x = 1.5 ) : | return f""
    assert code_tokens.python_tokens(PYTHON) == 2 + 3 + 3 + 10 + 2


def test_tokens_of_cpp() -> None:
    # #include < a . h > | float x = 1 ; | char c = '' ; | const char * s = "" R"" ;
    # # define MAX ( a ) ( a ->* b <<= 2 )
    assert code_tokens.cpp_tokens(CPP) == 7 + 5 + 5 + 8 + 13


def test_tokens_of_a_checkout(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, file, text in (
        ("icl_patch", "a/b.py", "x = 1\n"),
        ("triton_kernels", "c.py", "y\n"),
        ("bench", "d.txt", "z\n"),
        ("csrc", "e/f.cu", "int i;"),
    ):
        path = tmp_path / name / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert code_tokens.main([str(tmp_path)]) == 0
    numbers = [re.findall(r"\d+", line) for line in capsys.readouterr().out.splitlines()]
    python, cpp = [["1", "3"], ["1", "1"], ["0", "0"], ["2", "4"]], [["1", "3"]] * 2
    assert [row for row in numbers if row] == python + cpp
    with pytest.raises(SystemExit):
        code_tokens.main([str(tmp_path / "icl_patch")])
    assert "without icl_patch" in capsys.readouterr().err
