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


def test_tokens_of_python() -> None:
    # import os | class A : | b = "" | def f ( self , x = 1.5 ) : | return f""
    assert code_tokens.python_tokens(PYTHON) == 2 + 3 + 3 + 10 + 2


def test_tokens_of_cpp() -> None:
    assert code_tokens.cpp_tokens("// a\n/* b\n c */ int f(x) { return 1.5e-3f; } // d\n") == 10


def test_tokens_of_a_checkout(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for file, text in (("icl_patch/a/b.py", "x = 1\n"), ("triton_kernels/c.py", "y\n")):
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    code_tokens.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    numbers = [found for line in lines if (found := re.findall(r"\d+", line))]
    assert numbers == [["1", "3"], ["1", "1"], ["0", "0"], ["2", "4"], *[["0", "0"]] * 4]
