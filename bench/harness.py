"""Benchmarks as lists of cases: check the results, time the calls, record the rows.

:func:`measure` builds each :class:`Case`, checks the results of its calls, times the correct ones
and writes the table after every case, so that an interrupted run keeps its rows and a later one
resumes.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from icl_patch.bench.timing import Call, Timing, compare


@dataclass(frozen=True)
class Comparison:
    """Calls that do the same work.

    Attributes:
        ours: the call that the others are compared with.
        check: ``check(call, result)`` gives the result's error; raises AssertionError with expected
            and got.
        nbytes: bytes that each call must move at least.
        ceiling: the bandwidth measured here in bytes a second, or the call that measures it.
        apart: calls checked and timed after the others: they write so much that others would wait
            for their writes, or take long to prepare.
        units: how many units of work each call does; the ratio then compares time for each unit.
        unit: the name of a unit.
        notes: further numbers about our call.
        costs: ``costs(call, seconds)`` gives further numbers about a call, measured untimed.
    """

    ours: str
    calls: Mapping[str, Call]
    check: Callable[[str, Any], float | None]
    nbytes: Mapping[str, int] = field(default_factory=dict)
    ceiling: float | str | None = None
    apart: Collection[str] = ()
    units: Mapping[str, float] = field(default_factory=dict)
    unit: str = ""
    notes: Mapping[str, float] = field(default_factory=dict)
    costs: Callable[[str, float], Mapping[str, Any]] | None = None
    least_seconds: float = 0.02
    most_seconds: float = math.inf


@dataclass(frozen=True)
class Case:
    """One line of a table: its name, the function that builds its comparison when its turn comes
    (it may take much memory), and its parameters.
    """

    name: str
    build: Callable[[], Comparison]
    parameters: Mapping[str, str | int] = field(default_factory=dict)


UNFINISHED = "unfinished"  # marks the rows of a case that is not done


class RowSink(Protocol):
    """Where measured rows go: :class:`icl_patch.bench.results.Results`."""

    device: torch.device

    def has(self, name: str) -> bool:
        """Whether a case was measured already, with this code and in this environment."""

    def add(self, case: Case, rows: list[dict[str, Any]]) -> None:
        """Write the rows of a case, a row a call."""


def part_of(cases: Sequence[Case], part: tuple[int, int]) -> Sequence[Case]:
    """The i-th of n parts, for (i, n) with i from 1."""
    i, n = part
    if not 1 <= i <= n:
        raise ValueError(f"expected a part i/n with 1 ≤ i ≤ n, got {i}/{n}")
    return cases[len(cases) * (i - 1) // n : len(cases) * i // n]


def measure(
    cases: Sequence[Case],
    results: RowSink,
    rounds: int = 15,
    fresh: bool = False,
    seconds: float = math.inf,
) -> Iterator[tuple[str, bool]]:
    """Measure the cases that have no results yet; yields lines of progress, each with whether
    nothing has failed so far.

    Args:
        cases: the most important first.
        results: where the rows go.
        rounds: how often each call is timed.
        fresh: measure every case again.
        seconds: begin no case after this time.
    """
    end = time.monotonic() + seconds
    left = [case for case in cases if fresh or not results.has(case.name)]
    passed = True
    if len(left) < len(cases):
        yield (
            f"{len(cases) - len(left)} of {len(cases)} cases were measured before, with this code",
            passed,
        )
    for number, case in enumerate(left, 1):
        if time.monotonic() > end:
            yield f"out of time: {len(left) - number + 1} of {len(left)} cases left", passed
            return
        yield f"{number}/{len(left)} {case.name}", passed
        rows: list[dict[str, Any]] = []
        for rows in _rows(case, results.device, rounds):
            results.add(case, rows)
        passed = passed and not any("failed" in row for row in rows)
        yield "  " + describe(rows), passed


def _rows(case: Case, device: torch.device, rounds: int) -> Iterator[list[dict[str, Any]]]:
    """The rows known so far, yielded after every stage: an interrupted case keeps them."""
    head = {"case": case.name, **({"parameters": dict(case.parameters)} if case.parameters else {})}
    try:
        comparison = case.build()
    except Exception as error:  # the other cases still run
        yield [head | {"call": "", "ours": True, "failed": reason(error)}]
        return
    failed: dict[str, str] = {}
    errors: dict[str, float | None] = {}
    timings: dict[str, Timing] = {}
    costs: dict[str, dict[str, Any]] = {}

    def rows() -> list[dict[str, Any]]:
        known = []
        for name in comparison.calls:
            row = head | {"call": name, "ours": name == comparison.ours}
            if name in failed:
                known.append(row | {"failed": failed[name]})
            elif name in timings:
                known.append(
                    row
                    | _numbers(comparison, name, timings, errors[name])
                    | costs.get(name, {UNFINISHED: True})
                )
        return known

    for apart in (False, True):
        calls = {
            name: call
            for name, call in comparison.calls.items()
            if (name in comparison.apart) is apart
        }
        for name, call in calls.items():
            try:
                errors[name] = comparison.check(name, call())
            except Exception as error:
                failed[name] = reason(error)
        correct = {name: call for name, call in calls.items() if name not in failed}
        try:
            timings |= compare(
                correct, device, rounds, comparison.least_seconds, comparison.most_seconds
            )
        except Exception as error:
            failed |= dict.fromkeys(correct, reason(error))
        yield rows()
    costs |= {name: _costs(comparison, name, timing) for name, timing in timings.items()}
    yield rows()


def _costs(comparison: Comparison, name: str, timing: Timing) -> dict[str, Any]:
    """The call's further numbers; if the profiler fails, the reason, and the time stays."""
    if comparison.costs is None:
        return {}
    try:
        return dict(comparison.costs(name, timing.median))
    except Exception as error:
        return {"not observed": reason(error)}


def _numbers(
    comparison: Comparison, name: str, timings: Mapping[str, Timing], error: float | None
) -> dict[str, Any]:
    timing, ours = timings[name], timings.get(comparison.ours)
    row: dict[str, Any] = {"seconds": vars(timing)}
    units = comparison.units
    if ours is not None:
        row["ratio"] = (
            timing.median / units.get(name, 1) / (ours.median / units.get(comparison.ours, 1))
        )
    if name in comparison.nbytes:
        row["GB/s"] = comparison.nbytes[name] / timing.median / 1e9
        if ceiling := _ceiling(comparison, timings):
            row["of ceiling"] = comparison.nbytes[name] / timing.median / ceiling
            if name == comparison.ours:
                row["ceiling GB/s"] = ceiling / 1e9
    if name in units:
        row |= {"unit": f"{comparison.unit}/s", "rate": units[name] / timing.median}
    if error is not None:
        row["error"] = error
    return row | (dict(comparison.notes) if name == comparison.ours else {})


def _ceiling(comparison: Comparison, timings: Mapping[str, Timing]) -> float | None:
    ceiling = comparison.ceiling
    if not isinstance(ceiling, str):
        return ceiling
    return comparison.nbytes[ceiling] / timings[ceiling].median if ceiling in timings else None


def reason(error: Exception) -> str:
    """An error in one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return (
        first if isinstance(error, AssertionError) and first else f"{type(error).__name__}: {first}"
    )


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one case in a line."""
    return "; ".join(f"{row['call']} {cell(row)}".strip() for row in rows)


def cell(row: Mapping[str, Any]) -> str:
    """A call's time, or its units a second, and its ratio to ours; or the reason it failed."""
    if "failed" in row:
        return f"FAILED: {row['failed']}"
    text = (
        f"{row['rate']:.3g} {row['unit']}"
        if "rate" in row
        else format_seconds(row["seconds"]["median"])
    )
    return text if row.get("ours") or "ratio" not in row else f"{text} ({row['ratio']:.3g}×)"


def format_seconds(value: float) -> str:
    """Three digits and a unit."""
    unit, size = next(
        (pair for pair in (("s", 1.0), ("ms", 1e-3)) if value >= pair[1]), ("µs", 1e-6)
    )
    return f"{float(f'{value / size:.3g}'):g} {unit}"


def relative_error(result: Tensor, expected: Tensor, most: float) -> float:
    """The largest difference relative to the largest element; raises AssertionError if it is more
    than ``most`` or not a number.
    """
    if result.shape != expected.shape:
        raise AssertionError(f"expected {tuple(expected.shape)}, got {tuple(result.shape)}")
    error = float((result.double() - expected).abs().max() / expected.abs().max())
    if not error <= most:
        raise AssertionError(
            f"expected the fp64 result within {most:.1e} of the largest element, got {error:.1e}"
        )
    return error
