"""The tuning command without a GPU: what is chosen and written. What a configuration has to pass is
checked in ``tests/support/interpreter_checks.py``.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from icl_patch.bench import tuning
from icl_patch.cli import main as cli
from icl_patch.kernels.runtime.config import Config, TunedConfig, data_files, parse

BF16 = torch.bfloat16
GOOD = tuning.candidates(BF16)[4]


def blocks(config: Config) -> Config:
    return replace(config, fused=32)


def seconds(weights: tuple[int, int], rows: int, rank: int, config: Config) -> float:
    """Few coefficients are the fastest at few outputs; the first candidate is fast and wrong."""
    if blocks(config) == tuning.candidates(BF16)[0]:
        raise AssertionError("expected the fp64 result")
    good = 1.0 if blocks(config) == GOOD else 2.0
    fused = abs(config.fused - (4 if weights[0] <= 4096 else 16)) / 100
    return good + fused


class Pool:
    """Runs the calls in this process, if it is told to."""

    runs = False

    def __init__(self, workers: int, context: Any) -> None:
        assert workers >= 1 and context.get_start_method() == "spawn"

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, function: Any, jobs: Any) -> list[Any]:
        return [function(job) for job in jobs if self.runs]


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Tunes for an H100 that there is not; what is written must be what is returned."""
    device = {"get_device_capability": lambda _: (9, 0), "device": lambda _: nullcontext()}
    for name, value in device.items():
        monkeypatch.setattr(torch.cuda, name, value)
    versions = dict.fromkeys(("icl_patch", "torch", "triton"), "1.2")
    monkeypatch.setattr(tuning, "gpu_name", lambda device: "NVIDIA Test 9")
    monkeypatch.setattr(tuning, "environment", lambda device: versions)
    monkeypatch.setattr(tuning, "cold", lambda device, shape, dtype: shape)
    monkeypatch.setattr(tuning, "seconds", seconds)
    monkeypatch.setattr(tuning, "ProcessPoolExecutor", Pool)
    folder = tmp_path / "configs"

    def write(
        quick: bool = False, dtypes: tuple[torch.dtype, ...] = (BF16,)
    ) -> tuple[TunedConfig, ...]:
        path, entries = tuning.write(torch.device("cuda"), dtypes, quick, folder, print)
        assert path == folder / "nvidia-test-9.json"
        assert parse(path.read_text()) == entries
        return entries

    return write


@pytest.mark.parametrize("quick", [False, True])
def test_the_fastest_that_is_right_is_chosen(quick: bool, tuned: Callable[..., Any]) -> None:
    entries, known = tuned(quick), data_files()["untuned"]
    mine = [entry for entry in entries if entry.dtype == "bfloat16"]
    # one entry a class of N and none by rows: one order of summation
    expected = [(1728, 4), (4096, 4), (16384, 16), (None, 16)]
    assert [(entry.max_n, entry.config.fused) for entry in mine] == expected
    assert all(blocks(entry.config) == GOOD for entry in mine)
    others = [[e for e in x if e.dtype != "bfloat16"] for x in (entries, known)]
    assert others[0] == others[1]


def test_the_best_runs_everywhere_and_is_the_fastest_relative_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uneven, even, broken = tuning.candidates(BF16)[:3]
    times = {uneven: {1: [1.0], 2: [3000.0]}, even: {1: [2.0], 2: [1000.0]}, broken: {1: [0.1]}}
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    monkeypatch.setattr(tuning, "cold", lambda device, shape, dtype: shape)
    monkeypatch.setattr(tuning, "seconds", lambda shape, *_: times[_[-1]][shape[0]][0])

    def fastest(*shapes: tuple[int, int]) -> Config:
        cases, pool = [(1, 1)], Pool(1, get_context("spawn"))
        return tuning.fastest(shapes, torch.device("cuda"), BF16, times, cases, print, pool)

    assert fastest((1, 64), (2, 64)) == even
    assert fastest((1, 64)) == broken
    with pytest.raises(ValueError, match=r"expected a candidate that runs at .*, found none"):
        fastest((3, 64))


def test_what_is_measured_is_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every number of rows that is launched, with the coefficients where they are a launch."""
    compiled: list[tuple[str, int, int]] = []
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    monkeypatch.setattr(tuning, "cold", lambda device, shape, dtype: shape)
    monkeypatch.setattr(tuning, "seconds", lambda *_: float(len(compiled)))

    def compile_ahead(launch: Any, capability: int) -> None:
        name = launch.kernel.fn.__name__
        compiled.append((name, launch.programs, capability))
        if launch.programs > 20:
            raise RuntimeError("expected smaller blocks")

    monkeypatch.setattr(tuning, "compile_ahead", compile_ahead)
    config = tuning.candidates(BF16)[0]  # 16 outputs a program
    few, shapes = replace(config, fused=1), [(64, 512), (512, 64)]
    pool, device = Pool(1, get_context("spawn")), torch.device("cuda")
    pool.runs = True
    tuning.fastest(shapes, device, BF16, [config, few], [(16, 1)], print, pool)
    linear, coefficients = "_linear_kernel", "_coefficient_kernel"
    assert compiled == [
        *[(linear, 4, 90)] * 2,
        *[(coefficients, 16, 90), (linear, 4, 90), (linear, 4, 90)],
        (linear, 32, 90),  # the next ones are left to the measurement, which says why
        *[(coefficients, 16, 90), (linear, 32, 90)],
    ]


def test_a_stopped_run_leaves_a_whole_file_that_says_where_it_comes_from(
    tuned: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "configs" / "nvidia-test-9.json"
    target.parent.mkdir()
    target.write_text("of another day")

    choose = tuning.choose

    def stop(device: torch.device, dtype: torch.dtype, *more: Any) -> list[TunedConfig]:
        if dtype == torch.float16:
            raise KeyboardInterrupt
        return choose(device, dtype, *more)

    monkeypatch.setattr(tuning, "choose", stop)
    with pytest.raises(KeyboardInterrupt):
        tuned(dtypes=(BF16, torch.float16))
    head = json.loads(target.read_text())
    assert (head["gpu"], head["capabilities"]) == ("NVIDIA Test 9", [90])
    assert "icl_patch 1.2, torch 1.2, triton 1.2" in head["note"]
    entries, known = parse(target.read_text()), data_files()["untuned"]
    assert [entry.dtype for entry in entries if entry not in known] == ["bfloat16"] * 4
    assert [file.name for file in target.parent.iterdir()] == [target.name]


def test_the_command_refuses_what_is_no_gpu(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert cli.main(["tune", "--out", str(tmp_path)]) == 2
    assert "expected a CUDA device (--device cuda), got cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
