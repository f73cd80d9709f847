"""The count of the code's tokens."""

import sys
from pathlib import Path

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


def test_comments_and_docstrings_do_not_count() -> None:
    # import os | class A : | b = "" | def f ( self , x = 1.5 ) : | return f""
    assert code_tokens.python_tokens(PYTHON) == 2 + 3 + 3 + 10 + 2
    assert code_tokens.cpp_tokens("// a\n/* b\n c */ int f(x) { return 1.5e-3f; } // d\n") == 10
