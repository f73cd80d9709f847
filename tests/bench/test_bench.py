"""The benchmarks: what is checked, timed, recorded, resumed and drawn. No assertion on time."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from icl_patch import ops
from icl_patch.bench import BENCHMARKS, timing
from icl_patch.bench.cases import linear
from icl_patch.bench.harness import Case, Comparison
from icl_patch.bench.results import Results, load_all, page
from icl_patch.bench.timing import InTurn, compare
from icl_patch.cli import main as cli

CPU = torch.device("cpu")


def case(name: str, calls: dict[str, Any], wrong: tuple[str, ...] = (), **more: Any) -> Case:
    def check(call: str, result: Any) -> float:
        if call in wrong:
            raise AssertionError("expected 1, got 2")
        return 0.5

    return Case(name, lambda: Comparison("ours", calls, check, **more))


def done() -> object:
    return 1


@pytest.fixture(autouse=True)
def _one_call_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST", 0)


# Timing


def test_every_round_times_every_call_and_a_slow_one_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, counts = [0.0], {"fast": 0, "slow": 0, "endless": 0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call(name: str, seconds: float) -> Any:
        def run() -> None:
            counts[name] += 1
            clock[0] += seconds * (2 if counts[name] == 1 else 1)  # the first is cold

        return run

    calls = {"fast": call("fast", 1.0), "slow": call("slow", 4.0), "endless": call("endless", 60.0)}
    monkeypatch.setattr(timing, "MOST", 20)
    found = compare(calls, CPU, rounds=8)
    assert counts == {"fast": 1 + 8, "slow": 1 + 2, "endless": 1}
    assert [found[name]["median"] for name in calls] == [1, 4, 120]
    assert found["fast"]["low"] == found["fast"]["high"] == 1


def test_calls_that_share_a_turn_do_not_take_the_same_input() -> None:
    seen: list[str] = []
    turn = itertools.count()
    one, two = (InTurn(lambda x, of=of: seen.append(of + x), ["1", "2", "3"], turn) for of in "ab")
    for call in (one, two, two, one, one):
        call()
    assert seen == ["a1", "b2", "b3", "a1", "a2"]


# What becomes of the cases


def test_a_wrong_call_has_no_time_and_the_run_goes_on(tmp_path: Path) -> None:
    def raises() -> object:
        raise RuntimeError("no memory\nat all")

    def cannot_be_built() -> Comparison:
        raise ValueError("no such weight")

    both, nbytes = {"ours": done, "other": done}, {"ours": 8, "other": 4}
    cases = [
        case("a", both, ("other",), nbytes=nbytes, ceiling="other", notes={"passes": 3.0}),
        case("b", {"ours": done, "other": raises}),
        Case("c", cannot_be_built),
        case("d", both, ("ours",)),
        case("e", both, nbytes=nbytes, ceiling="other"),
    ]
    results = Results("linear", CPU, tmp_path)
    lines = list(results.measure(cases, rounds=3))
    assert [good for _, good in lines] == [True] + [True, False] * 4 + [True, True]
    rows = {(row["case"], row["call"]): row for row in json.loads(results.path.read_text())["rows"]}
    assert rows["a", "other"]["failed"] == "expected 1, got 2"
    assert "seconds" not in rows["a", "other"]
    mine, beside = rows["a", "ours"], rows["e", "ours"]
    assert (mine["ratio"], mine["error"], mine["passes"]) == (1, 0.5, 3)
    assert "GB/s" in mine and "of ceiling" not in mine
    assert beside["of ceiling"] == pytest.approx(2 * rows["e", "other"]["ratio"])
    assert beside["ceiling GB/s"] == rows["e", "other"]["GB/s"]
    assert rows["e", "other"]["of ceiling"] == 1
    assert rows["b", "other"]["failed"] == "RuntimeError: no memory"
    assert rows["c", ""]["failed"] == "ValueError: no such weight"
    assert "failed" in rows["d", "ours"] and "ratio" not in rows["d", "other"]
    assert "seconds" in rows["d", "other"]
    table = results.path.with_suffix(".md").read_text()
    assert "| FAILED: expected 1, got 2 |" in table
    drawn = [line for line in table.splitlines() if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in drawn] == [10] * 7
    assert table.count("- Failed: ") == 4


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code and failures are measured again, a file of another environment is begun anew."""
    built: list[str] = []

    def named(name: str) -> Case:
        return Case(name, lambda: (built.append(name), case(name, {"ours": done}).build())[1])

    def results() -> Results:
        return Results("linear", CPU, tmp_path)

    cases = [named("a"), named("b")]
    list(results().measure(cases[:1], rounds=1))
    lines = [line for line, _ in results().measure(cases, rounds=1)]
    assert built == ["a", "b"]
    assert "1 of 2 cases to measure" in lines[0]
    list(results().measure(cases, rounds=1, fresh=True))
    assert built == ["a", "b", "a", "b"]
    found = results()
    assert [row["case"] for row in found.data["rows"]] == ["a", "b"]
    monkeypatch.setattr("icl_patch.bench.results.code_fingerprint", lambda: "other")
    assert not results().has("a")
    list(found.measure([case("a", {"ours": done}, wrong=("ours",))]))
    assert not found.has("a")
    lines = [line for line, _ in results().measure(cases, seconds=-1)]
    assert lines == ["2 of 2 cases to measure", "out of time: 2 cases left"]
    found.data["environment"] |= {"torch": "0.0"}
    list(found.measure(cases, rounds=1))
    assert found.data["rows"] and results().data["rows"] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_linear_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SHAPES", {"one": (1024, 512)})
    monkeypatch.setattr(linear, "ROWS", (1, 40))
    assert cli.main(["bench", "linear", "--device", "cuda", "--out", str(tmp_path), "--json"]) == 0
    [found] = load_all(tmp_path, "linear")
    assert len({row["case"] for row in found["rows"]}) == 2 * 2 * 3
    assert all(row["seconds"]["median"] > 0 for row in found["rows"])


# The benchmarks themselves


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings = {"SHAPES": {"one": (95, 63)}, "ROWS": (3,), "RANKS": (1, 2), "COLD": 2**15}
    for name, value in settings.items():
        monkeypatch.setattr(linear, name, value)
    yield
    linear.cold.cache_clear()


def test_linear_through_the_command_line(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op that is broken fails."""
    command = ["bench", "linear", "--out", str(tmp_path)]
    assert cli.main([*command, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["linear"]["rows"]) >= 2 * 5
    assert cli.main(command) == 0
    assert "0 of 4 cases to measure" in capsys.readouterr().err
    [found] = load_all(tmp_path, "linear")
    assert len({row["case"] for row in found["rows"]}) == 4
    rows = found["rows"]
    for row in rows:
        assert row["ratio"] > 0 and (row["call"] == linear.READ or row["error"] >= 0)
        assert not row["ours"] or min(row["of ceiling"], row["ceiling GB/s"]) > 0
    assert [row["of ceiling"] for row in rows if row["call"] == linear.READ] == [1] * 4
    calls = {row["call"] for row in rows}
    assert {"patched_linear", "F.linear", "unfused", "W + ΔW"} <= calls
    assert linear.has_peft() == ("PEFT" in calls)
    assert cli.main(["bench", "--tables", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [str(next(tmp_path.glob("*.md")))]
    monkeypatch.setattr(ops, "patched_linear", lambda z, weight, u, v: F.linear(z, weight))
    assert cli.main([*command, "--fresh"]) == 1
    for row in load_all(tmp_path, "linear")[0]["rows"]:
        assert not row["ours"] or row["failed"].startswith("expected the fp64 result")


@pytest.mark.parametrize("call", ["patched_linear", "F.linear", "unfused", "W + ΔW", "PEFT"])
@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_a_call_without_its_patch_or_with_one_too_many_fails(
    small: None, dtype: torch.dtype, call: str
) -> None:
    comparison = linear.comparison("one", dtype, 3, 2, CPU)
    if call not in comparison.calls:
        pytest.skip("peft is not installed")
    comparison.check(call, comparison.calls[call]())
    other = comparison.calls["patched_linear" if call == "F.linear" else "F.linear"]()
    with pytest.raises(AssertionError, match="expected the fp64 result"):
        comparison.check(call, other)
    with pytest.raises(AssertionError, match="expected"):
        comparison.check(call, torch.full_like(other, torch.nan))


# What is committed


@pytest.mark.parametrize("name", BENCHMARKS)
def test_committed_tables_are_those_of_their_numbers(name: str) -> None:
    folder = Path(__file__).parents[2] / "bench" / "results"
    for found in load_all(folder, name):
        assert (folder / f"{found['file']}.md").read_text(encoding="utf-8") == page(found)
        assert not [row for row in found["rows"] if "failed" in row]


@pytest.mark.parametrize("arguments", [["nonsense"], ["--seconds", "0"]])
def test_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    try:
        status = cli.main(["bench", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert "expected" in capsys.readouterr().err
