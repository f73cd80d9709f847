"""A decode step that is taken down once and run from then on: compiled, as a CUDA graph, or both.

What it reads lies in buffers that never move, so that neither the next token nor the next context
needs another one. It is traced as it
runs, below Python: of hooks, of contexts and of what the model's classes do on the way nothing is
left but the operators, and whatever cannot be taken down so (a look at a number, say) is an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from icl_patch.errors import UnsupportedModelError
from icl_patch.generation.decode_step import Decoding, Pass, Step, StepInputs
from icl_patch.generation.graph_partition import Regions
from icl_patch.layers.experts import PatchedScaledExperts
from icl_patch.models import kv_cache
from icl_patch.models.forward_override import what_runs
from icl_patch.recording import forward_passes
from icl_patch.recording.attached_block import AttachedBlock
from icl_patch.recording.diagnostics import BlockDiagnostics

_LEAST = 32  # tokens
_KEPT = 2  # steps, and the caches they run on, that a patcher keeps between generations

Run = Callable[[Tensor, bool], Pass]


class _NoLook(TorchFunctionMode):
    """Within this context a tensor's numbers cannot be had on the host, where a trace would take
    what they are now for what they are.
    """

    _LOOKS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in self._LOOKS:
            raise RuntimeError(f"it looks at the numbers of a tensor ({function.__name__})")
        return function(*args, **kwargs or {})


class Traced:
    """A step as a compiled graph of operators.

    Raises:
        UnsupportedModelError: the model's pass cannot be traced.
    """

    def __init__(self, step: Step, batch: int) -> None:
        self._step = step
        self._token_ids = step.step_inputs.current.new_zeros(batch)
        self._graph: Callable[[], list[Tensor]] | None = None
        self._compiled = False
        # of a pass: what is no tensor, and None where the graph gives one
        self._leaves: list[Any] = []
        self._tree: Any = None

    def __call__(self, token_ids: Tensor, both: bool) -> Pass:
        """The token's pass."""
        self._token_ids.copy_(token_ids)
        if self._graph is None:
            return self._trace(both)
        if not self._compiled:
            with self._covering():
                tensors = self._graph()
            self._compiled = True
        else:
            tensors = self._graph()
        made = iter(tensors)
        logits, maybe_infeasible, factors, collected = tree_unflatten(
            [next(made) if x is None else x for x in self._leaves], self._tree
        )
        diagnostics = [
            BlockDiagnostics(block.block.path, None, collected=of)
            for block, of in zip(self._step.patcher.blocks, collected, strict=True)
        ]
        return Pass(logits, maybe_infeasible, factors, diagnostics)

    def _trace(self, both: bool) -> Pass:
        passes: list[Pass] = []

        def run() -> list[Tensor]:
            made = self._step(self._token_ids, both)
            passes.append(made)
            leaves, self._tree = tree_flatten(
                (
                    made.logits,
                    made.maybe_infeasible,
                    made.factors,
                    [diagnostics.collected for diagnostics in made.diagnostics],
                )
            )
            self._leaves = [None if isinstance(x, Tensor) else x for x in leaves]
            return [x for x in leaves if isinstance(x, Tensor)]

        # one mode for what the trace notes of each tensor: make_fx would make one for each, which
        # takes more than half its time
        one_mode = tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))
        with self._covering():
            with one_mode, _NoLook():
                graph = make_fx(run)()
            self._graph = Regions(graph, [block.module for block in self._step.patcher.blocks])
        return passes[0]

    @contextmanager
    def _covering(self) -> Iterator[None]:
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as cause:  # of the model's own code, which nobody here has seen
            name, reason = type(self._step.patcher.model).__name__, str(cause).partition("\n")[0]
            raise UnsupportedModelError(f"compiled=True does not cover {name}: {reason}") from cause


class Captured:
    """A step as a CUDA graph: captured after a few calls, which make what is made at first use, and
    launched from then on.

    Its tensors are the same at every call.
    """

    _WARM_UP = 3

    def __init__(self, run: Run, step_inputs: StepInputs, batch: int) -> None:
        self._run, self._calls = run, 0
        self._token_ids = step_inputs.current.new_zeros(batch)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pass: Pass | None = None

    def __call__(self, token_ids: Tensor, both: bool) -> Pass:
        """The token's pass."""
        self._token_ids.copy_(token_ids)
        self._calls += 1
        if self._calls <= self._WARM_UP:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                made = self._run(self._token_ids, both)
            torch.cuda.current_stream().wait_stream(stream)
            return made
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._pass = self._run(self._token_ids, both)
            self._graph = graph
        assert self._pass is not None
        self._graph.replay()
        number = self._calls
        return replace(self._pass, overwritten=lambda: number != self._calls)


class CompiledStep:
    """A step on buffers of its own, for one number of rows and tokens.

    Args:
        state: a context in a dynamic cache. capacity: the most tokens. both: whether the context
            stream's logits are given too.
        compiled, graph: whether it is to be compiled, and captured as a CUDA graph.

    Raises:
        UnsupportedModelError: the model's cache cannot be fixed in place.
    """

    def __init__(
        self, state: Decoding, capacity: int, both: bool, compiled: bool, graph: bool
    ) -> None:
        assert isinstance(state.step, Step)
        step_inputs, batch = state.step.step_inputs, len(state.ids)
        with torch.inference_mode(False):
            rows, like = len(step_inputs.current), step_inputs.current.new_zeros
            self.step_inputs = StepInputs(
                current=like(rows, 1),
                positions=like(rows, 1),
                mask=like(rows, capacity),
                cache=kv_cache.static_cache(_filled(state), capacity),
                slot=like(1),
                length=0,
            )
            step = replace(state.step, step_inputs=self.step_inputs)
            self._both = both
            self._run: Run = Traced(step.for_compiler(), batch) if compiled else step
            self._run = Captured(self._run, self.step_inputs, batch) if graph else self._run

    def __call__(self, token_ids: Tensor, both: bool) -> Pass:
        """The token's pass."""
        assert both == self._both
        with torch.inference_mode(False), torch.no_grad():
            return self._run(token_ids, both)

    def start_from(self, step_inputs: StepInputs) -> None:
        """Make the buffers say what a feed with a dynamic cache says."""
        with torch.inference_mode(False), torch.no_grad():
            assert self.step_inputs.slot is not None
            self.step_inputs.positions.copy_(step_inputs.positions)
            self.step_inputs.slot.fill_(step_inputs.length - 1)
            self.step_inputs.mask.zero_()
            self.step_inputs.mask[:, : step_inputs.length] = step_inputs.mask[
                :, : step_inputs.length
            ]
            kv_cache.copy_cache(step_inputs.cache, self.step_inputs.cache, step_inputs.length)


def _filled(state: Decoding) -> Any:
    """A cache as the model makes it, with a token in every layer: the state's, or one of a token's
    own.
    """
    assert isinstance(state.step, Step)
    step_inputs = state.step.step_inputs
    if step_inputs.length:
        return step_inputs.cache
    cache, one = kv_cache.new_cache(state.patcher.model), torch.zeros_like(step_inputs.current)
    forward_passes.run(
        state.patcher.model, one, torch.ones_like(one), one, cache, longest=1, last_logits=1
    )
    return cache


def bucketed_capacity(tokens: int) -> int:
    """The capacity of a step for so many tokens: up to a quarter more, in steps of 32 at least, so
    that other contexts find it made.
    """
    step = max(_LEAST, 1 << max(tokens - 1, 0).bit_length() >> 3)
    return -(-tokens // step) * step


def _traced(model: PreTrainedModel) -> tuple[Any, ...]:
    """What a trace of the model depends on: what it runs, and where its weights lie."""
    return (*(x.data_ptr() for x in (*model.parameters(), *model.buffers())), *what_runs(model))


def check_compilable(model: PreTrainedModel, blocks: list[AttachedBlock]) -> None:
    """Whether a step of the model can be taken down.

    Raises:
        UnsupportedModelError: it depends on numbers that the host looks at, or on weights that no
            compiler takes.
        ValueError: autocast is on.
    """
    name = type(model).__name__
    if torch.is_autocast_enabled(model.device.type):
        raise ValueError(
            "expected no autocast with compiled=True or graph=True: a step that is made once has"
            " the model's own dtype"
        )
    if any(isinstance(block.experts, PatchedScaledExperts) for block in blocks):
        raise UnsupportedModelError(
            f"compiled=True and graph=True do not cover {name}: the host looks how many experts are"
            " chosen"
        )
    if any(weight.is_inference() for weight in model.parameters()):
        raise UnsupportedModelError(
            f"compiled=True and graph=True need weights made outside of inference mode, {name} has"
            " others"
        )


def fix(state: Decoding, *, both: bool, compiled: bool, graph: bool) -> Callable[[], None]:
    """Let a context's steps run on buffers that never move.

    A patcher keeps the steps that were made last for the contexts to come. None serves two contexts
    at a time: what is returned is to be called when this one needs its step no more.
    """
    assert isinstance(state.step, Step)
    patcher, step_inputs = state.patcher, state.step.step_inputs
    capacity = bucketed_capacity(state.ids.shape[1])
    key = (
        len(state.ids),
        capacity,
        state.way,
        both,
        compiled,
        graph,
        step_inputs.current.device,
        _traced(patcher.model),
    )
    fixed = patcher.fixed.pop(key, None) or CompiledStep(state, capacity, both, compiled, graph)
    fixed.start_from(step_inputs)
    state.step, state.cache = fixed, fixed.step_inputs.cache

    def release() -> None:
        # of an abandoned generation this runs wherever it is collected: it waits for no thread
        if patcher.attached:
            patcher.fixed[key] = fixed
        for oldest in list(patcher.fixed)[:-_KEPT]:
            patcher.fixed.pop(oldest, None)

    return release
