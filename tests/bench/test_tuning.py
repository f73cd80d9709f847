"""The tuning command without a GPU: what is chosen, what is checked, what is compiled and
written.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from icl_patch.bench import tuning
from icl_patch.bench.tuning import Shapes
from icl_patch.cli import main as cli
from icl_patch.kernels import compilation
from icl_patch.kernels.runtime.config import (
    GEMV,
    PATHS,
    Config,
    TunedConfig,
    data_files,
    parse,
)

BF16 = torch.bfloat16


class Fake:
    """Measures without a GPU: a candidate's time is as good as its place among the ``liked`` of
    both paths, and some are wrong or spill. Four splits are the fastest, and an early launch is.
    """

    def __init__(
        self, liked: Sequence[Config], wrong: Sequence[Config] = (), spilling: Sequence[Config] = ()
    ) -> None:
        self.liked, self.wrong, self.spilling = list(liked), wrong, spilling
        self.compiled: list[tuple[int, int]] = []
        self.stop_at = 0

    def __call__(self, *_: object) -> "Fake":
        return self

    def compile(self, configs: Sequence[Config], shapes: Shapes, cases: Shapes) -> None:
        self.compiled.append((len(configs), len(cases) * len(shapes)))
        if len(self.compiled) == self.stop_at:
            raise KeyboardInterrupt

    def seconds(self, cases: Shapes, config: Config, n: int, k: int) -> list[float]:
        if cases is tuning.FUSED_CASES:
            return [abs(config.fused - (4 if n <= 4096 else 64)) + 1.0]
        if config in self.wrong:
            return []
        blocks = replace(config, splits=1, pdl=False)
        place = self.liked.index(blocks) if blocks in self.liked else 99
        return [1.0 + place - 0.2 * (config.splits == 4) - 0.1 * config.pdl]

    def problem(self, entry: TunedConfig) -> str | None:
        blocks = replace(entry.config, fused=32, splits=1, pdl=False)
        return "spills" if blocks in self.spilling else None


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the device."""
    for name, value in {
        "get_device_capability": lambda _: (9, 0),
        "device": lambda _: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(tuning, "gpu_name", lambda device: "NVIDIA Test 9")
    monkeypatch.setattr(
        tuning,
        "environment",
        lambda device: dict.fromkeys(("icl_patch", "torch", "triton", "cuda"), "1.2"),
    )


@pytest.fixture
def tuned(h100: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What is written with a Fake; it must be the file."""

    def write(fake: Fake, quick: bool = False) -> tuple[TunedConfig, ...]:
        monkeypatch.setattr(tuning, "Measuring", fake)
        options = tuning.TuningOptions(torch.device("cuda"), (BF16,), quick)
        path, entries = tuning.write(options, tmp_path, print)
        assert path == tmp_path / "nvidia-test-9.json"
        assert parse(path.read_text()) == entries
        return entries

    return write


@pytest.mark.parametrize("quick", [False, True])
def test_the_fastest_that_is_right_and_does_not_spill_is_chosen(
    quick: bool, tuned: Callable[..., Any]
) -> None:
    tried = {path: tuning.candidates(BF16, path) for path in PATHS}
    first, second, good = ([found[i] for found in tried.values()] for i in (2, 3, 4))
    fake = Fake([*first, *second, *good], wrong=first, spilling=second)
    entries, known = tuned(fake, quick), data_files()["untuned"]
    mine = [entry for entry in entries if entry.dtype == "bfloat16"]
    for path in PATHS:
        found = {replace(e.config, fused=32, splits=1, pdl=False) for e in mine if e.path == path}
        assert found == {tried[path][4]}
    # one entry a class of N and none by rows: one order of summation in each path
    of_gemv = [e for e in mine if e.path == GEMV]
    assert [(e.max_n, e.config.fused, e.config.splits) for e in of_gemv] == [
        (1728, 4, 4),
        (4096, 4, 4),
        (16384, 64, 1),
        (None, 64, 1),
    ]
    assert all(e.config.pdl == (e.path == GEMV) for e in mine)
    assert [e for e in entries if e.dtype != "bfloat16"] == [
        e for e in known if e.dtype != "bfloat16"
    ]
    assert fake.compiled[0] == (len(tried[GEMV]), (1 * 3 if quick else 2 * 5))


def test_splits_are_tried_for_few_outputs_and_early_launches_where_there_are_any() -> None:
    config = Config(True, 16, 16, 64, 4, 2)
    for upper, capability, splits, pdl in (
        (4096, 90, {1, 2, 4, 8}, {False, True}),
        (4096, 80, {1, 2, 4, 8}, {False}),
        (16384, 90, {1}, {False, True}),
        (None, 80, {1}, {False}),
    ):
        found = tuning.with_launches(config, upper, capability)
        assert {(c.splits, c.pdl) for c in found} == {(s, p) for s in splits for p in pdl}
        assert {replace(c, splits=1, pdl=False) for c in found} == {config}
        assert len(found) == len(splits) * len(pdl)


def test_the_best_runs_everywhere_and_is_the_fastest_relative_to_the_others() -> None:
    uneven, even, broken = tuning.candidates(BF16, GEMV)[:3]
    times = {
        uneven: [[1.0, 2.0], [3000.0]],
        even: [[2.0, 2.0], [1000.0]],
        broken: [[0.1, 0.1], []],
    }

    class Measured(Fake):
        def seconds(self, cases: Shapes, config: Config, n: int, k: int) -> list[float]:
            return times[config][n]

    def best(shapes: Shapes) -> Config:
        of = functools.partial(TunedConfig, GEMV, "bfloat16", None)
        return tuning.best(of, list(times), shapes, [(1, 1)], Measured([])).config

    assert best([(0, 64), (1, 64)]) == even
    with pytest.raises(ValueError, match="expected a candidate that runs at a shape, found none"):
        best([])
    few, some, many = (1000, 64), (1729, 64), (300000, 64)
    assert list(tuning.classes([few, some, many])) == [
        (1728, [few]),
        (4096, [some]),
        (None, [many]),
    ]
    assert list(tuning.classes([])) == [(None, [])]


def test_a_stopped_run_leaves_a_whole_file(tuned: Callable[..., Any], tmp_path: Path) -> None:
    fake = Fake(tuning.candidates(BF16, GEMV)[5:6] + tuning.candidates(BF16, "gemm")[5:6])
    fake.stop_at = 14  # in the second path, behind three phases for each class of the first
    with pytest.raises(KeyboardInterrupt):
        tuned(fake)
    entries, known = parse((tmp_path / "nvidia-test-9.json").read_text()), data_files()["untuned"]
    mine = [entry for entry in entries if entry.dtype == "bfloat16"]
    assert [entry.path for entry in mine] == [GEMV] * 4 + ["gemm"]
    assert [entry in known for entry in mine] == [False] * 4 + [True]


def test_the_file_says_where_it_comes_from(tuned: Callable[..., Any], tmp_path: Path) -> None:
    target = tmp_path / "nvidia-test-9.json"
    target.write_text("of another day")
    entries = tuned(Fake(tuning.candidates(BF16, GEMV)[5:6]))
    assert [file.name for file in tmp_path.iterdir()] == [target.name]
    head = json.loads(target.read_text())
    assert (head["gpu"], head["capabilities"]) == ("NVIDIA Test 9", [90])
    assert "torch 1.2, triton 1.2, cuda 1.2" in head["note"]
    # a run that fails leaves what was there
    with pytest.raises(ValueError, match="found none"):
        tuned(Fake([], wrong=tuning.candidates(BF16, GEMV)))
    assert parse(target.read_text()) == entries


def test_the_command_refuses_what_is_no_gpu(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert cli.main(["tune", "--out", str(tmp_path)]) == 2
    assert "expected a CUDA device (--device cuda), got cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_entries_of_the_untuned_file_can_be_kept_and_one_that_takes_too_much_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compilation, "VARIANTS", {"plain": compilation.VARIANTS["plain"]})
    entry = next(
        entry
        for entry in data_files()["untuned"]
        if entry.path == "gemm" and entry.dtype == "bfloat16"
    )
    with ThreadPoolExecutor(1) as pool:
        assert tuning.entry_problem(pool, entry, 90) is None
        # sums in 256 registers a thread
        large = replace(entry, config=replace(entry.config, block_n=256, block_m=128, num_warps=4))
        assert tuning.entry_problem(pool, large, 80) == "plain on sm_80 spills registers"
        # stages of 32 KB, for which an H100 has room and an A100 has not
        config = Config(True, 128, 128, 64, 8, 7)
        assert tuning.entry_problem(pool, replace(entry, config=config), 90) is None
        problem = tuning.entry_problem(pool, replace(entry, config=config), 80)
        assert problem is not None and "shared memory" in problem


COMPILE = """
import os, torch
from icl_patch.bench import tuning
from icl_patch.kernels import compilation
from icl_patch.kernels.runtime.config import Config

def kernels():
    folders = os.walk(os.environ["TRITON_CACHE_DIR"])
    return sum(name.endswith(".cubin") for _, _, names in folders for name in names)

if __name__ == "__main__":
    config = Config(True, 16, 16, 64, 4, 2, fused=4)
    variant = (config, torch.bfloat16, (64, 128), 1, 2)
    with tuning.ProcessPoolExecutor(1, mp_context=tuning.get_context("spawn")) as pool:
        assert list(pool.map(tuning.kernel_problem, [(90, variant, False)])) == [None]
    assert kernels() == 1, kernels()
    launch = compilation.linear_launch(*variant)
    compilation.compile_ahead(launch, 90)
    assert kernels() == 1, kernels()  # found in the cache, by another process
    wrong = tuning.kernel_problem((90, (config, torch.complex64, (64, 128), 1, 2), False))
    assert wrong is not None and "Error" in wrong, wrong
"""


def test_what_is_compiled_side_by_side_is_found_when_it_is_launched(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(COMPILE)
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
