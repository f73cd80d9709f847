"""The costs of a decode step beside its time: operators or launches, time by part, memory.

They come from passes that are not timed. A part is recognised by the module that runs (attention,
readers, writer, head) or by the operators of the RMSNorm inversion. A compiled step runs no
modules: there the shapes of a matrix product identify the weight, and fused operations belong to
the rest.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import Cache, PreTrainedModel

from icl_patch import ContextPatch
from icl_patch.models.block_spec import Block

# Without this Kineto writes a line to stderr for every start and stop; it reads it when it first
# starts.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

PARTS = ("attention", "readers", "experts", "writer", "inversion", "head", "building", "rest")
_MARK, _STEP, _REPEATS = "part: ", "the observed step", 3
_INVERSION = ("stable_scale", "invert_rmsnorm")
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
Call = Callable[[], object]


class Parts:
    """The parts to which modules and weights belong.

    Args:
        models: models of one class on the same weights.
        blocks: their blocks, with context layers called ``self_attn``.
    """

    def __init__(self, models: Iterable[PreTrainedModel], blocks: Iterable[Block]) -> None:
        self._modules: dict[int, str] = {}
        self._weights: dict[tuple[int, int], str] = {}  # (K, N) of a weight that maps K to N
        for model in models:
            for block in blocks:
                spec = block.spec
                named = dict.fromkeys(spec.readers, "readers") | {"self_attn": "attention"}
                named |= {
                    name: "writer"
                    for name in (spec.down, spec.inner_norm, spec.post_norm)
                    if name is not None
                }
                named |= {} if spec.experts is None else {spec.experts: "experts"}
                for name, part in named.items():
                    self._add(model.get_submodule(block.path_of(name)), part)
            self._add(model.get_output_embeddings(), "head")

    def _add(self, module: nn.Module, part: str) -> None:
        self._modules[id(module)] = part
        for inner in module.modules():
            weight = getattr(inner, "weight", None)
            if isinstance(weight, torch.Tensor) and weight.dim() == 2:
                self._weights.setdefault((weight.shape[1], weight.shape[0]), part)

    def of_shapes(self, shapes: Iterable[Any]) -> str | None:
        """The part of an operator that multiplies (M, K) by a weight (N, K) or (K, N), by its
        inputs' shapes.
        """
        matrices = [
            tuple(shape)
            for shape in shapes
            if isinstance(shape, (list, tuple)) and len(shape) >= 2 and isinstance(shape[0], int)
        ]
        for x in matrices:
            for weight in matrices:
                if x is not weight and len(weight) == 2 and x[-1] in weight:
                    n = weight[1] if weight[0] == x[-1] else weight[0]
                    if (x[-1], n) in self._weights:
                        return self._weights[x[-1], n]
        return None

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Within this context the profiler sees every module's call as a range of its part."""
        running: list[tuple[nn.Module, Any]] = []

        def before(module: nn.Module, _args: Any) -> None:
            if (part := self._modules.get(id(module))) is not None:
                running.append((module, record_function(_MARK + part).__enter__()))

        def after(module: nn.Module, _args: Any, _out: Any) -> None:
            if running and running[-1][0] is module:
                running.pop()[1].__exit__(None, None, None)

        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(before).remove)
            stack.callback(register_module_forward_hook(after).remove)
            yield


def profiled(
    call: Call, parts: Parts, device: torch.device, *, traced: bool = False
) -> dict[str, Any]:
    """The costs of the fastest of some calls under ``torch.profiler``; ``traced``: the call is
    compiled and runs no modules.

    Returns:
        ``parts``: the share of each part in the time of the operators and of what calls them (CPU),
        or of the kernels (CUDA); ``operator calls`` (CPU: those that no other operator made) or
        ``launches`` (CUDA: of kernels, copies and graphs).
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    call()
    # the compiler would trace the marks into the step
    with profile(activities=activities, record_shapes=True) as seen, ExitStack() as stack:
        if not traced:
            stack.enter_context(parts.marked())
        for _ in range(_REPEATS):
            with record_function(_STEP):
                call()
                if cuda:
                    torch.cuda.synchronize(device)
    steps: dict[int, _StepCosts] = {}
    for event in seen.events() or ():
        line = list(_upwards(event))
        if line[-1].name == _STEP:
            steps.setdefault(id(line[-1]), _StepCosts()).take(line, parts, cuda)
    fastest = min(steps.values(), key=lambda step: sum(step.times.values()))
    if cuda:  # kernels that no operator launched, such as the compiler's own
        seen_there = sum(
            event.time_range.elapsed_us() for event in seen.events() or () if _is_kernel(event)
        )
        fastest.times["rest"] += (
            max(0.0, seen_there - sum(sum(step.times.values()) for step in steps.values()))
            / _REPEATS
        )
    whole = sum(fastest.times.values())
    shares = {part: time / whole for part, time in fastest.times.items() if time}
    return {
        "parts": shares,
        **({"launches": fastest.launches} if cuda else {"operator calls": fastest.calls}),
    }


@dataclass
class _StepCosts:
    """The counts of one step."""

    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    calls: int = 0
    launches: int = 0

    def take(self, line: list[Any], parts: Parts, cuda: bool) -> None:
        """Count an event; ``line`` is the event and its parents, from the inside out."""
        event = line[0]
        self.calls += _is_operator(event) and not any(map(_is_operator, line[1:]))
        self.launches += event.name.startswith(_LAUNCHES)
        ranged = event.name.startswith((_MARK, _STEP))
        device_time = 0.0 if ranged else sum(kernel.duration for kernel in event.kernels)
        self.times[_part_of(line, parts)] += device_time if cuda else event.self_cpu_time_total


def _upwards(event: Any) -> Iterator[Any]:
    """An event, its parent, and so on."""
    while event is not None:
        yield event
        event = event.cpu_parent


def _is_kernel(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(
        (_MARK, _STEP)
    )


def _is_operator(event: Any) -> bool:
    return "::" in event.name


def _part_of(line: list[Any], parts: Parts) -> str:
    """The part of an event, given with its parents, from the inside out."""
    for event in line:
        if any(name in event.name for name in _INVERSION):
            return "inversion"
        if event.name.startswith(_MARK):
            return str(event.name.removeprefix(_MARK))
    found = (parts.of_shapes(event.input_shapes or ()) for event in line)
    if (part := next((part for part in found if part is not None), None)) is not None:
        return part
    return "attention" if any("attention" in event.name for event in line) else "rest"


def transient_bytes(call: Call, device: torch.device) -> int:
    """The peak of the memory that a call allocates, in bytes.

    On CUDA torch's allocator reports it. On a CPU it is summed from the allocations and releases of
    torch's allocator that the profiler sees; memory that a library allocates itself is missing.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        # The next call releases what this one leaves, and a profiler sees the release only of
        # allocations that it saw.
        call()
        with record_function(_STEP):
            call()
    profiler: Any = seen.profiler
    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    started = next(event.start_ns() for event in events if event.name() == _STEP)
    allocated = before = peak = 0
    for event in events:
        if event.name() == "[memory]":
            allocated += event.nbytes()
            if event.start_ns() < started:
                before = peak = allocated
            peak = max(peak, allocated)
    return peak - before


def cache_bytes(cache: Cache | None) -> int:
    """The bytes of a cache's tensors, their spare room included."""
    storages: dict[int, int] = {}
    for layer in () if cache is None else cache.layers:
        for value in vars(layer).values():
            for tensor in value.values() if isinstance(value, Mapping) else (value,):
                if isinstance(tensor, torch.Tensor):
                    storages[tensor.untyped_storage().data_ptr()] = (
                        tensor.untyped_storage().nbytes()
                    )
    return sum(storages.values())


def weight_bytes(model: PreTrainedModel, patch: ContextPatch) -> int:
    """The bytes that a decode step must read: every parameter once, without an embedding table that
    is not the head's, and of the experts only those that the patch's tokens chose.
    """
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    apart = table.weight.nbytes if table.weight is not head.weight else 0
    for block, layer in zip(patch.blocks, patch.layers, strict=True):
        if block.spec.experts is not None:
            experts: Any = model.get_submodule(block.path_of(block.spec.experts))
            chosen = layer[f"{block.spec.experts}.index"].unique().numel()
            apart += sum(
                (len(matrices) - chosen) * matrices[0].nbytes for matrices in experts.parameters()
            )
    return sum(parameter.nbytes for parameter in model.parameters()) - apart
