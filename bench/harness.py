"""A benchmark's cases: calls that are checked and timed side by side, and the rows that result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from icl_patch.bench.timing import Call, Seconds, compare


@dataclass(frozen=True)
class Comparison:
    """Calls that do the same work.

    Attributes:
        ours: the table has this call's numbers next to the times.
        check: ``check(call, result)`` gives the result's error; raises AssertionError with expected
            and got.
        nbytes: bytes that each call must move at least.
        ceiling: the call that measures the bandwidth, if there is one.
        notes: further numbers about our call.
        base: the call that is 1×; by default ours.
    """

    ours: str
    calls: Mapping[str, Call]
    check: Callable[[str, Any], float | None]
    nbytes: Mapping[str, int] = field(default_factory=dict)
    ceiling: str = ""
    notes: Mapping[str, float] = field(default_factory=dict)
    base: str = ""


@dataclass(frozen=True)
class Case:
    """One line of a table: its name, and the function that builds its comparison when its turn
    comes: it may take much memory.
    """

    name: str
    build: Callable[[], Comparison]

    @torch.no_grad()
    def rows(self, device: torch.device, rounds: int) -> list[dict[str, Any]]:
        """A row for each call: its time if its result is correct, else the reason (``failed``)."""
        head: dict[str, Any] = {"case": self.name}
        try:
            comparison = self.build()
        except Exception as error:  # the other cases still run
            return [head | {"call": "", "ours": True, "failed": reason(error)}]
        rows = []
        for name, call in comparison.calls.items():
            row = head | {"call": name, "ours": name == comparison.ours}
            try:
                row["error"] = comparison.check(name, call())
            except Exception as error:
                row["failed"] = reason(error)
            rows.append(row)
        correct = [row["call"] for row in rows if "failed" not in row]
        try:
            times = compare({name: comparison.calls[name] for name in correct}, device, rounds)
        except Exception as error:
            return [{"failed": reason(error)} | row for row in rows]
        return [row | _numbers(comparison, row["call"], times) for row in rows]


def _numbers(comparison: Comparison, name: str, times: Mapping[str, Seconds]) -> dict[str, Any]:
    if name not in times:
        return {}
    nbytes, ours, ceiling = comparison.nbytes, comparison.ours, comparison.ceiling
    base = comparison.base or ours
    seconds = times[name]["median"]
    row: dict[str, Any] = {"seconds": times[name]}
    if base in times:
        row["ratio"] = seconds / times[base]["median"]
    if name in nbytes:
        row["GB/s"] = nbytes[name] / seconds / 1e9
        if ceiling in times:
            most = nbytes[ceiling] / times[ceiling]["median"] / 1e9
            row["of ceiling"] = row["GB/s"] / most
            if name == ours:
                row["ceiling GB/s"] = most
    return row | (dict(comparison.notes) if name == ours else {})


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
