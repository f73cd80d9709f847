"""``make lint`` fails on a native library that torch or Python binds to one of its versions."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.compiled import COMPILER, needs_compiler

from icl_patch.ops import native

pytest.importorskip("torch_abi_audit")
REPOSITORY = Path(__file__).parents[2]


def lint_native(*library: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", REPOSITORY / "tools" / "lint_native.py", *library]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not native.serves("cpu"), reason="needs the native library")
def test_the_library_is_on_the_stable_abi() -> None:
    done = lint_native()
    assert done.returncode == 0, done.stderr
    assert "symbols of torch, from 2.11.0 on" in done.stdout


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
    done = lint_native(library)
    assert done.returncode == 1
    assert {finding for finding in findings if finding in done.stderr} == findings
    assert len(done.stderr.splitlines()) == len(findings)
