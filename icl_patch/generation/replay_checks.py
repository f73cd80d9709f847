"""Replaying the steps of a generation, to measure that each patch has its step's logits."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from icl_patch import metrics
from icl_patch.errors import ExactnessWarning
from icl_patch.generation.decode_state import DecodeState
from icl_patch.generation.decode_step import DecodeResult

# The share of a generation's time that replays may take that nobody asked for.
_SHARE = 0.02


@dataclass(frozen=True)
class ReplayCheck:
    """A step compared with the replay of its patch, which runs without the context.

    linf: (B,), the largest difference of the logits, relative to the largest logit; 0 for rows that
        had ended. same_argmax: (B,) bool, whether both choose one token; True for rows that had
        ended.
    """

    linf: Tensor
    same_argmax: Tensor


@dataclass(eq=False)
class ReplayChecks:
    """Chooses the steps of a generation that are replayed, and warns if an exact one differs.

    Attributes:
        exact: whether the update is exact, so that a replay has to have the step's logits.
        every: every N-th step; 0 for none but, with an exact update, the first and then as many as
            take at most 2 % of the time.
        steps: the number of steps so far. seconds: the time of all of them, and replayed: of the
            replays that nobody asked for; last: of the last one.
        warned: whether a step that differs has been said.
    """

    exact: bool
    every: int
    steps: int = 0
    seconds: float = 0.0
    replayed: float = 0.0
    last: float = 0.0
    warned: bool = False

    @property
    def due(self) -> bool:
        """Whether this step is to be replayed."""
        if self.every:
            return self.steps % self.every == 0
        return self.exact and (
            self.steps == 1 or self.replayed + self.last <= _SHARE * self.seconds
        )

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time of this context as the generation's."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    def replay(self, state: DecodeState, result: DecodeResult) -> Tensor:
        """The logits (B, V) of the replay of a step."""
        start = time.perf_counter()
        logits = state.attached.replay_logits(result.make_patch())[:, -1]
        if self.due and not self.every:
            self.last = time.perf_counter() - start
            self.replayed += self.last
        return logits

    def compare(self, state: DecodeState, result: DecodeResult, replayed: Tensor) -> ReplayCheck:
        """The step and its replay; warns, once, if the update is exact and they differ."""
        ended = ~state.live[:, 0]  # rows without a patch
        nan = replayed.isnan() & result.logits.isnan()  # count as equal
        linf = metrics.linf(replayed.masked_fill(nan, 0), result.logits.masked_fill(nan, 0))
        linf = linf.masked_fill(ended, 0)
        same = metrics.same_argmax(replayed, result.logits) | ended
        differs = linf > 0
        if self.exact and not self.warned and bool(differs.any()):
            self.warned, error = True, float(linf.max())
            warnings.warn(
                f"step {self.steps} of this generation is not exact: the replay of its patch has"
                f" other logits in row {int(differs.nonzero()[0])} ({int(differs.sum())} of"
                f" {len(differs)} rows), by up to {error:.1g} of the largest one."
                f" {state.attached.advice_on(error)}",
                ExactnessWarning,
                stacklevel=2,
            )
        return ReplayCheck(linf, same)
