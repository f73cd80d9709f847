"""A decode step that recomputes and applies every layer's patch, beside the model's own step and
other ways to do the same.

The models have random weights and the named shapes. One step gives every row one token after a
context of random tokens; the same step is timed again and again, without the choice of the token.
All ways run in turns, on the same weights and tokens. In the order of the tables:

- `recompute and apply` is ours. `exact` is bit-identical to the model on batch-invariant functions
  and takes one pass over a cache that both streams share, eager or compiled; `exact, two passes` is
  bit-identical to the model as it is. `shared cache` and `two streams` are the stable update, over
  one cache for both streams and over one for each (two passes and two streams on a CPU only up to 8
  rows, on a GPU only where eight of the case's caches fit into its memory). `compiled` has a static
  cache that both streams share and is compiled, and on a GPU a CUDA graph; `CUDA graph` is the same
  without the compiler.
- `plain step` is the model's own, eager, as `model.generate` takes it. `compiled` is the same
  through `torch.compile` over a static cache, and on a GPU a CUDA graph; `compile s` is the time
  that this took, with the compiler's caches as they were.
- `patch applied` is the model's own step with a given patch applied in every layer, over the same
  caches, in the same two forms.
- `replay of a given patch` runs the current token alone with its own patch, through
  `patcher.forward`, without a cache.
- `W + ΔW built` is Algorithm 1 with materialised matrices, row by row. `PEFT, factors swapped` is a
  LoRA of rank 1 on the same matrices, one adapter a row. Both take a context step, change the
  weights, and take a reduced step; computing the update is not timed. They change the weights row
  by row, and are left out beyond 8 rows.

A mixture of experts has our own forms and the plain step only: a patch changes the experts that a
token chose and no others, and PEFT has no adapter for experts. The plain step runs the experts as
transformers does by default.

The error is the largest difference of the logits from the plain step's (`patch applied`: from the
plain step's with that weight built), relative to the largest logit. It must be smaller than the
patch's own effect; a step that fails has no time. `of the streaming limit` is the time to read
every weight once (of the experts, the chosen ones) at the best bandwidth measured here, divided by
the step's time. `cache` is the size of the way's cache, its spare room included. `transient` is the
peak of memory that one step takes beside model and cache, according to torch's allocator (on a GPU;
older tables have it for the CPU). A CUDA graph is one launch.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.bench.baselines.lora import has_peft, lora_step
from icl_patch.bench.baselines.materialised import bare_step, materialised, naive_step
from icl_patch.bench.baselines.plain import StaticContext, compiled_step, dynamic_cache, plain_step
from icl_patch.bench.cases.models import (
    CPU_MIXTURE,
    CPU_SHAPE,
    GPU_MIXTURE,
    GPU_SHAPES,
    RandomModel,
    SavedModel,
    twin,
)
from icl_patch.bench.costs import cache_bytes, profiled, transient_bytes, weight_bytes
from icl_patch.bench.decode_steps import LazyStep, Step
from icl_patch.bench.harness import Case, Comparison, dtype_name, relative_error
from icl_patch.bench.results import Row, format_number, middle_half, table_lines, time_cell
from icl_patch.bench.timing import ceiling
from icl_patch.generation.compiled_step import CompileOptions, use_compiled_step
from icl_patch.generation.decode_state import DecodeMode, DecodeState
from icl_patch.generation.decode_step import decode_one_token, prefill
from icl_patch.invariance.arithmetic import reason_against
from icl_patch.recording.sequences import absorb_all_but_last

OURS = "recompute and apply, shared cache"
EXACT = "recompute and apply, exact"
EXACT_COMPILED = "recompute and apply, exact, compiled"
EXACT_TWO_PASSES = "recompute and apply, exact, two passes"
OURS_COMPILED = "recompute and apply, compiled"
PLAIN = "plain step"
COMPILED = "plain step, compiled"
PEFT = "PEFT, factors swapped"
_NAMES = {
    DecodeMode.SHARED_CACHE: OURS,
    DecodeMode.TWO_STREAM: "recompute and apply, two streams",
}
APPLIED = ("patch applied", "patch applied, compiled")
NAIVE = "W + ΔW built, with a cache"
# Error limits: of ways that round W + ΔW or its factors to the model's dtype, and of the others.
_LIMITS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.25, 0.15)}
_MOST_ROWS = 8  # of ways that change the weights row by row, and on a CPU of the slow forms of ours
_WARM_UP = 5  # calls until our step is traced, compiled and, at the fourth, captured


def cases(device: torch.device, quick: bool, model: str | None = None) -> list[Case]:
    """The headline first: on a CPU a context of 256, on a GPU one of 1,024, for every model and
    batch; or of one saved model, in two dtypes.
    """
    grid: list[tuple[RandomModel | SavedModel, torch.dtype, int, int]]
    if model is not None:
        default = torch.float32 if device.type == "cpu" else torch.bfloat16
        saved, dtypes = SavedModel.of(model), (torch.float32, torch.bfloat16)
        rows, contexts = ([1, 4], [256]) if quick else ([1, 4, 16], [256, 1024, 4096])
        grid = [(saved, of, n, length) for length in contexts for of in dtypes for n in rows]
    elif device.type == "cpu":
        default, other = torch.float32, torch.bfloat16
        grid = [(CPU_SHAPE, default, batch, 256) for batch in (1, 4)]
        if not quick:
            grid += [(CPU_SHAPE, other, batch, 256) for batch in (1, 4)]
            grid += [(CPU_SHAPE, of, n, 1024) for of in (default, other) for n in (1, 4)]
            grid += [(CPU_SHAPE, of, n, 256) for of in (default, other) for n in (8, 32)]
            grid += [(CPU_SHAPE, default, batch, 16) for batch in (1, 4)]
            grid += [(CPU_MIXTURE, default, batch, 256) for batch in (1, 4)]
    else:
        default = torch.bfloat16
        shapes, batches = (GPU_SHAPES[:3], (1, 8)) if quick else (GPU_SHAPES, (1, 8, 4, 32))
        grid = [(shape, default, batch, 1024) for shape in shapes for batch in batches]
        if not quick:
            rest = (16, 256, 8192)
            grid += [(x, default, n, length) for x in shapes for n in batches for length in rest]
            grid += [(GPU_MIXTURE, default, batch, 1024) for batch in batches]
    return [_case(*of, device, default) for of in grid]


def _case(
    shape: RandomModel | SavedModel,
    dtype: torch.dtype,
    batch: int,
    context: int,
    device: torch.device,
    default: torch.dtype,
) -> Case:
    model = shape.name if dtype == default else f"{shape.name} {dtype_name(dtype)}"
    return Case(
        f"{shape.name} {dtype_name(dtype)} B={batch} context={context}",
        functools.partial(comparison, shape, batch, context, dtype, device),
        {"model": model, "batch": batch, "context": context},
    )


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
def models_of(shape: RandomModel | SavedModel, dtype: torch.dtype, device: torch.device) -> Models:
    """The models of a shape, which its cases share."""
    model = shape.build(device, dtype)
    stable, exact, applied = (
        ContextPatcher(twin(model), update) for update in ("stable", "exact", "stable")
    )
    return Models(model, stable, exact, applied)


@torch.no_grad()
def comparison(
    shape: RandomModel | SavedModel,
    batch: int,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Comparison:
    """The calls of one case."""
    torch.compiler.reset()  # forget the previous case
    models = models_of(shape, dtype, device)
    rng = torch.Generator().manual_seed(context)
    ids = torch.randint(0, min(1000, shape.vocabulary), (batch, context), generator=rng).to(device)
    plan = models.stable.plans.choose()
    assert plan is not None
    mode = plan.mode
    patch = decode_one_token(_state(models.stable, ids, mode), ids[:, -1]).make_patch()
    models.patched.close()
    # a patch of a trained model in 16 bits does not survive the rounding of W + ΔW
    dense = not shape.experts and (isinstance(shape, RandomModel) or dtype == torch.float32)
    if dense:
        models.patched.enter_context(models.applied.applied(patch))
    cache = dynamic_cache(models.plain, ids)
    plain = plain_step(models.plain, ids, cache)
    rounded, limit = _LIMITS[dtype]
    expected = _expected(models.plain, patch, plain, rounded if dense else limit, dense)
    static = StaticContext(models.plain, ids)
    builders = _ours(models, ids, 8 * cache_bytes(cache), mode)
    builders |= _baselines(models, ids, patch, cache, static, dense)
    row_by_row = dense and batch <= _MOST_ROWS
    if row_by_row:
        builders[NAIVE] = lambda: naive_step(models.plain, patch, plain)
    if row_by_row and has_peft():
        builders[PEFT] = lambda: lora_step(twin(models.plain), patch, plain)
    calls = {name: LazyStep(build) for name, build in builders.items()}
    nbytes = weight_bytes(models.plain, patch)
    return Comparison(
        ours=_NAMES[mode],
        calls=calls,
        check=lambda name, logits: relative_error(
            logits, expected[name in APPLIED], rounded if name in (NAIVE, PEFT) else limit
        ),
        nbytes=dict.fromkeys(calls, nbytes),
        ceiling=ceiling(device),
        units=dict.fromkeys(calls, batch),
        unit="tokens",
        notes={"weights MB": nbytes / 1e6},
        costs=lambda name: _costs(calls[name].step, device),
    )


def _expected(
    model: PreTrainedModel, patch: ContextPatch, plain: Step, limit: float, dense: bool
) -> tuple[Tensor, Tensor]:
    """The logits (B, V), fp64, of the plain step, and of the plain step with the first row's patch
    built into the weights if ``dense``.

    Raises:
        AssertionError: the patch's effect is smaller than the checks' tolerance.
    """
    expected = applied = plain().double()
    pairs = [(expected, bare_step(model, patch).double())]
    if dense:
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


Builders = dict[str, Callable[[], Step]]


def _ours(models: Models, ids: Tensor, nbytes: int, mode: DecodeMode) -> Builders:
    """The forms of our step by name, in ``mode`` first; those of several caches if ``nbytes`` fit
    on a GPU, or there are few rows on a CPU.
    """
    stable, cuda = models.stable, ids.is_cuda
    builders: Builders = {_NAMES[mode]: lambda: _decoding_step(stable, ids, mode)}
    one_pass = reason_against(models.exact.model) is None
    if one_pass:
        builders[EXACT] = lambda: _decoding_step(models.exact, ids, DecodeMode.SHARED_CACHE)
    mixture = any(block.experts for block in models.exact.attached_model.blocks)
    # no CUDA graph can hold a mixture's exact products, which read their rows on the host
    if one_pass and not (cuda and mixture):
        options = CompileOptions(inductor=True, cuda_graph=cuda)
        one_cache = DecodeMode.SHARED_CACHE
        builders[EXACT_COMPILED] = lambda: _compiled_step(models.exact, ids, options, one_cache)
    fits = (
        nbytes < torch.cuda.get_device_properties(ids.device).total_memory
        if cuda
        else len(ids) <= _MOST_ROWS
    )
    if fits:
        two = DecodeMode.TWO_STREAM
        builders[_NAMES[two]] = lambda: _decoding_step(stable, ids, two)
        builders[EXACT_TWO_PASSES] = lambda: _two_pass_step(models.exact, ids)
    compilers = CompileOptions(inductor=True, cuda_graph=cuda)
    builders[OURS_COMPILED] = lambda: _compiled_step(stable, ids, compilers, mode)
    if cuda:
        graph = CompileOptions(cuda_graph=True)
        builders["recompute and apply, CUDA graph"] = lambda: _compiled_step(
            stable, ids, graph, mode
        )
    return builders


def _baselines(
    models: Models,
    ids: Tensor,
    patch: ContextPatch,
    cache: DynamicCache,
    static: StaticContext,
    dense: bool,
) -> Builders:
    """The other ways by name; they share one static cache and one cache of the model's own."""
    changed = models.applied.model
    runs = {PLAIN: models.plain} | ({APPLIED[0]: changed} if dense else {})
    builders: Builders = {}
    for name, model in runs.items():
        builders[name] = functools.partial(plain_step, model, ids, cache)
        builders[f"{name}, compiled"] = functools.partial(compiled_step, model, ids, static)
    if dense:
        builders["replay of a given patch"] = lambda: Step(
            lambda: models.stable.forward(patch.kept_ids, patch)[:, -1]
        )
    return builders


def _state(patcher: ContextPatcher, ids: Tensor, mode: DecodeMode, **arguments: Any) -> DecodeState:
    plan, mask = patcher.plans.of(mode), torch.ones_like(ids, dtype=torch.bool)
    return prefill(patcher.attached_model, plan, ids, mask, ids.shape[1], **arguments)


def _decoding_step(patcher: ContextPatcher, ids: Tensor, mode: DecodeMode) -> Step:
    """Our step over a dynamic cache."""
    state, token = _state(patcher, ids, mode), ids[:, -1].clone()
    cache: Any = state.inputs.cache
    cache.activate_past_recording()
    return Step(lambda: decode_one_token(state, token).logits, state.inputs.rewind, cache)


def _compiled_step(
    patcher: ContextPatcher, ids: Tensor, options: CompileOptions, mode: DecodeMode
) -> Step:
    """Our step over static buffers: compiled, as a CUDA graph, or both."""
    state = _state(patcher, ids, mode, reserve=False)
    token = ids[:, -1].clone()
    use_compiled_step(patcher.plans, state, options)
    inputs = state.inputs
    step = Step(lambda: decode_one_token(state, token).logits, inputs.rewind, inputs.cache)
    started = time.perf_counter()
    step()
    step()
    seconds = time.perf_counter() - started
    for _ in range(_WARM_UP - 2):
        step()
    return replace(step, compile_seconds=seconds if options.inductor else None)


def _two_pass_step(patcher: ContextPatcher, ids: Tensor) -> Step:
    attached = patcher.attached_model
    sequences = absorb_all_but_last(ids, torch.ones_like(ids, dtype=torch.bool))
    cache: Any = attached.prefill(sequences)
    cache.activate_past_recording()

    def run() -> Tensor:
        return attached.compute_from(cache, sequences).reduced_logits[:, -1]

    return Step(run, lambda: cache.crop(-1), cache)


def _costs(step: Step, device: torch.device) -> dict[str, float]:
    costs = {"cache MB": cache_bytes(step.cache) / 1e6}
    if device.type == "cuda":
        costs["transient MB"] = transient_bytes(step, device) / 1e6
    compiled = {} if step.compile_seconds is None else {"compile s": step.compile_seconds}
    return costs | profiled(step, device) | compiled


# The tables

NUMBERS = {
    "rate": "tokens/s",
    "of ceiling": "of the streaming limit",
    "cache MB": "cache MB",
    "transient MB": "transient MB",
    "operator calls": "operator calls",
    "launches": "launches",
    "compile s": "compile s",
    "error": "error",
}
"""The numbers of a row, and their columns; a column that would be empty is left out."""


def tables(rows: Sequence[Row]) -> list[str]:
    """A Markdown table for each case, with a row for each way."""
    lines: list[str] = []
    for case, group in itertools.groupby(rows, lambda row: row["case"]):
        ways = [row for row in group if row["call"]]
        times = {row["call"]: row["seconds"]["median"] for row in ways if "seconds" in row}
        numbers = [name for name in NUMBERS if any(name in row for row in ways)]
        table = []
        for row in ways:
            ratios = [
                f"{times[row['call']] / times[name]:.2f}×"
                if {row["call"], name} <= set(times)
                else "-"
                for name in (PLAIN, COMPILED)
            ]
            shown = [format_number(row.get(name)) for name in numbers]
            table.append([row["call"], time_cell(row), middle_half(row), *ratios, *shown])
        columns = ["one step", "time", "middle half", "over plain", "over compiled"]
        columns += [NUMBERS[name] for name in numbers]
        lines += [f"## {case}", "", *table_lines(columns, table), ""]
    return lines[:-1]
