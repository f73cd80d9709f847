"""How a model's decode steps run: in one pass of both streams if it can be, else in two.

A way of one pass is tried before it is used: its steps on trial tokens must be their replays.
"""

import warnings
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icl_patch import metrics
from icl_patch.errors import (
    ControllabilityError,
    RankError,
    SlowerStepsWarning,
    UnsupportedModelError,
)
from icl_patch.generation.decode_mode import AUTO_MODE, TWO_PASS, DecodeMode
from icl_patch.generation.decoding import decode_one_token, start_decoding
from icl_patch.generation.one_pass_plan import OnePassPlan
from icl_patch.invariance.arithmetic import BATCH_INVARIANT, NATIVE, reason_against
from icl_patch.layers.patched_module import PatchedModule
from icl_patch.layers.router import PatchedRouter
from icl_patch.models.forward_override import overridable
from icl_patch.models.trial_tokens import trial_tokens
from icl_patch.recording.attached_model import AttachedModel
from icl_patch.recording.hooks import paths_of
from icl_patch.tolerances import SIXTEEN_BITS, rounding_limit

_SLOWER = {
    DecodeMode.TWO_STREAM: "with rows of both streams in every layer, up to 1.2 times as long",
    DecodeMode.TWO_PASS: "in two passes, 2 to 4 times as long as the model's own",
}


@dataclass(eq=False)
class StepPlans:
    """The ways in which an attached model's decode steps run, each made and tried once.

    Attributes:
        attached: the model.
        reusable_steps: the last ones that contexts gave back, by everything that they depend on.
        sources: of the last program that was recorded; None if it was given up.
        refused: the reasons against steps that were made and had other logits, by the same.
        warned: the reasons against a program that were given already.
    """

    attached: AttachedModel
    reusable_steps: dict[Any, Any] = field(default_factory=dict)
    refused: dict[Any, str] = field(default_factory=dict)
    sources: deque[str | None] = field(default_factory=lambda: deque(maxlen=1))
    warned: set[str] = field(default_factory=set)
    # by mode and arithmetic; the reason in place of a plan that the model does not allow
    _tried: dict[tuple[DecodeMode, str], OnePassPlan | str] = field(default_factory=dict)
    _code: int = 0  # the count of the model's watch then
    _weights: str | None = None  # the fingerprint then, if the plans depend on it

    def clear(self) -> None:
        """Forget everything about the model."""
        self._tried.clear()
        self.reusable_steps.clear()
        self.refused.clear()
        self.sources.clear()

    def choose(self, mode: str = AUTO_MODE, *, one_pass: bool = False) -> OnePassPlan | None:
        """The plan of the requested mode, or of the fastest that the model allows; None for two
        passes. If ``"auto"`` takes a mode that is slower than the one that this update has on other
        models, a :class:`~icl_patch.errors.SlowerStepsWarning` says why.

        Args:
            mode: one of :data:`icl_patch.generation.decode_mode.MODES`.
            one_pass: whether two passes will not do, as in a compiled step.

        Raises:
            ValueError: there is no such mode, or the update has no steps of it.
            UnsupportedModelError: the model does not allow the requested mode.
        """
        attached, exact = self.attached, self.attached.update == "exact"
        attached.watch_hooks()
        reason: UnsupportedModelError | None = None
        if attached.steps_take_two_passes:
            why = (
                "no mask hides a token from its recurrent state"
                if attached.recurrent
                else "its blocks end in a norm, which magnifies the rounding of this update"
            )
            reason = UnsupportedModelError(f"{type(attached.model).__name__}: {why}")
        modes = [] if reason else [DecodeMode.SHARED_CACHE.value, DecodeMode.TWO_STREAM.value]
        modes += [] if one_pass else [TWO_PASS]
        if mode not in (AUTO_MODE, *modes):
            kind = "steps of one pass" if one_pass else "steps"
            raise ValueError(
                f"expected mode {' or '.join(map(repr, modes)) or 'none'} for {kind} of the update"
                f" {attached.update!r} on {type(attached.model).__name__}, got {mode!r}"
            )
        if mode != AUTO_MODE:
            modes, reason = [mode], None
        elif attached.has_ties and not exact:
            # where rounding decides a token's experts, the streams' rows had better be in one batch
            modes = [name for name in modes if name != DecodeMode.SHARED_CACHE.value]
        for name in modes:
            tried = DecodeMode(name)
            try:
                plan = self.for_mode(tried)
            except UnsupportedModelError as error:
                reason = reason or error
                continue
            if reason is not None:
                warnings.warn(
                    f"{attached.update} steps run {_SLOWER[tried]}: {reason}. Ask for a mode"
                    " (mode=...) to have it without this warning, or take another update",
                    SlowerStepsWarning,
                    stacklevel=2,
                )
            return plan
        assert reason is not None
        raise reason

    def for_mode(self, mode: DecodeMode) -> OnePassPlan | None:
        """The plan of a mode, tried if it is new or the model runs something else; None for two
        passes.

        Raises:
            UnsupportedModelError: the model does not allow it.
        """
        if mode is DecodeMode.TWO_PASS:
            return None
        attached = self.attached
        if hooked := attached.hooks.current():
            raise UnsupportedModelError(
                f"mode={mode.value!r} does not cover forward hooks, which would get the rows of"
                f" both streams: there are some on {paths_of(hooked)}"
            )
        arithmetic = attached.ranks.shared(lambda: _arithmetic(attached, mode))
        if attached.ranks.any(arithmetic == NATIVE):  # each rank has some of the modules
            arithmetic = NATIVE
        # a trial tells the orders of a sum apart by what the weights make of its terms
        if self._orders_differ and self._weights != attached.weights.fingerprint:
            self._tried.clear()
            self._weights = attached.weights.fingerprint
        if self._code != attached.watch.code:
            self.clear()
            self._code = attached.watch.code
        key = mode, arithmetic
        if attached.ranks.any(key not in self._tried):
            try:
                self._tried[key] = self._try(mode, arithmetic)
            except UnsupportedModelError as error:
                self._tried[key] = str(error)
        if isinstance(plan := self._tried[key], str):
            raise UnsupportedModelError(plan)
        return plan

    @property
    def _orders_differ(self) -> bool:
        """Whether classes differ in the order of the sums that exact steps have to know."""
        parallel = any(block.spec.parallel for block in self.attached.block_specs)
        return parallel and self.attached.update == "exact"

    def _try(self, mode: DecodeMode, arithmetic: str) -> OnePassPlan:
        """A plan of one pass, whose steps on trial tokens are their replays."""
        attached, exact = self.attached, self.attached.update == "exact"
        model = attached.model
        uncovered = f"mode={mode.value!r} does not cover {type(model).__name__}"
        for writer_first in (False, True) if self._orders_differ else (False,):
            with attached.attachment.exclusive(), attached.without_autocast():
                make = partial(OnePassPlan, attached, mode, arithmetic, writer_first=writer_first)
                plan = attached.ranks.shared(make)
                try:
                    error = _replay_error(plan)
                except (RankError, torch.OutOfMemoryError):
                    raise
                except Exception as cause:  # also an error of the model's own code
                    # Weights of zero have no patch for these tokens; the user's raise this again
                    if isinstance(cause, ControllabilityError) and not exact:
                        return plan
                    raise UnsupportedModelError(f"{uncovered}: {cause}") from cause
            if error <= (0 if plan.keeps_bits else rounding_limit(model.dtype)):
                return plan
        raise UnsupportedModelError(f"{uncovered}: replays of its steps are off by {error:.1g}")


def _arithmetic(attached: AttachedModel, mode: DecodeMode) -> str:
    """The arithmetic of a mode's steps: the batch-invariant one, in which a row rounds as in its
    replay, for exact steps; in 16 bits for two streams too, because a trained model's large
    activations magnify a difference of rounding to that of other logits. With a shared cache a
    reduced row begins each block anew, with other bits than in its replay.

    Raises:
        UnsupportedModelError: an exact update has no batch-invariant steps.
    """
    model, exact = attached.model, attached.update == "exact"
    if not exact and (mode is DecodeMode.SHARED_CACHE or model.dtype not in SIXTEEN_BITS):
        return NATIVE
    reason = reason_against(model)
    if reason is None and any(block.spec.experts_scale_input for block in attached.blocks):
        reason = "its experts scale their input"
    for path, module in model.named_modules():
        if reason is None and _multiplies(module) and not _is_plain(module):
            reason = f"{path} is no plain linear map"
    if reason is None:
        return BATCH_INVARIANT
    if not exact:
        return NATIVE
    raise UnsupportedModelError(
        f"mode={mode.value!r} does not cover {type(model).__name__}: {reason}; mode='two_pass' does"
    )


def _multiplies(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
    return is_matrix and not isinstance(module, nn.Embedding)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear map of torch or transformers, or a router, that nobody has
    touched.
    """
    base = module.base_layer if isinstance(module, PatchedModule) else module
    if isinstance(module, PatchedRouter):
        return overridable(base)
    plain = type(base) in (nn.Linear, Conv1D) and type(base.weight) is nn.Parameter
    return plain and overridable(base)


def _replay_error(plan: OnePassPlan) -> float:
    """The largest error of some replays."""
    attached = plan.attached
    padding = 3 if attached.takes_padding else 0
    # an odd number of rows: torch computes the last elements of a tensor by other instructions
    ids = trial_tokens(attached.model, 8, 1, attached.tokenizer, starts=[0, padding, 0])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :padding] = False
    state = start_decoding(attached, plan, ids[:, :6], mask[:, :6], 8)
    found = []
    for column in (5, 6, 7):
        result = decode_one_token(state, ids[:, column])
        replayed = attached.replay_logits(result.make_patch())[:, -1]
        found.append(metrics.linf(replayed, result.logits))
    return float(torch.cat(found).max())
