"""A decode step that recomputes and applies every layer's patch, beside the model's own step and
the ways it is done otherwise.

Random weights of the shape that is named; one step gives every row one token after a context of
random tokens, and is taken over and over. The choice of the token is not part of it. All ways run
in turns, on the same weights and tokens. In the order of the tables:

- `recompute and apply`: ours. `fast` keeps one cache for both streams, `two streams` stacks them,
  `exact` takes two passes (both where eight caches of the case fit into a GPU's memory). `compiled`
  is `fast` over a static cache, compiled, on a GPU as a CUDA graph; `CUDA graph` the same, not
  compiled.
- `plain step`: the model's own, eager, as `model.generate` takes it. `compiled`: the same through
  `torch.compile` over a static cache, on a GPU as a CUDA graph; what compiling took, with what the
  compiler had in its caches, is below the table and not in the times. `CUDA
  graph`: over the static cache, not compiled, where no window is full.
- `patch applied`: the model's own step while a given patch is applied in every layer, over the same
  caches; in the same three forms.
- `replay of a given patch`: the current token alone with its own patch, through `patcher.forward`;
  no cache.
- `W + ΔW built`: Algorithm 1 with materialised matrices, row after row, with a cache and without
  one. `PEFT, factors swapped`: a LoRA of rank 1 on the same matrices, an adapter a row. Both take a
  context step, change the weights, and take a reduced step; the arithmetic of the update is not
  counted.

Of a mixture of experts there are our own forms and the plain step: what a patch changes in the
experts that a token chose is no change of the others, and PEFT has no adapter for them. Its plain
step runs the experts as transformers does by default.

The error is the largest difference of the logits from the plain step's (`patch applied`: from the
plain step's with that weight built), relative to the largest; it must be smaller than what the
patch does. A step that fails prints no time. `of the streaming limit` is the time to read every
weight once (of experts, those that were chosen), at the best bandwidth measured here, over the
step's. `cache` is what the way's cache holds, the room in it included; `beyond` is the most memory
that one step takes beside model and cache, as torch's allocator counts it (on a CPU its allocations
and releases one by one, as torch.profiler sees them). `calls` are operators called (CPU) or
launches (GPU; of a CUDA graph those it holds) a step. Parts are shares of a profiled step, by
module; a part that the compiler has fused into something else is in the rest.
"""

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.bench.baselines.lora import lora_step, peft_problem
from icl_patch.bench.baselines.materialised import (
    bare_step,
    materialised,
    naive_step,
    uncached_step,
)
from icl_patch.bench.baselines.plain import (
    CompiledStep,
    GraphedStep,
    StaticContext,
    dynamic_cache,
    plain_step,
    static_cache,
    static_plain_step,
)
from icl_patch.bench.cases.random_models import (
    CPU_MIXTURE,
    CPU_SHAPE,
    GPU_MIXTURE,
    GPU_SHAPES,
    RandomModel,
    twin,
)
from icl_patch.bench.costs import PARTS, Parts, cache_bytes, profiled, transient_bytes, weight_bytes
from icl_patch.bench.decode_steps import LazyStep, StaticCacheStep, Step
from icl_patch.bench.harness import Case, Comparison, format_seconds, relative_error
from icl_patch.bench.results import Results, table_lines
from icl_patch.bench.timing import ceiling
from icl_patch.generation.decode_step import DecodeMode, Decoding, decode_one_token, prefill
from icl_patch.generation.loop import History

OURS = "recompute and apply, fast"
OURS_COMPILED = "recompute and apply, compiled"
PLAIN = "plain step"
COMPILED = "plain step, compiled"
PEFT = "PEFT, factors swapped"
APPLIED = ("patch applied", "patch applied, compiled", "patch applied, CUDA graph")
NAIVE = ("W + ΔW built, with a cache", "W + ΔW built, Algorithm 1 without a cache")
# Of the error: of the ways that round W + ΔW or its factors to the model's dtype, and of the
# others.
_LIMITS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.25, 0.15)}
_SLOW = 3.0  # seconds: what takes longer is not taken again to be observed


def cases(device: torch.device, quick: bool, results: Results) -> list[Case]:
    """The headline first: on a CPU a context of 256, on a GPU one of 1,024, for every model and
    batch.
    """
    if reason := peft_problem():
        results.skip(PEFT, reason)
    if device.type == "cpu":
        dtype = torch.float32
        contexts = (256,) if quick else (256, 1024, 16)
        grid = [(CPU_SHAPE, batch, context) for context in contexts for batch in (1, 4)]
        grid += [] if quick else [(CPU_MIXTURE, batch, 256) for batch in (1, 4)]
    else:
        dtype = torch.bfloat16
        shapes, batches = (GPU_SHAPES[:2], (1, 8)) if quick else (GPU_SHAPES, (1, 8, 4, 32))
        grid = [(shape, batch, 1024) for shape in shapes for batch in batches]
        rest = () if quick else (16, 256, 8192)
        grid += [
            (shape, batch, context) for shape in shapes for batch in batches for context in rest
        ]
        grid += [] if quick else [(GPU_MIXTURE, batch, 1024) for batch in batches]
    found = []
    for shape, batch, context in grid:
        title = f"{shape.name} {str(dtype).removeprefix('torch.')} B={batch} context={context}"
        parameters: dict[str, str | int] = {"model": shape.name, "batch": batch, "context": context}
        found.append(
            Case(
                title,
                functools.partial(comparison, shape, batch, context, dtype, device),
                parameters,
            )
        )
    return found


@dataclass(frozen=True, eq=False)
class Models:
    """One set of weights: the model, untouched, and patchers on it. ``applied`` has a patch applied
    for as long as a case lasts.
    """

    plain: PreTrainedModel
    stable: ContextPatcher
    exact: ContextPatcher
    applied: ContextPatcher
    patched: ExitStack = field(default_factory=ExitStack)


@functools.lru_cache(maxsize=1)
def models_of(shape: RandomModel, dtype: torch.dtype, device: torch.device) -> Models:
    """The cases of a shape share its weights."""
    model = shape.build(device, dtype)
    return Models(
        model, *(ContextPatcher(twin(model), update) for update in ("stable", "exact", "stable"))
    )


@torch.no_grad()
def comparison(
    shape: RandomModel, batch: int, context: int, dtype: torch.dtype, device: torch.device
) -> Comparison:
    """What is timed in one case."""
    torch.compiler.reset()  # what the case before it compiled
    models = models_of(shape, dtype, device)
    ids = torch.randint(
        0,
        min(1000, shape.vocabulary),
        (batch, context),
        generator=torch.Generator().manual_seed(context),
    ).to(device)
    patch = decode_one_token(
        _state(models.stable, ids, DecodeMode.SHARED_CACHE), ids[:, -1]
    ).make_patch()
    models.patched.close()
    if not shape.experts:
        models.patched.enter_context(models.applied.applied(patch))
    cache = dynamic_cache(models.plain, ids)
    plain = plain_step(models.plain, ids, cache)
    bucketed_capacity = (
        not ids.is_cuda
        or 8 * cache_bytes(cache) < torch.cuda.get_device_properties(device).total_memory
    )
    rounded, limit = _LIMITS[dtype]
    expected = _expected(models.plain, patch, plain, rounded)
    static = StaticContext(models.plain, ids)
    calls = ours(models, ids, bucketed_capacity) | {
        PLAIN: plain,
        COMPILED: CompiledStep(static_plain_step(models.plain, ids, static), static),
    }
    if not shape.experts:
        calls |= baselines(models, ids, patch, plain, cache, static)
    seen = [models.plain, models.stable.model, models.exact.model, models.applied.model]
    if peft_problem() is None and not shape.experts:
        seen.append(twin(models.plain))
        calls[PEFT] = LazyStep(lambda: lora_step(seen[-1], patch, plain))
    nbytes = weight_bytes(models.plain, patch)
    return Comparison(
        ours=OURS,
        calls=calls,
        check=lambda name, logits: relative_error(
            logits, expected[name in APPLIED], rounded if name in (*NAIVE, PEFT) else limit
        ),
        nbytes=dict.fromkeys(calls, nbytes),
        ceiling=ceiling(device),
        units=dict.fromkeys(calls, batch),
        unit="tokens",
        notes={"weights MB": nbytes / 1e6},
        # the others are there when the compiler has only begun
        apart=[name for name in calls if ids.is_cuda and "compiled" in name],
        costs=lambda name, seconds: _costs(calls[name], seconds, Parts(seen, patch.blocks), device),
        most_seconds=6.0,
    )


def _expected(
    model: PreTrainedModel, patch: ContextPatch, plain: Step, limit: float
) -> tuple[Tensor, Tensor]:
    """The logits (B, V) of the plain step, and of the plain step with the first row's patch in the
    weights, if it has no experts; fp64.

    Raises:
        AssertionError: the patch does not do more than a check lets pass.
    """
    expected = applied = plain().double()
    pairs = [(expected, bare_step(model, patch).double())]
    if all(block.spec.experts is None for block in patch.blocks):
        with materialised(model, patch):
            applied = plain().double()
        pairs.append((applied, expected))
    for changed, without in pairs:
        effect = float((changed - without).abs().max() / changed.abs().max())
        if not effect > 2 * limit:
            raise AssertionError(
                f"expected a patch that changes the logits by more than {2 * limit:.1e}, got one"
                f" that does by {effect:.1e}"
            )
    return expected, applied


def ours(models: Models, ids: Tensor, bucketed_capacity: bool) -> dict[str, Step]:
    """Every form of our own step by its name, ``OURS`` first, which the others are compared with;
    ``bucketed_capacity``: with those of more caches.
    """
    found: dict[str, Step] = {
        OURS: LazyStep(lambda: _decoding_step(models.stable, ids, DecodeMode.SHARED_CACHE))
    }
    if bucketed_capacity:
        found["recompute and apply, two streams"] = LazyStep(
            lambda: _decoding_step(models.stable, ids, DecodeMode.TWO_STREAM)
        )
        found["recompute and apply, exact"] = LazyStep(lambda: _exact_step(models.exact, ids))
    found[OURS_COMPILED] = LazyStep(
        lambda: _fixed_step(models.stable, ids, compiled=True, graph=ids.is_cuda)
    )
    if ids.is_cuda:
        found["recompute and apply, CUDA graph"] = LazyStep(
            lambda: _fixed_step(models.stable, ids, compiled=False, graph=True)
        )
    return found


def baselines(
    models: Models,
    ids: Tensor,
    patch: ContextPatch,
    plain: Step,
    cache: DynamicCache,
    static: StaticContext,
) -> dict[str, Step]:
    """The other ways by their names. Those over a static cache share it, those over the model's own
    share that one.
    """
    changed = models.applied.model
    runs = [static_plain_step(model, ids, static) for model in (models.plain, changed)]
    # a full one is moved with an index from the host, unless it is compiled
    graph = ids.is_cuda and not _windows(models.plain, ids)
    return {
        **({"plain step, CUDA graph": GraphedStep(runs[0], static)} if graph else {}),
        APPLIED[0]: plain_step(changed, ids, cache),
        APPLIED[1]: CompiledStep(runs[1], static),
        **({APPLIED[2]: GraphedStep(runs[1], static)} if graph else {}),
        "replay of a given patch": Step(
            lambda: models.stable.forward(patch.kept_ids, patch)[:, -1]
        ),
        NAIVE[0]: naive_step(models.plain, patch, plain),
        NAIVE[1]: uncached_step(models.plain, ids, patch),
    }


def _windows(model: PreTrainedModel, ids: Tensor) -> bool:
    """Whether a layer sees less than the context, so that its static cache moves."""
    layers: list[Any] = static_cache(model, ids).layers
    return any(layer.is_sliding and layer.max_cache_len < ids.shape[1] for layer in layers)


def _state(patcher: ContextPatcher, ids: Tensor, way: DecodeMode, **arguments: Any) -> Decoding:
    return prefill(
        patcher, ids, torch.ones_like(ids, dtype=torch.bool), ids.shape[1], way, **arguments
    )


def _decoding_step(patcher: ContextPatcher, ids: Tensor, way: DecodeMode) -> Step:
    """Our step over a dynamic cache."""
    state, token = _state(patcher, ids, way), ids[:, -1].clone()
    cache: Any = state.cache
    cache.activate_past_recording()
    step: Any = state.step

    def rewind() -> None:
        cache.crop(-1)
        step.step_inputs.positions -= 1
        step.step_inputs.length -= 1
        state.length -= 1
        state.steps -= 1

    return Step(lambda: decode_one_token(state, token).logits, rewind, cache)


def _fixed_step(patcher: ContextPatcher, ids: Tensor, *, compiled: bool, graph: bool) -> Step:
    state = _state(patcher, ids, DecodeMode.SHARED_CACHE, reserve=False)
    return StaticCacheStep(state, ids[:, -1].clone(), compiled=compiled, graph=graph)


def _exact_step(patcher: ContextPatcher, ids: Tensor) -> Step:
    history = History(patcher, ids, None)
    cache: Any = history._cache
    cache.activate_past_recording()
    return Step(lambda: history.step().reduced_logits[:, -1], lambda: cache.crop(-1), cache)


def _costs(step: Step, seconds: float, parts: Parts, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"cache MB": cache_bytes(step.cache) / 1e6}
    if step.compile_seconds is not None:
        found["compile s"] = step.compile_seconds
    if seconds < _SLOW:
        with step.observable():
            found["beyond MB"] = transient_bytes(step, device) / 1e6
            found |= profiled(step, parts, device, traced=step.traced)
    return found


# The tables


def tables(found: Mapping[str, Any]) -> list[str]:
    """Two Markdown tables a case: a row a way, and the time by part."""
    lines: list[str] = []
    for case in dict.fromkeys(row["case"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["case"] == case and row["call"]]
        times = {row["call"]: row["seconds"]["median"] for row in rows if "seconds" in row}
        missing = [
            [name, f"not measured: {reason}", *[""] * (len(COLUMNS) - 2)]
            for name, reason in found.get("skipped", {}).items()
        ]
        lines += [
            f"## {case}",
            "",
            *table_lines(COLUMNS, [_line(row, times) for row in rows] + missing),
            "",
        ]
        there = [
            part
            for part in PARTS
            if part != "experts" or any(part in row.get("parts", ()) for row in rows)
        ]
        shares = [
            [row["call"], *(_share(row["parts"].get(part)) for part in there)]
            for row in rows
            if "parts" in row
        ]
        if shares:
            lines += [*table_lines(["share of a profiled step", *there], shares), ""]
        where = next((row for row in rows if "weights MB" in row), None)
        if where is not None:
            lines += [
                (
                    f"A step reads {where['weights MB']:.0f} MB of weights, at"
                    f" {where['ceiling GB/s']:.1f} GB/s at best."
                ),
                "",
            ]
        compiled = [
            f"{row['call']} {format_seconds(row['compile s'])}"
            for row in rows
            if "compile s" in row
        ]
        lines += (
            [f"Compiling took, before the times: {', '.join(compiled)}.", ""] if compiled else []
        )
        lines += [
            f"Not observed: {row['call']}, {row['not observed']}."
            for row in rows
            if "not observed" in row
        ]
    return lines[:-1] if lines and not lines[-1] else lines


COLUMNS = (
    "one step",
    "time",
    "middle half",
    "tokens/s",
    "over plain",
    "over compiled",
    "of the streaming limit",
    "cache MB",
    "beyond MB",
    "calls",
    "error",
)


def _line(row: Mapping[str, Any], times: Mapping[str, float]) -> list[str]:
    name = f"**{row['call']}**" if row["ours"] else row["call"]
    if "seconds" not in row:
        return [name, f"FAILED: {row['failed']}", *[""] * (len(COLUMNS) - 2)]
    seconds = row["seconds"]

    def ratio(baseline: str) -> str:
        return f"{seconds['median'] / times[baseline]:.2f}×" if baseline in times else "-"

    def number(*names: str) -> str:
        return next(
            (
                f"{row[name]:.3g}" if abs(row[name]) < 1000 else f"{row[name]:.0f}"
                for name in names
                if name in row
            ),
            "-",
        )

    return [
        name,
        format_seconds(seconds["median"]),
        " – ".join(format_seconds(seconds[end]) for end in ("low", "high")),
        number("rate"),
        ratio(PLAIN),
        ratio(COMPILED),
        _share(row.get("of ceiling")) or "-",
        number("cache MB"),
        number("beyond MB"),
        number("launches", "operator calls"),
        number("error"),
    ]


def _share(value: float | None) -> str:
    return (
        "" if value is None else f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.2g} %"
    )
