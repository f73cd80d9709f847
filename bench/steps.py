"""Decode steps that can be taken over and over: the model's own, those that apply a patch, and
Algorithm 1 with every ``W + ΔW`` built.

A step takes the last token of ``ids`` (B, C) on top of a cache of those before it, gives the next
logits (B, V), and puts the cache back.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from icl_patch import ContextPatch
from icl_patch.bench.harness import captured
from icl_patch.generation.compiled_step import Captured, CompileOptions, use_compiled_step
from icl_patch.generation.decode_state import DecodeState
from icl_patch.generation.decode_step import decode_one_token
from icl_patch.patch.parameter_changes import parameter_changes


class Step:
    """A step: ``run`` takes it, ``rewind`` puts back what it did to the cache.

    Attributes:
        traced: whether the model's modules no longer run in it. compile_seconds: what it took to
            make, where it is compiled.
    """

    traced = False
    compile_seconds: float | None = None

    def __init__(
        self,
        run: Callable[[], Tensor],
        rewind: Callable[[], object] = lambda: None,
        cache: Cache | None = None,
    ) -> None:
        self.run, self.rewind, self.cache = run, rewind, cache

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The logits (B, V)."""
        logits = self.run()
        self.rewind()
        return logits

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Within this context the step runs as a profiler can see into it, without a CUDA graph."""
        yield


class Later(Step):
    """A step that is made when it is first taken: what fails then, fails for it alone."""

    def __init__(self, make: Callable[[], Step]) -> None:
        super().__init__(lambda: self.made()())
        self._make = make
        self._made: Step | None = None

    def made(self) -> Step:
        """The step itself."""
        if self._made is None:
            self._made = self._make()
            self.cache, self.traced, self.compile_seconds = (
                self._made.cache,
                self._made.traced,
                self._made.compile_seconds,
            )
        return self._made

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Within this context the step runs as a profiler can see into it, without a CUDA graph."""
        with self.made().observable():
            yield


class Graphed(Step):
    """A step over a static cache, on a GPU as a CUDA graph; made ready when it is first taken."""

    def __init__(self, run: Callable[[], Tensor], static: "StaticContext") -> None:
        super().__init__(run, static.rewind, static.cache)
        self._static = static
        self._whole = run
        self._replay: Callable[[], Tensor] | None = None

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The logits (B, V)."""
        if self._replay is None:
            self._replay = self._ready()
        return self._replay()

    def _step(self) -> Tensor:
        logits = self._whole()
        self.rewind()
        return logits

    def _ready(self) -> Callable[[], Tensor]:
        replay = self._step
        if self._step().is_cuda:
            held: list[Tensor] = []
            graph = captured(lambda: held.__setitem__(slice(None), [self._step()]), 1)

            def replay() -> Tensor:
                graph.replay()
                return held[0]

        self._static.restore()
        return replay

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Within this context the step runs as a profiler can see into it, without a CUDA graph."""
        kept, self._replay = self._replay, self._step
        try:
            yield
        finally:
            self._replay = kept


class Compiled(Graphed):
    """The same through ``torch.compile``, without a graph break; ``compile_seconds`` is what that
    took.
    """

    traced = True

    def _ready(self) -> Callable[[], Tensor]:
        begun = time.perf_counter()
        self._whole = torch.compile(self.run, fullgraph=True, dynamic=False)
        self._step()
        self.compile_seconds = time.perf_counter() - begun
        return super()._ready()


class StaticContext:
    """All tokens but the last in a static cache (B rows), and how a step on top of it is undone.

    A layer whose window is full moves it at every step: what it then holds is another token further
    on, and the work is the same. ``restore`` puts it back to the first.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.cache = static_cache(model, ids)
        run: Any = model
        run(ids[:, :-1], past_key_values=self.cache, logits_to_keep=1)
        layers: list[Any] = self.cache.layers
        self._windows = [layer for layer in layers if layer.is_sliding]
        full = [
            layer for layer in self._windows if layer.cumulative_length_int >= layer.max_cache_len
        ]
        self.lengths = [layer.cumulative_length for layer in layers if layer not in full]
        self._kept = [
            (place, place.clone()) for layer in full for place in (layer.keys, layer.values)
        ]

    def rewind(self) -> None:
        """Take back the length of one token; one launch for all layers."""
        if self.lengths:
            torch._foreach_sub_(self.lengths, 1)
        for layer in self._windows:
            layer.cumulative_length_int -= 1

    def restore(self) -> None:
        """Put back the windows' contents."""
        for place, kept in self._kept:
            place.copy_(kept)


def static_cache(model: PreTrainedModel, ids: Tensor) -> StaticCache:
    """An empty one with room for ``ids`` and no more."""
    return StaticCache(config=model.config, max_cache_len=ids.shape[1])


def dynamic_cache(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    """All tokens but the last in the model's own cache, which can be cut back by a token."""
    cache = DynamicCache(config=model.config)
    run: Any = model
    run(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
    cache.activate_past_recording()
    return cache


def own_step(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> Step:
    """The model's own step, as ``model.generate`` takes it."""
    run: Any = model
    token = ids[:, -1:].clone()
    return Step(
        lambda: run(token, past_key_values=cache, logits_to_keep=1).logits[:, -1],
        lambda: cache.crop(-1),
        cache,
    )


def static_run(model: PreTrainedModel, ids: Tensor, static: StaticContext) -> Callable[[], Tensor]:
    """The model's own step over a static cache, its mask and positions with it."""
    run: Any = model
    token, position = ids[:, -1:].clone(), torch.full_like(ids[:, -1:], ids.shape[1] - 1)

    def step() -> Tensor:
        logits: Tensor = run(
            token, position_ids=position, past_key_values=static.cache, logits_to_keep=1
        ).logits[:, -1]
        return logits

    return step


class Fixed(Step):
    """Our step on buffers that never move: compiled, as a CUDA graph, or both."""

    _WARM_UP = 5  # it is traced, compiled, and captured at the fourth

    def __init__(self, state: DecodeState, token: Tensor, options: CompileOptions) -> None:
        use_compiled_step(state, options, return_context_logits=False)
        self._step: Any = state.run_step
        self.traced = compiled = options.inductor
        super().__init__(lambda: decode_one_token(state, token).logits, state.rewind, state.cache)
        begun = time.perf_counter()
        for number in range(self._WARM_UP):
            self()
            if compiled and number == 1:
                self.compile_seconds = time.perf_counter() - begun

    @contextmanager
    def observable(self) -> Iterator[None]:
        """Within this context the step runs as a profiler can see into it, without a CUDA graph."""
        kept = self._step.run
        try:
            self._step.run = kept.run if isinstance(kept, Captured) else kept
            yield
        finally:
            self._step.run = kept


@contextmanager
def materialised(model: nn.Module, patch: ContextPatch) -> Iterator[None]:
    """Within this context every changed parameter is ``W + u vᵀ``, ``b + Δb`` or ``m + Δm`` of the
    first row's first token, built now.
    """
    before: list[tuple[nn.Parameter, Tensor]] = []
    try:
        with record_function("part: building"):
            for block, layer in zip(patch.blocks, patch.layers, strict=True):
                for change in parameter_changes(block.spec, layer):
                    parameter = model.get_parameter(
                        f"{block.path}.{change.name}.{change.parameter}"
                    )
                    base, u = parameter.data, change.u[0, 0].to(parameter.dtype)
                    before.append((parameter, base))
                    if change.v is None:
                        parameter.data = base + u
                    else:
                        v = change.v[0, 0].to(parameter.dtype)
                        parameter.data = (
                            torch.addr(base, v, u) if change.transposed else torch.addr(base, u, v)
                        )
        yield
    finally:
        for parameter, data in reversed(before):
            parameter.data = data


def bare_step(model: PreTrainedModel, patch: ContextPatch) -> Tensor:
    """The kept tokens alone, without context, cache or change: (B, V)."""
    run: Any = model
    logits: Tensor = run(patch.kept_ids, position_ids=patch.position_ids, use_cache=False).logits[
        :, -1
    ]
    return logits


def _by_row(model: PreTrainedModel, patch: ContextPatch) -> Tensor:
    """Every row's token with its own materialised weights, one row after the other."""
    rows = []
    for row in range(len(patch.kept_ids)):
        one = patch.select(rows=slice(row, row + 1))
        with materialised(model, one):
            rows.append(bare_step(model, one))
    return torch.cat(rows)


def naive_step(model: PreTrainedModel, patch: ContextPatch, context_step: Step) -> Step:
    """A context step, every matrix materialised, a reduced step; the update's own arithmetic is not
    counted.
    """

    def step() -> Tensor:
        context_step()
        return _by_row(model, patch)

    return Step(step, cache=context_step.cache)


def uncached_step(model: PreTrainedModel, ids: Tensor, patch: ContextPatch) -> Step:
    """The same without a cache: the whole context is run again."""
    run: Any = model

    def step() -> Tensor:
        run(ids, use_cache=False, logits_to_keep=1)
        return _by_row(model, patch)

    return Step(step)


def lora_step(model: PreTrainedModel, patch: ContextPatch, context_step: Step) -> Step:
    """PEFT: a context step, the patch's factors copied into LoRA layers of rank 1, a reduced step;
    the update itself is not counted.

    The rows of a batch have an adapter each, which PEFT applies in one pass (``adapter_names``).
    LoRA has no layer for a norm's scale: where the update changes one, the new scales (B, 1, n) are
    copied into the norm.

    Args:
        model: that nobody else uses: its readers and output matrices are replaced by PEFT's layers.
    """
    from peft import LoraConfig, get_peft_model

    changes = [
        (block, change)
        for block, layer in zip(patch.blocks, patch.layers, strict=True)
        for change in parameter_changes(block.spec, layer)
    ]
    names = [block.path_of(change.name) for block, change in changes if change.v is not None]
    config = LoraConfig(r=1, lora_alpha=1, lora_dropout=0.0, target_modules=names)
    adapters = [f"row{row}" for row in range(len(patch.kept_ids))]
    given: Any = model
    wrapped: Any = get_peft_model(
        given, config, adapter_name=adapters[0], autocast_adapter_dtype=False
    )
    for adapter in adapters[1:]:
        wrapped.add_adapter(adapter, config, autocast_adapter_dtype=False)
    wrapped.requires_grad_(False).eval()
    places, factors = [], []
    for block, change in changes:
        module: Any = model.get_submodule(block.path_of(change.name))
        u, v = change.u[:, 0], None if change.v is None else change.v[:, 0]  # (B, N), (B, K)
        if v is None:
            scale = (module.weight + u).to(module.weight.dtype).unsqueeze(1)
            module.weight = nn.Parameter(torch.zeros_like(scale), requires_grad=False)
            places.append(module.weight)
            factors.append(scale)
            continue
        for row, adapter in enumerate(adapters):
            places += [module.lora_A[adapter].weight, module.lora_B[adapter].weight]
            factors += [v[row].unsqueeze(0), u[row].unsqueeze(1)]
    chosen = {"adapter_names": adapters} if len(adapters) > 1 else {}

    def step() -> Tensor:
        context_step()
        with record_function("part: building"):
            torch._foreach_copy_(places, factors)
        logits: Tensor = wrapped(
            input_ids=patch.kept_ids, position_ids=patch.position_ids, use_cache=False, **chosen
        ).logits[:, -1]
        return logits

    return Step(step, cache=context_step.cache)
