"""A decode step that is made once: recorded as a program, which may be compiled; on CUDA a CUDA
graph of it.

The step reads and writes fixed buffers, so it serves later tokens and later contexts too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import Cache

from icl_patch import metrics
from icl_patch.errors import UnsupportedModelError
from icl_patch.generation.decode_step import DecodeStep, StepOutput
from icl_patch.generation.decoding import DecodeState
from icl_patch.generation.plans import StepPlans
from icl_patch.generation.recorded_step import RecordedStep, warn_slower
from icl_patch.generation.step_inputs import StepInputs
from icl_patch.layers.attachment import forward_of_others
from icl_patch.layers.device_hooks import has_accelerate_hooks, input_device
from icl_patch.layers.patched_module import with_base
from icl_patch.models import kv_cache
from icl_patch.models.language_model import chooses_tokens
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_model import AttachedModel

_BUCKET = 32  # tokens
_KEPT_STEPS = 2  # steps, with their caches, that are kept for later contexts
AUTO_COMPILE = "auto"
# Tokens for which a program does not pay: it is made in the time of some ten, as its graph is.
_FEW = 16
_WIDER = 4  # of how many windows a layer keeps all tokens on the CPU


def check_compile(compile: bool | str) -> None:
    """Raises ValueError unless ``compile`` is True, False or ``"auto"``, as
    :meth:`icl_patch.ContextPatcher.generate` takes it.
    """
    if not isinstance(compile, bool) and compile != AUTO_COMPILE:
        raise ValueError(f"expected compile True, False or {AUTO_COMPILE!r}, got {compile!r}")


class ReusableStep:
    """A step ``run`` on buffers of its own, ``inputs``, which serves one context after another, for
    one number of rows and one capacity.

    Args:
        state: a context in a dynamic cache. capacity: the largest number of tokens.
        compiled, on_source: as for :class:`RecordedStep`.

    Attributes:
        is_proven: whether its first token had the logits of a step in a growing cache.

    Raises:
        UnsupportedModelError: the model's cache cannot be put in place.
    """

    is_proven = False

    def __init__(
        self,
        state: DecodeState,
        capacity: int,
        *,
        compiled: bool,
        on_source: Callable[[str | None], None],
    ) -> None:
        assert isinstance(state.run, DecodeStep)
        current = state.inputs.current
        with torch.inference_mode(False):
            rows, zeros = len(current), current.new_zeros
            slot = zeros(1)
            self.inputs = StepInputs(
                current=zeros(rows, 1),
                positions=zeros(rows, 1),
                mask=zeros(rows, capacity),
                cache=kv_cache.fixed_cache(_filled_cache(state), capacity, slot),
                slot=slot,
                length=0,
            )
            step = DecodeStep(state.run.plan, self.inputs, state.run.batch)
            self.run = RecordedStep(step, on_source, compiled=compiled)

    def start_from(self, step_inputs: StepInputs) -> None:
        """Fill the buffers from inputs with a dynamic cache."""
        with torch.inference_mode(False), torch.no_grad():
            assert self.inputs.slot is not None
            self.inputs.length = length = step_inputs.length
            self.inputs.positions.copy_(step_inputs.positions)
            self.inputs.slot.fill_(length - 1)
            self.inputs.mask.zero_()
            self.inputs.mask[:, :length] = step_inputs.mask[:, :length]
            kv_cache.copy_cache(step_inputs.cache, self.inputs.cache, length)


def _filled_cache(state: DecodeState) -> Cache:
    """A cache as the model makes it, with a token in every layer."""
    if state.inputs.length:
        return state.inputs.cache
    model = state.attached.model
    cache, one = kv_cache.new_cache(model), torch.zeros_like(state.ids[:, :1])
    forward_passes.run(model, one, torch.ones_like(one), one, cache, longest=1, last_logits=1)
    return cache


def bucketed_capacity(tokens: int) -> int:
    """The capacity of a reusable step: up to a quarter more than ``tokens``, in steps of at least
    32, so that other contexts can use the step too.
    """
    step = max(_BUCKET, 1 << max(tokens - 1, 0).bit_length() >> 3)
    return -(-tokens // step) * step


def check_compilable(attached: AttachedModel) -> None:
    """Raises UnsupportedModelError unless a step of the model can be made once."""
    model, blocks, exact = attached.model, attached.blocks, attached.update == "exact"
    device = input_device(model)
    reasons = {
        "autocast: a step that is made once has the model's own dtype": (
            torch.is_autocast_enabled(device.type)
        ),
        "models split over processes": attached.ranks.size > 1,
        "accelerate's hooks, which move tensors between devices": has_accelerate_hooks(model),
        "these experts: the host reads how many are chosen": any(
            block.spec.experts_scale_input for block in blocks
        ),
        "exact steps with experts as a CUDA graph: the host reads how many rows one has": (
            device.type == "cuda" and exact and any(block.experts for block in blocks)
        ),
        "it attends to the tokens that score highest, and of equal scores a cache with room for"
        " more tokens may choose others": chooses_tokens(model),
        "weights made in inference mode": any(x.is_inference() for x in model.parameters()),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"compile does not cover {type(model).__name__}: {reason}")


def use_program(plans: StepPlans, state: DecodeState) -> Callable[[], None] | None:
    """Let a context's steps run as a program, on CUDA as a CUDA graph, if they can and enough of
    them will; see :func:`use_reusable_step`. A :class:`~icl_patch.errors.SlowerStepsWarning` says
    why they cannot.
    """
    capacity, device = state.ids.shape[1], state.inputs.current.device
    few = capacity - state.inputs.length <= _FEW
    if not few and state.run is not None and device.type in ("cpu", "cuda"):
        try:
            _check_recordable(plans.attached, state)
            return use_reusable_step(plans, state, compiled=False)
        except (UnsupportedModelError, torch.OutOfMemoryError) as error:
            if str(error) not in plans.warned:
                plans.warned.add(str(error))
                warn_slower(plans.attached.model, device, error)
    kv_cache.reserve(state.inputs.cache, capacity)
    return None


def _check_recordable(attached: AttachedModel, state: DecodeState) -> None:
    """Raises UnsupportedModelError unless the steps of a context can run as a program."""
    check_compilable(attached)
    for path, module in attached.model.named_modules():
        for part in with_base(module):
            if forward_of_others(part) is not None:
                raise UnsupportedModelError(
                    f"other code has replaced the forward of {path or 'the model'}, and would run"
                    " only in the first step"
                )
    if state.fill is not None:
        raise UnsupportedModelError("its rotary factors change at some length")
    capacity = state.ids.shape[1]
    windows = [getattr(layer, "sliding_window", None) for layer in state.inputs.cache.layers]
    narrowest = min((window for window in windows if window), default=capacity)
    if state.inputs.current.is_cpu and capacity > _WIDER * narrowest:
        raise UnsupportedModelError(
            f"a layer would keep more than {_WIDER} windows of {narrowest} tokens"
        )


def _first_run(
    plans: StepPlans,
    step: ReusableStep,
    state: DecodeState,
    growing: DecodeStep,
    key: tuple[Any, ...],
    *,
    compiled: bool,
) -> StepOutput:
    """Run a new step's first token, and compare its logits with those of the ``growing`` step,
    whose cache has no empty columns. A step with other logits is not made again; in a program's
    place the growing step goes on.

    Raises:
        UnsupportedModelError: a compiled step has other logits.
    """
    output, attached = step.run(), plans.attached
    growing.inputs.advance(step.inputs.current[: growing.batch, 0])
    expected = growing()
    error = float(metrics.linf(output.logits, expected.logits).max())
    limit = 0.0 if growing.plan.keeps_bits else attached.replay_limit
    step.is_proven = error <= limit
    if step.is_proven:
        state.run = step.run
    if step.is_proven or not metrics.all_finite(expected.logits):  # these are refused behind it
        return output
    reason = f"its logits change by {error:.1g} in a cache with room for more tokens"
    plans.sources.append(None)
    if compiled:
        reason = f"compile does not cover {type(attached.model).__name__}: {reason}"
    plans.refused[key] = reason
    if compiled:
        raise UnsupportedModelError(reason)
    plans.warned.add(reason)
    warn_slower(attached.model, step.inputs.current.device, reason)
    kv_cache.reserve(growing.inputs.cache, state.ids.shape[1])
    state.run, state.inputs = growing, growing.inputs
    return expected


def use_reusable_step(
    plans: StepPlans, state: DecodeState, *, compiled: bool
) -> Callable[[], None]:
    """Let a context's steps run as a program, perhaps ``compiled``; the step is taken from
    ``plans``, or made.

    No step serves two contexts at a time. The returned function gives the step back for later
    contexts.
    """
    attached, kept = plans.attached, plans.reusable_steps
    assert isinstance(state.run, DecodeStep)
    capacity = bucketed_capacity(state.ids.shape[1])
    # a program depends on the model's code, of which the plan is, and on the places of its weights
    key = (state.run.plan, len(state.ids), capacity, compiled, attached.watch.weights)
    if (reason := plans.refused.get(key)) is not None:
        raise UnsupportedModelError(reason)
    step = kept.pop(key, None)
    if step is not None:
        step.run.compare_again()
    else:
        step = ReusableStep(state, capacity, compiled=compiled, on_source=plans.sources.append)
    step.start_from(state.inputs)
    growing, state.inputs = state.run, step.inputs
    first_run = partial(_first_run, plans, step, state, growing, key, compiled=compiled)
    state.run = step.run if step.is_proven else first_run

    def release() -> None:
        # If a generation is abandoned, the garbage collector runs this in any thread: do not wait.
        if attached.is_attached and step.is_proven:
            kept[key] = step
        for oldest in list(kept)[:-_KEPT_STEPS]:
            kept.pop(oldest, None)

    return release
