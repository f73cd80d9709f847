"""A decode step that recomputes and applies every layer's patch, beside the model's own step and
other ways to do the same.

The models have random weights and the named shapes. One step gives every row one token after a
context of random tokens; the same step is timed again and again, without the choice of the token.
All ways run in turns, on the same weights and tokens. In the order of the tables:

- `recompute and apply` is ours. `fast` keeps one cache for both streams, `two streams` stacks them,
  `exact` takes two passes (the latter two only where eight of the case's caches fit into the GPU's
  memory). `compiled` is `fast` over a static cache, compiled, and on a GPU a CUDA graph; `CUDA
  graph` is the same without the compiler.
- `plain step` is the model's own, eager, as `model.generate` takes it. `compiled` is the same
  through `torch.compile` over a static cache, and on a GPU a CUDA graph. The table leaves out the
  time to compile; the line below it has that, with the compiler's caches as they were. `CUDA graph`
  is not compiled, over the static cache, where no sliding window is full.
- `patch applied` is the model's own step with a given patch applied in every layer, over the same
  caches, in the same three forms.
- `replay of a given patch` runs the current token alone with its own patch, through
  `patcher.forward`, without a cache.
- `W + ΔW built` is Algorithm 1 with materialised matrices, row by row, with a cache and without
  one. `PEFT, factors swapped` is a LoRA of rank 1 on the same matrices, one adapter a row. Both
  take a context step, change the weights, and take a reduced step; computing the update is not
  timed.

A mixture of experts has our own forms and the plain step only: a patch changes the experts that a
token chose and no others, and PEFT has no adapter for experts. The plain step runs the experts as
transformers does by default.

The error is the largest difference of the logits from the plain step's (`patch applied`: from the
plain step's with that weight built), relative to the largest logit. It must be smaller than the
patch's own effect; a step that fails has no time. `of the streaming limit` is the time to read
every weight once (of the experts, the chosen ones) at the best bandwidth measured here, divided by
the step's time. `cache` is the size of the way's cache, its spare room included. `beyond` is the
peak of memory that one step takes beside model and cache, according to torch's allocator (on a CPU:
from its allocations and releases as torch.profiler sees them). `calls` counts a step's operator
calls (CPU) or launches (GPU; for a CUDA graph the launches that it holds). Parts are shares of a
profiled step, by module; operations that the compiler has fused across modules are in the rest.
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
from icl_patch.generation.compiled_step import CompileOptions
from icl_patch.generation.decode_state import DecodeMode, DecodeState
from icl_patch.generation.decode_step import decode_one_token, prefill
from icl_patch.generation.shared_cache_trial import require_shared_cache
from icl_patch.recording.sequences import absorb_all_but_last

OURS = "recompute and apply, fast"
OURS_COMPILED = "recompute and apply, compiled"
PLAIN = "plain step"
COMPILED = "plain step, compiled"
PEFT = "PEFT, factors swapped"
APPLIED = ("patch applied", "patch applied, compiled", "patch applied, CUDA graph")
NAIVE = ("W + ΔW built, with a cache", "W + ΔW built, Algorithm 1 without a cache")
# Error limits: of ways that round W + ΔW or its factors to the model's dtype, and of the others.
_LIMITS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.25, 0.15)}
_SLOW = 3.0  # seconds: a slower step is not repeated for the profiler


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
    """An unmodified model and patchers on the same weights; ``applied`` has a patch applied while a
    case lasts.
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
    """The calls of one case."""
    torch.compiler.reset()  # forget the previous case
    models = models_of(shape, dtype, device)
    ids = torch.randint(
        0,
        min(1000, shape.vocabulary),
        (batch, context),
        generator=torch.Generator().manual_seed(context),
    ).to(device)
    # with logits: the profiler's global hooks are allowed in a replay that can be checked
    patch = decode_one_token(
        _state(models.stable, ids, DecodeMode.SHARED_CACHE), ids[:, -1], return_context_logits=True
    ).make_patch()
    models.patched.close()
    if not shape.experts:
        models.patched.enter_context(models.applied.applied(patch))
    cache = dynamic_cache(models.plain, ids)
    plain = plain_step(models.plain, ids, cache)
    has_room = (
        not ids.is_cuda
        or 8 * cache_bytes(cache) < torch.cuda.get_device_properties(device).total_memory
    )
    rounded, limit = _LIMITS[dtype]
    expected = _expected(models.plain, patch, plain, rounded)
    static = StaticContext(models.plain, ids)
    calls = ours(models, ids, has_room) | {
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
        # the others have their times before the compiler begins
        apart=[name for name in calls if ids.is_cuda and "compiled" in name],
        costs=lambda name, seconds: _costs(calls[name], seconds, Parts(seen, patch.blocks), device),
        most_seconds=6.0,
    )


def _expected(
    model: PreTrainedModel, patch: ContextPatch, plain: Step, limit: float
) -> tuple[Tensor, Tensor]:
    """The logits (B, V), fp64, of the plain step, and of the plain step with the first row's patch
    built into the weights (if there are no experts).

    Raises:
        AssertionError: the patch's effect is smaller than the checks' tolerance.
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


def ours(models: Models, ids: Tensor, has_room: bool) -> dict[str, Step]:
    """The forms of our step by name, ``OURS`` first; ``has_room``: with those of several caches."""
    found: dict[str, Step] = {
        OURS: LazyStep(lambda: _decoding_step(models.stable, ids, DecodeMode.SHARED_CACHE))
    }
    if has_room:
        found["recompute and apply, two streams"] = LazyStep(
            lambda: _decoding_step(models.stable, ids, DecodeMode.TWO_STREAM)
        )
        found["recompute and apply, exact"] = LazyStep(lambda: _exact_step(models.exact, ids))
    found[OURS_COMPILED] = LazyStep(
        lambda: _compiled_step(models.stable, ids, CompileOptions(True, ids.is_cuda))
    )
    if ids.is_cuda:
        found["recompute and apply, CUDA graph"] = LazyStep(
            lambda: _compiled_step(models.stable, ids, CompileOptions(False, True))
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
    """The other ways by name; they share one static cache and one cache of the model's own."""
    changed = models.applied.model
    runs = [static_plain_step(model, ids, static) for model in (models.plain, changed)]
    # An eager step moves a full window by an index from the host, which no graph can hold.
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
    """Whether a layer's window is shorter than the context, so that its static cache moves."""
    layers: list[Any] = static_cache(model, ids).layers
    return any(layer.is_sliding and layer.max_cache_len < ids.shape[1] for layer in layers)


def _state(patcher: ContextPatcher, ids: Tensor, mode: DecodeMode, **arguments: Any) -> DecodeState:
    if mode is DecodeMode.SHARED_CACHE:
        require_shared_cache(patcher.decoder)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return prefill(patcher.decoder, ids, mask, ids.shape[1], mode, **arguments)


def _decoding_step(patcher: ContextPatcher, ids: Tensor, mode: DecodeMode) -> Step:
    """Our step over a dynamic cache."""
    state, token = _state(patcher, ids, mode), ids[:, -1].clone()
    cache: Any = state.cache
    cache.activate_past_recording()
    return Step(lambda: decode_one_token(state, token).logits, state.rewind, cache)


def _compiled_step(patcher: ContextPatcher, ids: Tensor, options: CompileOptions) -> Step:
    state = _state(patcher, ids, DecodeMode.SHARED_CACHE, reserve=False)
    return StaticCacheStep(state, ids[:, -1].clone(), options)


def _exact_step(patcher: ContextPatcher, ids: Tensor) -> Step:
    attached = patcher.attached_model
    sequences = absorb_all_but_last(ids, torch.ones_like(ids, dtype=torch.bool))
    cache: Any = attached.prefill(sequences)
    cache.activate_past_recording()

    def run() -> Tensor:
        return attached.compute_from(cache, sequences).reduced_logits[:, -1]

    return Step(run, lambda: cache.crop(-1), cache)


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


def tables(data: Mapping[str, Any]) -> list[str]:
    """Two Markdown tables for each case: one row for each way, and the time by part."""
    lines: list[str] = []
    for case in dict.fromkeys(row["case"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["case"] == case and row["call"]]
        times = {row["call"]: row["seconds"]["median"] for row in rows if "seconds" in row}
        missing = [
            [name, f"not measured: {reason}", *[""] * (len(COLUMNS) - 2)]
            for name, reason in data.get("skipped", {}).items()
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
