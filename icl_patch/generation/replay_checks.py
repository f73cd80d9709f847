"""Replaying some steps of an exact generation, to measure that each patch has its step's logits."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from icl_patch import metrics
from icl_patch.errors import ExactnessWarning
from icl_patch.generation.decode_state import DecodeState
from icl_patch.generation.decode_step import DecodeResult

# The share of a generation's time that replays may take.
_SHARE = 0.02


@dataclass(eq=False)
class ReplayChecks:
    """Replays the first step of an exact generation, and then as many as take at most 2 % of the
    time; warns if one differs.

    Attributes:
        exact: whether the update is exact, so that a replay has to have the step's logits.
        steps: the number of steps so far. seconds: the time of all of them, and replayed: of the
            replays; last: of the last one.
        warned: whether a step that differs has been said.
    """

    exact: bool
    steps: int = 0
    seconds: float = 0.0
    replayed: float = 0.0
    last: float = 0.0
    warned: bool = False

    @property
    def due(self) -> bool:
        """Whether this step is to be replayed."""
        in_time = self.steps == 1 or self.replayed + self.last <= _SHARE * self.seconds
        return self.exact and not self.warned and in_time

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time of this context as the generation's."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    @torch.no_grad()
    def after(self, state: DecodeState, result: DecodeResult) -> None:
        """Count a step; if it is due, replay it, and warn if the logits differ."""
        self.steps += 1
        # each rank has a clock of its own
        if not self.exact or not state.attached.ranks.any(self.due):
            return
        start = time.perf_counter()
        replayed = state.attached.replay_logits(result.make_patch())[:, -1]
        self.last = time.perf_counter() - start
        self.replayed += self.last
        nan = replayed.isnan() & result.logits.isnan()  # count as equal
        linf = metrics.linf(replayed.masked_fill(nan, 0), result.logits.masked_fill(nan, 0))
        linf = linf.masked_fill(~state.live[:, 0], 0)  # rows that have ended have no patch
        differs = linf > 0
        if not bool(differs.any()):
            return
        self.warned, error = True, float(linf.max())
        warnings.warn(
            f"step {self.steps} of this generation is not exact: the replay of its patch has"
            f" other logits in row {int(differs.nonzero()[0])} ({int(differs.sum())} of"
            f" {len(differs)} rows), by up to {error:.1g} of the largest one."
            f" {state.attached.advice_on(error)}",
            ExactnessWarning,
            stacklevel=2,
        )
