"""The processes of ``torch.distributed`` that share a fit: their sums and values, and an error in
one.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_T = TypeVar("_T")


class ProcessError(RuntimeError):
    """Another process of the group has failed, so this one cannot go on."""


class Processes:
    """The processes that share a fit, each with rows of its own.

    group: of ``torch.distributed``; None: this process alone. device: of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device

    def summed(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the processes, in its own memory.

        Raises:
            ProcessError: another process has failed or ended.
        """
        if self.group is not None:
            self._report(failed=False)
            self._reduce(x)
        return x

    def gathered(self, value: _T) -> list[_T]:
        """The values of all processes, in the order of their ranks.

        Raises:
            ProcessError: another process has failed or ended.
        """
        if self.group is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self.group)
        self._report(failed=False)
        with _ended_processes_named():
            dist.all_gather_object(found, value, group=self.group)
        return found

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Within this context an error in one process is a :class:`ProcessError` in the others, at
        their next sum or at the end.
        """
        try:
            yield
            if self.group is not None:
                self._report(failed=False)
        except ProcessError:
            raise
        except Exception:
            if self.group is not None:
                with suppress(ProcessError):
                    self._report(failed=True)
            raise

    def check_same(self, description: str) -> None:
        """Raises ValueError unless all processes give the same description of a fit."""
        found = set(self.gathered(description))
        if len(found) != 1:
            raise ValueError(
                "expected the same model and options in all processes, got"
                f" {' and '.join(sorted(found))}"
            )

    def _report(self, failed: bool) -> None:
        """Tell the others whether this process has failed; raise if one of them has. It precedes
        each sum, so that a process that fails is heard wherever the others are.
        """
        flags = torch.zeros(dist.get_world_size(self.group), device=self.device)
        flags[dist.get_rank(self.group)] = float(failed)
        self._reduce(flags)
        others = [rank for rank, flag in enumerate(flags.tolist()) if flag]
        if others:
            raise ProcessError(
                f"expected all processes of the group to go on, got an error in process"
                f" {', '.join(map(str, others))}: its own message tells the reason"
            )

    def _reduce(self, x: Tensor) -> None:
        with _ended_processes_named():
            dist.all_reduce(x, group=self.group)


@contextmanager
def _ended_processes_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ProcessError(
            f"expected all processes of the group to go on, got one that has ended: {error}"
        ) from error
