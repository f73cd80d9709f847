"""A decode step that is made once: recorded as a program, traced and compiled, or captured as a
CUDA graph.

The step reads and writes fixed buffers, so it serves later tokens and later contexts too.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from transformers import Cache

from icl_patch.errors import UnsupportedModelError
from icl_patch.generation.decode_step import DecodeState
from icl_patch.generation.one_pass import DecodeStep, RunStep, StepOutput
from icl_patch.generation.plans import StepPlans
from icl_patch.generation.recorded_step import RecordedStep, warn_slower
from icl_patch.generation.step_inputs import StepInputs
from icl_patch.generation.traced_step import TracedStep
from icl_patch.layers.attachment import WaitingForward, below_passes
from icl_patch.layers.device_hooks import input_device, is_aligned
from icl_patch.layers.patched_module import with_base
from icl_patch.models import kv_cache
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_model import AttachedModel

_BUCKET = 32  # tokens
_CACHED_STEPS = 2  # steps, with their caches, that are kept for later contexts
COMPILE = ("auto", "inductor", "cuda_graph", "inductor+cuda_graph")
IF_IT_PAYS = ("auto",)
_PROGRAM = ("program",)
_FEW = 16  # tokens for which a program does not pay: it is made in the time of some ten
_WIDER = 4  # of how many windows a layer keeps all tokens


def compilers_of(compile: bool | str) -> Collection[str]:
    """The compilers that a step goes through, ``"inductor"`` and ``"cuda_graph"`` in this order, as
    :meth:`icl_patch.ContextPatcher.generate` takes them: traced and compiled by ``torch.compile``'s
    Inductor; captured as a CUDA graph, compiled or not. ``IF_IT_PAYS`` leaves it to
    :func:`use_program`.

    Raises:
        ValueError: there is no such compiler.
    """
    names = "inductor" if compile is True else compile or ""
    if names not in ("", *COMPILE):
        expected = ", ".join(map(repr, COMPILE))
        raise ValueError(f"expected compile True, False, {expected}, got {compile!r}")
    return tuple(filter(None, names.split("+")))


class CompiledStep:
    """A step ``run`` on buffers of its own, ``inputs``, for one number of rows and tokens.

    Args:
        state: a context in a dynamic cache. capacity: the largest number of tokens.
        compilers: as of :func:`compilers_of`.

    Raises:
        UnsupportedModelError: the model's cache cannot be put in place.
    """

    def __init__(self, state: DecodeState, capacity: int, compilers: Collection[str]) -> None:
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
            plan = state.run.plan
            # a step that has the bits of its replay stays as it is
            written = "inductor" in compilers and not plan.keeps_bits
            step = DecodeStep(plan, self.inputs, state.run.batch, for_inductor=written)
            self.run: RunStep = TracedStep(step) if "inductor" in compilers else step
            if "program" in compilers:
                self.run = RecordedStep(step)
            if "cuda_graph" in compilers:
                self.run = CapturedStep(self.run, current.device)

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


class CapturedStep:
    """A step as a CUDA graph, captured at its first call after a few ordinary ones of the same
    token, which create everything that is created at first use. Its tensors are the same at every
    call.
    """

    _WARM_UP = 3

    def __init__(self, run: RunStep, device: torch.device) -> None:
        self.run, self._device, self._calls = run, device, 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> StepOutput:
        """Run the current token."""
        with torch.cuda.device(self._device):  # streams and graphs are the current one's
            if self._graph is None:
                self._graph = self._captured()
            self._graph.replay()
        self._calls += 1
        number = self._calls
        return replace(self._output, is_overwritten=lambda: number != self._calls)

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._WARM_UP):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            self._output = self.run()
        return graph


def _filled_cache(state: DecodeState) -> Cache:
    """A cache as the model makes it, with a token in every layer."""
    if state.inputs.length:
        return state.inputs.cache
    model = state.attached.model
    cache, one = kv_cache.new_cache(model), torch.zeros_like(state.ids[:, :1])
    forward_passes.run(model, one, torch.ones_like(one), one, cache, longest=1, last_logits=1)
    return cache


def bucketed_capacity(tokens: int) -> int:
    """The capacity of a compiled step: up to a quarter more than ``tokens``, in steps of at least
    32, so that other contexts can use the step too.
    """
    step = max(_BUCKET, 1 << max(tokens - 1, 0).bit_length() >> 3)
    return -(-tokens // step) * step


def check_compilable(attached: AttachedModel, compilers: Collection[str]) -> None:
    """Raises UnsupportedModelError unless a step of the model can go through the compilers."""
    model, blocks, exact = attached.model, attached.blocks, attached.update == "exact"
    device = input_device(model)
    captured = "cuda_graph" in compilers
    reasons = {
        "autocast: a step that is made once has the model's own dtype": (
            torch.is_autocast_enabled(device.type)
        ),
        "models split over processes": attached.ranks.size > 1,
        "accelerate's hooks, which move tensors between devices": is_aligned(model),
        "these experts: the host reads how many are chosen": any(
            block.spec.experts_scale_input for block in blocks
        ),
        "exact steps with experts as a CUDA graph: the host reads how many rows one has": (
            captured and exact and any(block.experts for block in blocks)
        ),
        "exact steps of blocks that go on from their sum, which a tensor of another type reports": (
            exact and any(block.spec.continues_after_sum for block in blocks)
        ),
        f"{device}: a CUDA graph needs a CUDA device": captured and device.type != "cuda",
        "weights made in inference mode": any(x.is_inference() for x in model.parameters()),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"compile does not cover {type(model).__name__}: {reason}")


def use_program(plans: StepPlans, state: DecodeState) -> Callable[[], None] | None:
    """Let a context's steps run as a program, if they can and enough of them will; see
    :func:`use_compiled_step`. A :class:`~icl_patch.errors.SlowerStepsWarning` says why they cannot.
    """
    capacity = state.ids.shape[1]
    few = capacity - state.inputs.length <= _FEW
    if not few and state.run is not None and state.inputs.current.is_cpu:
        try:
            _check_recordable(plans.attached, state)
            return use_compiled_step(plans, state, _PROGRAM)
        except UnsupportedModelError as error:
            if str(error) not in plans.warned:
                plans.warned.add(str(error))
                warn_slower(plans.attached.model, str(error))
    kv_cache.reserve(state.inputs.cache, capacity)
    return None


def _check_recordable(attached: AttachedModel, state: DecodeState) -> None:
    """Raises UnsupportedModelError unless the steps of a context can run as a program."""
    check_compilable(attached, _PROGRAM)
    for path, module in attached.model.named_modules():
        for part in with_base(module):
            forward = below_passes(part)
            if isinstance(forward, WaitingForward):
                forward = forward.before
            if forward is not None:
                raise UnsupportedModelError(
                    f"somebody has replaced the forward of {path or 'the model'}, whose code would"
                    " run in the first step alone"
                )
    if state.fill is not None:
        raise UnsupportedModelError("its rotary factors change at some length")
    capacity = state.ids.shape[1]
    windows = [getattr(layer, "sliding_window", None) for layer in state.inputs.cache.layers]
    narrowest = min((window for window in windows if window), default=capacity)
    if capacity > _WIDER * narrowest:
        raise UnsupportedModelError(
            f"a layer would keep {capacity} tokens, and its window has {narrowest}"
        )


def use_compiled_step(
    plans: StepPlans, state: DecodeState, compilers: Collection[str]
) -> Callable[[], None]:
    """Let a context's steps run compiled; the step is taken from ``plans``, or made.

    No step serves two contexts at a time. The returned function gives the step back for later
    contexts.
    """
    attached, compiled = plans.attached, plans.compiled
    assert isinstance(state.run, DecodeStep)
    capacity, model = bucketed_capacity(state.ids.shape[1]), attached.model
    # a trace depends on the model's code, of which the plan is, and on its weights' addresses
    weights = [x.data_ptr() for x in (*model.parameters(), *model.buffers())]
    key = (state.run.plan, len(state.ids), capacity, compilers, *weights)
    step = compiled.pop(key, None)
    if step is None:
        step = CompiledStep(state, capacity, compilers)
    step.start_from(state.inputs)
    state.run, state.inputs = step.run, step.inputs

    def release() -> None:
        # If a generation is abandoned, the garbage collector runs this in any thread: do not wait.
        if attached.is_attached:
            compiled[key] = step
        for oldest in list(compiled)[:-_CACHED_STEPS]:
            compiled.pop(oldest, None)

    return release
