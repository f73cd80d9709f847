"""``make lint`` fails on a native library that torch or Python binds to one of its versions."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.compiled import COMPILER, needs_compiler

pytest.importorskip("torch_abi_audit")
REPOSITORY = Path(__file__).parents[2]


FOREIGN = """
namespace c10 { void warn(); }
extern "C" { void torch_later(); void torch_tag_core(); void PyErr_Clear(); }
void f() { c10::warn(), torch_later(), torch_tag_core(), PyErr_Clear(); }
"""
FINDINGS = {"c10::warn(), which", "torch_later, of no", "needs torch 2.12.0", "refers to Python"}


@needs_compiler
@pytest.mark.parametrize(
    ("source", "findings"), [(FOREIGN, FINDINGS), ("", {"refers to nothing of torch"})]
)
def test_other_symbols_are_found(source: str, findings: set[str], tmp_path: Path) -> None:
    library = tmp_path / "other.so"
    command = [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", library]
    subprocess.run(command, input=source, text=True, check=True)
    command = [sys.executable, "-P", REPOSITORY / "tools" / "lint_native.py", library]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert {finding for finding in findings if finding in done.stderr} == findings
    assert len(done.stderr.splitlines()) == len(findings)
