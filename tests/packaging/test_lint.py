"""``make lint`` fails on an import that runs upwards, and on a native library that torch or Python
binds to one of its versions; the settings of ``make mutants`` name files that exist.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.compiled import COMPILER, needs_compiler

from tools import mutants

REPOSITORY = Path(__file__).parents[2]


def lint(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A check of ``make lint``, which fails."""
    command = [sys.executable, "-P", REPOSITORY / "tools" / script, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done


UPWARD = {
    "icl_patch/ops/native.py": ("import icl_patch.patcher", "icl_patch.patcher"),
    "triton_kernels/runtime/config.py": (
        "from icl_patch.models import block_detection",
        "icl_patch.models.block_detection",
    ),
    "icl_patch/cli/arguments.py": ("import icl_patch.bench", "icl_patch.bench"),
    "icl_patch/static/fit.py": ("from tools import measure", "tools.measure"),
}


def test_upward_imports_are_found(tmp_path: Path) -> None:
    pytest.importorskip("importlinter")
    for name in ("icl_patch", "triton_kernels", "bench", "tools"):
        ignored = shutil.ignore_patterns("*.so", "*.safetensors", "results", "__pycache__")
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    for file, (line, _) in UPWARD.items():
        with (tmp_path / file).open("a", encoding="utf-8") as source:
            source.write(f"\n{line}\n")
    found = lint("lint.py", "imports", tmp_path).stdout
    for file, (_, imported) in UPWARD.items():
        module = file.removesuffix(".py").replace("triton_kernels", "icl_patch/kernels")
        assert f"{module.replace('/', '.')} -> {imported}" in found


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
    pytest.importorskip("torch_abi_audit")
    library = tmp_path / "other.so"
    command = [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", library]
    subprocess.run(command, input=source, text=True, check=True)
    found = lint("lint_native.py", library).stderr
    assert {finding for finding in findings if finding in found} == findings
    assert len(found.splitlines()) == len(findings)


def test_every_named_fault_has_its_place_and_its_tests() -> None:
    for fault in mutants.SETTINGS["named"]:
        assert fault["old"] in mutants.text_of(fault) and mutants.tests_of(fault["path"])
    for part, tests in mutants.SETTINGS["tests"].items():
        assert list(mutants.ROOT.glob(f"{part}*")), part
        named = [test.removeprefix("--ignore=").partition("::")[0] for test in tests]
        assert all((mutants.ROOT / test).exists() for test in named), named
