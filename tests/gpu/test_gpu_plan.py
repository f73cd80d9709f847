"""``tools/gpu.sh`` without a GPU: which steps run, in which order and time, and what they leave."""

import os
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "$*" >>calls
echo "saw $*"
case "$*" in
*"$FAIL"*) exit 2 ;;
*"$SLOW"*) exec sleep 60 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script, with a Python, a make and tools that only note what they are asked."""
    for name in ("build", "tools", "csrc", "icl_patch", "bench", "tests", "triton_kernels/configs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "triton_kernels" / "configs" / "gpu.json").write_text("{}")
    (tmp_path / "tools" / "gpu.sh").write_text((REPOSITORY / "tools" / "gpu.sh").read_text())
    for name in ("build/python", "tools/sanitize.sh", "make"):
        (tmp_path / name).write_text(PYTHON)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(checkout: Path, **settings: str) -> tuple[int, str, list[str]]:
    """The exit status, what was printed, and the calls that were made."""
    (checkout / "calls").write_text("")
    defaults = {"FAIL": "nothing", "SLOW": "nothing", "MAKE": "./make", "ICL_RESULTS": "results"}
    settings = {"PATH": os.environ["PATH"]} | defaults | settings
    command = ["sh", "tools/gpu.sh"]
    done = subprocess.run(command, cwd=checkout, env=settings, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout, (checkout / "calls").read_text().splitlines()


def test_every_part_in_order_and_nothing_twice(checkout: Path) -> None:
    status, out, calls = run(checkout, BUDGET="4000")
    assert status == 0, out
    wanted = ["durations=8", "bench inversion", "bench linear", "bench generation"]
    wanted += ["two_to_the_31", "pytest -m gpu", "memcheck", "tune --device", "bench linear"]
    places = []
    for text in wanted:  # each after the one before
        begin = places[-1] + 1 if places else 0
        places.append(next(i for i, call in enumerate(calls[begin:], begin) if text in call))
    for part in "ABCDEF":
        log = (checkout / "results" / f"gpu-{part}.log").read_text()
        assert f"gpu: {part}-setup took" in log and "saw " in log
    assert (checkout / "results" / "configs" / "gpu.json").exists()
    status, out, again = run(checkout, BUDGET="4000")
    assert status == 0 and "A-tests has passed before" in out
    assert not any("pytest" in call or "-m icl_patch" in call for call in again)
    (checkout / "icl_patch" / "code.py").write_text("changed")
    assert any("pytest" in call for call in run(checkout, PART="A")[2])


def test_the_budget_holds_a_to_c(checkout: Path) -> None:
    """By their limits; a part begins only if what is left holds its own."""
    script = checkout / "tools" / "gpu.sh"
    limits = dict(re.findall(r" ([A-F]):(\d+)", script.read_text()))
    assert sum(int(limits[part]) for part in "ABC") <= 1800
    script.write_text(script.read_text().replace("step tests 400", "step tests 4"))
    status, out, calls = run(checkout, SLOW="durations=8", BUDGET="593")
    assert status == 1 and 'make gpu PART="E F"' in out
    assert "memcheck" not in calls[-1] and "pytest -m gpu" in calls[-1]
    status, out, calls = run(checkout, BUDGET="589")
    assert (status, calls) == (3, []) and 'make gpu PART="A B C D E F"' in out


def test_what_fails_or_hangs_does_not_stop_the_rest(checkout: Path) -> None:
    """But that there is no device: tests would be skipped, one and all, and pass."""
    script = checkout / "tools" / "gpu.sh"
    script.write_text(script.read_text().replace("step inversion 100", "step inversion 1"))
    status, out, calls = run(checkout, PART="B", SLOW="bench inversion")
    assert status == 1 and "gpu: B-inversion ran out of time" in out
    assert "gpu: failed: B-inversion" in out and "bench linear" in calls[-1]
    status, out, calls = run(checkout, PART="B", FAIL="bench inversion")
    assert status == 1 and "B-linear has passed before" in out
    assert any("bench inversion" in call for call in calls)
    assert run(checkout, PART="B")[0] == 0
    status, out, calls = run(checkout, FAIL="native.describe")
    assert status == 1 and "gpu: failed: A-versions" in out
    assert not any("pytest" in call or "-m icl_patch" in call for call in calls)
