"""A benchmark's case: calls that are checked and timed side by side, and how their numbers read."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from icl_patch.bench.timing import Call


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


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")


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
