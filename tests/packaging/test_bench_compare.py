"""Two commits timed side by side: the interval of a ratio, the order of the runs, the modes."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.numeric import seeded

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import bench_compare
from bench_compare import median_interval

from icl_patch import ContextPatcher


@pytest.mark.parametrize(("count", "rank"), [(5, 1), (6, 1), (8, 1), (9, 2), (12, 3), (15, 4)])
def test_the_interval_of_a_median(count: int, rank: int) -> None:
    """Its ends are order statistics; its level counts every pattern of signs about the median."""
    ratios = torch.rand(count, generator=seeded(count)).add(0.5).tolist()
    median, low, high, found = median_interval(ratios)
    assert median == pytest.approx(float(torch.tensor(ratios).double().quantile(0.5)))
    assert low == sorted(ratios)[rank - 1]
    assert high == sorted(ratios, reverse=True)[rank - 1]
    below = [sum(signs) for signs in itertools.product((0, 1), repeat=count)]

    def level(rank: int) -> float:
        return sum(rank <= smaller <= count - rank for smaller in below) / len(below)

    assert found == pytest.approx(level(rank))
    assert (found >= 0.95) == (count > 5)
    assert level(rank + 1) < 0.95  # no narrower one would do


@pytest.mark.parametrize(
    ("ratios", "good"),
    [
        ([1.1, 1.05, 1.2, 1.04, 1.3, 1.1, 1.5], False),
        ([1.1, 1.05, 1.2, 1.02, 1.3, 1.1, 1.5], True),  # one pair says that it may be noise
        ([0.9] * 7, True),
    ],
)
def test_slower_than_the_limit_in_every_pair(ratios: list[float], good: bool) -> None:
    times = list(enumerate(ratios, 1))
    pairs = [{"OLD": {"a": x, "b": x}, "NEW": {"a": x, "b": x * ratio}} for x, ratio in times]
    table, found = bench_compare.report(pairs, 1.03)
    assert found == good
    _, old, new, ratio, interval, level, verdict = ([*column.cells] for column in table.columns)
    assert (old, level) == (["4000.000"] * 2, ["98.4 %"] * 2)
    assert ratio == ["1.000", f"{sorted(ratios)[3]:.3f}"]
    assert interval == ["1.000 – 1.000", f"{min(ratios):.3f} – {max(ratios):.3f}"]
    assert new[1] == f"{1e3 * sorted(x * ratio for x, ratio in times)[3]:.3f}"
    assert verdict == ["", "" if good else "slower than 1.03"]


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commits whose build/python says that a step takes 1 s or 1.2 s, and two that must fail."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    git(tmp_path, "init", "--quiet")
    rule = "build/python:\n\tmkdir build && cp fake build/python && chmod +x build/python\n"
    (tmp_path / "Makefile").write_text(rule)
    (tmp_path / ".gitignore").write_text("build\n")
    packages = {"one": "$PWD/x.py", "two": "$PWD/x.py", "other": "/x.py", "broken": ""}
    for tag, package in packages.items():
        seconds = 1.2 if tag == "two" else 1
        said = f"""echo '{{"package": "'{package}'", "seconds": {{"plain": {seconds}}}}}'"""
        (tmp_path / "fake").write_text(f"#!/bin/sh\necho {tag} $* >>{tmp_path}/build/log\n{said}\n")
        if tag == "broken":
            (tmp_path / "Makefile").write_text("build/python:\n\techo no compiler >&2; false\n")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "-m", tag)
        git(tmp_path, "tag", tag)
    monkeypatch.setattr(bench_compare, "ROOT", tmp_path)
    monkeypatch.setenv("MAKEFLAGS", "--touch")  # as an outer make may say
    return tmp_path


def test_two_commits_are_timed_in_turn(repository: Path, capsys: pytest.CaptureFixture) -> None:
    options = ["--pairs", "3", "--modes", "plain", "--rows", "2"]
    assert bench_compare.main(["one", "two", *options]) == 1
    shown = capsys.readouterr().out
    assert "1.200" in shown and "slower than 1.03" in shown
    assert all(git(repository, "rev-parse", tag)[:12] in shown for tag in ("one", "two"))
    runs = [line.split() for line in (repository / "build" / "log").read_text().splitlines()]
    assert [run[0] for run in runs] == ["one", "two", "two", "one", "one", "two"]
    assert runs[0][1:3] == [str(bench_compare.TIMER), "--time"]
    assert '"rows": 2, "context": 256' in " ".join(runs[0])
    assert bench_compare.main(["one", "two", "--pairs", "1", "--limit", "1.3"]) == 0
    assert bench_compare.main(["two", "two", "--pairs", "1"]) == 0


@pytest.mark.parametrize(
    ("commit", "message"),
    [("none", "rev-parse"), ("other", "expected the package of"), ("broken", "no compiler")],
)
@pytest.mark.usefixtures("repository")
def test_a_commit_that_cannot_be_timed(
    commit: str,
    message: str,
    capsys: pytest.CaptureFixture,
) -> None:
    assert bench_compare.main(["one", commit, "--pairs", "1"]) == 2
    assert message in capsys.readouterr().err


def test_the_steps_that_are_timed_are_of_their_mode() -> None:
    model, ids = bench_compare.build_model("tiny"), torch.arange(3, 11).unsqueeze(0)
    modes = {}
    for mode in ("two_pass", "two_stream", "shared_cache"):
        with ContextPatcher(model, bench_compare.UPDATES.get(mode, "stable")) as patcher:
            steps = [*bench_compare.patched_steps(patcher, mode, ids, 2)]
            assert len(steps) == 2
            modes[mode] = steps[-1].mode
    assert modes == {mode: mode for mode in ("two_pass", "two_stream", "shared_cache")}
    with ContextPatcher(model, "stable") as patcher:
        replayed = [*bench_compare.patched_steps(patcher, "replay", ids, 2)]
    plain = itertools.islice(bench_compare.plain_steps(model, ids), 2)
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
        assert torch.equal(next(plain), logits.argmax(-1, keepdim=True))
    assert len(replayed) == 2
    assert (torch.cat(replayed)[:, -1] - logits).abs().max() <= 1e-4 * logits.abs().max()


def test_every_mode_is_timed(
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler has tests of its own: here it is left out."""
    modes = [mode for mode in bench_compare.MODES if mode != "compiled"]
    settings = {"size": "tiny", "modes": modes, "rows": 2, "context": 8, "steps": 3, "threads": 1}
    assert bench_compare.main(["--time", json.dumps(settings)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["seconds"]) == modes
    assert all(0 < seconds < 60 for seconds in found["seconds"].values())
    clock = itertools.accumulate([1, 4, 1, 2, 1, 3, 1, 1])  # steps of 4, 2, 3 and 1 s
    monkeypatch.setattr(bench_compare.time, "perf_counter", lambda: next(clock))
    steps = iter(range(100))
    assert bench_compare.step_seconds(steps, 4) == 1.25
    assert next(steps) == 4 + bench_compare.WARM_UP > 5
