"""Plant the faults of ``tools/mutants.toml`` one at a time, and run the tests that should notice
each.

    make mutants                              # all of them
    make mutants MUTANTS=icl_patch/patch      # those of files whose path begins so

The faults are of Python and Triton; the same file holds the tests for each part of the code. Each
fault is planted in a copy of the repository in ``build/mutants``. A test that notices a fault is
run once more without it. The exit status is 1 if a fault survives, or if such a test fails without
the fault.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.lint import link

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants"
SETTINGS = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8"))
CPU_SECONDS = 400  # of one process of tests: a fault may make a loop endless
Fault = dict[str, str]  # its path, and the text that becomes another


def text_of(fault: Fault) -> str:
    """The text of its file, in which the place occurs once."""
    text = (ROOT / fault["path"]).read_text(encoding="utf-8")
    if text.count(fault["old"]) != 1:
        raise SystemExit(
            f"expected {fault['old']!r} once in {fault['path']}, found it"
            f" {text.count(fault['old'])} times: mend tools/mutants.toml"
        )
    return text


def tests_of(path: str) -> list[str]:
    """The tests of the longest part of the code that the path begins with."""
    table: dict[str, list[str]] = SETTINGS["tests"]
    return table[max((name for name in table if path.startswith(name)), key=len)]


def make_copy() -> None:
    """A copy of the repository, with its package laid out in a folder of its own."""
    shutil.rmtree(COPY, ignore_errors=True)
    made = ("build", "dist", ".*", "__pycache__", "*.egg-info", "_native.so")
    shutil.copytree(ROOT, COPY, ignore=shutil.ignore_patterns(*made))
    (COPY / "build").mkdir()
    for name in ("peft", "torchao"):  # the tests look for them there
        (COPY / "build" / name).symlink_to(ROOT / "build" / name)
    link(COPY, COPY / "site" / "icl_patch")
    spec = find_spec("icl_patch")
    assert spec and spec.origin
    package = Path(spec.origin).parent
    shutil.copy2(package / "ops" / "_native.so", COPY / "icl_patch" / "ops")
    for metadata in package.parent.glob("icl_patch-*"):  # entry points of commands
        shutil.copytree(metadata, COPY / "site" / metadata.name)


def first_failure(tests: list[str]) -> str | None:
    """The first test in the copy that fails, if any does."""
    limit = (resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests],
        cwd=COPY,
        env=os.environ | {"PYTHONPATH": str(COPY / "site"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(*limit),
    )
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise SystemExit(f"expected tests in {tests}, pytest found none: mend tools/mutants.toml")
    # a test may show the output of another pytest: its own line is the last
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
    return None if done.returncode == 0 else failed[-1] if failed else "the whole process"


def main(*parts: str) -> int:
    """Run the faults; returns the exit status."""
    make_copy()
    bad = 0
    for fault in (x for x in SETTINGS["named"] if x["path"].startswith(parts or "")):
        target, text = COPY / fault["path"], text_of(fault)
        target.write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")
        failed = first_failure(tests_of(fault["path"]))
        target.write_text(text, encoding="utf-8")
        outcome = f"noticed by {failed}" if failed else "survived"
        # a test that fails without the fault too has not noticed it
        if failed and "::" in failed and first_failure([failed]):
            outcome = f"{failed} fails without it"
        bad += not outcome.startswith("noticed")
        print(f"{fault['path']}: {fault['new']}: {outcome}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
