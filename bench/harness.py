"""A benchmark's cases: calls that are checked and timed side by side, and the rows that result."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from icl_patch.bench.timing import Call, Seconds, compare


@dataclass(frozen=True)
class Comparison:
    """Calls that do the same work.

    Attributes:
        ours: the call that the others are compared with.
        check: ``check(call, result)`` gives the result's error; raises AssertionError with expected
            and got.
        nbytes: bytes that each call must move at least.
        ceiling: the bandwidth measured here in bytes a second, or the call that measures it.
        apart: calls timed after the others, which would wait for their writes.
        units: how many units of work each call does; the ratio then compares time for each unit.
        unit: the name of a unit.
        notes: further numbers about our call.
        costs: ``costs(call)`` gives further numbers about a call, measured untimed.
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
    costs: Callable[[str], dict[str, Any]] = lambda call: {}


@dataclass(frozen=True)
class Case:
    """One line of a table: its name, the function that builds its comparison when its turn comes
    (it may take much memory), and its parameters.
    """

    name: str
    build: Callable[[], Comparison]
    parameters: Mapping[str, str | int] = field(default_factory=dict)

    def rows(self, device: torch.device, rounds: int) -> list[dict[str, Any]]:
        """A row for each call: its time if its result is correct, else the reason (``failed``)."""
        head = {"case": self.name, "parameters": dict(self.parameters)}
        try:
            comparison = self.build()
        except Exception as error:  # the other cases still run
            return [head | {"call": "", "ours": True, "failed": reason(error)}]
        calls, ours = comparison.calls, comparison.ours
        rows: dict[str, dict[str, Any]] = {}
        times: dict[str, Seconds] = {}
        for name, call in calls.items():
            rows[name] = head | {"call": name, "ours": name == ours}
            try:
                rows[name]["error"] = comparison.check(name, call())
            except Exception as error:
                rows[name]["failed"] = reason(error)
        correct = [name for name in calls if "failed" not in rows[name]]
        for apart in (False, True):
            group = {name: calls[name] for name in correct if (name in comparison.apart) is apart}
            try:
                times |= compare(group, device, rounds)
            except Exception as error:
                for name in group:
                    rows[name]["failed"] = reason(error)
        for name in times:
            rows[name] |= _numbers(comparison, name, times)
        return list(rows.values())


def _numbers(comparison: Comparison, name: str, times: Mapping[str, Seconds]) -> dict[str, Any]:
    units, nbytes, ours = comparison.units, comparison.nbytes, comparison.ours
    seconds = times[name]["median"]
    row: dict[str, Any] = {"seconds": times[name]}
    if ours in times:
        per_unit = times[ours]["median"] / units.get(ours, 1)
        row["ratio"] = seconds / units.get(name, 1) / per_unit
    if name in nbytes:
        row["GB/s"] = nbytes[name] / seconds / 1e9
        ceiling = comparison.ceiling
        if isinstance(ceiling, str):
            ceiling = nbytes[ceiling] / times[ceiling]["median"] if ceiling in times else None
        if ceiling:
            row["of ceiling"] = nbytes[name] / seconds / ceiling
            if name == ours:
                row["ceiling GB/s"] = ceiling / 1e9
    if name in units:
        row |= {"unit": f"{comparison.unit}/s", "rate": units[name] / seconds}
    if name == ours:
        row |= comparison.notes
    try:
        return row | comparison.costs(name)
    except Exception as error:  # the time stays
        return row | {"not profiled": reason(error)}


def reason(error: Exception) -> str:
    """An error in one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    known = isinstance(error, AssertionError) and first
    return first if known else f"{type(error).__name__}: {first}"


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")


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
