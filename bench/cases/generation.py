"""A decode step that recomputes and applies every layer's patch, beside the model's own step and
other ways to do the same.

The models are saved ones, or have random weights and the named shapes (`0.22B`). One step gives
every row one token after a context of random tokens; the same step is timed again and again,
without the choice of the token.
All ways run in turns, on the same weights and tokens. In the order of the tables:

- `recompute and apply` is ours. `exact` is bit-identical to the model on batch-invariant functions
  and takes one pass over a cache that both streams share, eager or compiled; `exact, two passes` is
  bit-identical to the model as it is. `shared cache` and `two streams` are the stable update in
  these modes (two passes and two streams only up to 8 rows; in older tables two streams have a
  cache of twice the rows). `compiled` has a static cache and is compiled, and on a GPU a CUDA
  graph.
- `plain step` is the model's own, eager, as `model.generate` takes it. `compiled` is the same
  through `torch.compile` over a static cache, and on a GPU a CUDA graph.
- `patch applied`, in older tables, is the model's own step with a given patch applied in every
  layer, over the same caches, in the same two forms.
- `replay of a given patch` runs the current token alone with its own patch, through
  `patcher.forward`, without a cache.
- `W + ΔW built` is Algorithm 1 with materialised matrices, row by row. `PEFT, factors swapped` is a
  LoRA of rank 1 on the same matrices, one adapter a row. Both take a context step, change the
  weights, and take a reduced step; computing the update is not timed. They change the weights row
  by row, and are left out beyond 8 rows.

A mixture of experts has our own forms and the plain step only: a patch changes the experts that a
token chose and no others, and PEFT has no adapter for experts. The plain step runs the experts as
transformers does by default.

The error is the largest difference of the logits from the plain step's, relative to the largest
logit. It must be smaller than the patch's own effect; a step that fails has no time. Older tables
have `of ceiling` too, the time to read every weight once at the best bandwidth measured beside,
divided by the step's time, and the operators and the memory of our step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import ContextPatcher
from icl_patch.bench.baselines import (
    Step,
    bare_step,
    compiled_step,
    has_peft,
    lora_step,
    naive_step,
    plain_step,
    repeatable,
)
from icl_patch.bench.cases.models import (
    CPU_MIXTURE,
    CPU_SHAPE,
    GPU_MIXTURE,
    GPU_SHAPES,
    RandomModel,
    SavedModel,
    random_ids,
    twin,
)
from icl_patch.bench.harness import Case, Comparison, dtype_name, relative_error
from icl_patch.bench.timing import Call
from icl_patch.generation.compiled_step import use_compiled_step
from icl_patch.generation.decode_step import decode_one_token, prefill
from icl_patch.generation.one_pass import DecodeMode
from icl_patch.invariance.arithmetic import reason_against

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
NAIVE = "W + ΔW built, with a cache"
# Error limits: of ways that round W + ΔW or its factors to the model's dtype, and of the others.
LIMITS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.25, 0.15)}
_MOST_ROWS = 8  # of ways that change the weights row by row, and of the slow forms of ours
_WARM_UP = 5  # calls until our step is traced, compiled and, at the fourth, captured


def cases(device: torch.device, quick: bool, model: str | None = None) -> list[Case]:
    """The headline first: on a CPU a context of 256, on a GPU one of 1,024, for every model, dtype
    and batch; or of one saved model, in two dtypes.
    """
    contexts, batches = [256, 1024, 4096], [1, 4, 16]
    dtypes = [torch.float32, torch.bfloat16]
    shapes: list[RandomModel | SavedModel]
    if model is not None:
        shapes = [SavedModel(model)]
    elif device.type == "cpu":
        shapes, dtypes = [CPU_SHAPE, CPU_MIXTURE], dtypes[: 1 if quick else 2]
    else:
        shapes, dtypes = [*GPU_SHAPES, GPU_MIXTURE], [torch.bfloat16]
        contexts, batches = [1024, 256, 8192], [1, 8, 32]
    if quick:
        shapes = shapes[: 1 if device.type == "cpu" else 3]
        contexts, batches = contexts[:1], batches[:2]
    return [
        Case(
            f"{shape.name} {dtype_name(dtype)} B={batch} context={context}",
            functools.partial(comparison, shape, batch, context, dtype, device),
        )
        for context in contexts
        for shape in shapes
        for dtype in dtypes
        for batch in batches
    ]


@dataclass(frozen=True, eq=False)
class Models:
    """An unmodified model and patchers on the same weights."""

    plain: PreTrainedModel
    stable: ContextPatcher
    exact: ContextPatcher


@functools.lru_cache(maxsize=1)
def models_of(shape: RandomModel | SavedModel, dtype: torch.dtype, device: torch.device) -> Models:
    """The models of a shape, which its cases share."""
    model = shape.build(device, dtype)
    return Models(model, *(ContextPatcher(twin(model), update) for update in ("stable", "exact")))


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
    ids = random_ids(models.plain, batch, context)
    plan = models.stable.plans.choose()
    assert plan is not None
    mode = plan.mode
    patch = models.stable.compute(ids[:, :-1], ids[:, -1:])
    plain = plain_step(models.plain, ids)
    mixture = any(block.experts for block in models.exact.attached_model.blocks)
    # a patch of a trained model in 16 bits does not survive the rounding of W + ΔW
    dense = not mixture and (isinstance(shape, RandomModel) or dtype == torch.float32)
    rounded, limit = LIMITS[dtype]
    expected = plain().double()
    _check_effect(expected, bare_step(models.plain, patch), rounded if dense else limit)
    builders = _ours(models, ids, mode, mixture) | {
        PLAIN: lambda: plain,
        COMPILED: lambda: compiled_step(models.plain, ids),
    }
    if dense:
        builders["replay of a given patch"] = lambda: (
            lambda: models.stable.forward(patch.kept_ids, patch)[:, -1]
        )
        if batch <= _MOST_ROWS:
            builders[NAIVE] = lambda: naive_step(models.plain, patch, plain)
            if has_peft():
                builders[PEFT] = lambda: lora_step(twin(models.plain), patch, plain)
    return Comparison(
        ours=_NAMES[mode],
        calls={name: _lazily(build) for name, build in builders.items()},
        check=lambda name, logits: relative_error(
            logits, expected, rounded if name in (NAIVE, PEFT) else limit
        ),
    )


def _check_effect(with_context: Tensor, without: Tensor, limit: float) -> None:
    """The patch's effect is larger than the checks' tolerance, or they could not fail."""
    effect = float((with_context - without).abs().max() / with_context.abs().max())
    if not effect > 2 * limit:
        raise AssertionError(
            f"expected a patch that changes the logits by more than {2 * limit:.1e}, got one that"
            f" does by {effect:.1e}"
        )


def _lazily(build: Callable[[], Step]) -> Call:
    """A step that is built at its first call, so that a failure to build it fails no other."""

    built = functools.cache(build)
    return lambda: built()()


def _ours(
    models: Models, ids: Tensor, mode: DecodeMode, mixture: bool
) -> dict[str, Callable[[], Step]]:
    """The forms of our step by name, in ``mode`` first; those of several caches for few rows."""
    stable, exact, cuda = models.stable, models.exact, ids.is_cuda
    forms: dict[str, tuple[Any, ...]] = {_NAMES[mode]: (stable, mode)}
    compilers, one_cache = ("inductor", *["cuda_graph"] * cuda), DecodeMode.SHARED_CACHE
    if reason_against(exact.model) is None:
        forms[EXACT] = exact, one_cache
        # no CUDA graph can hold a mixture's exact products, which read their rows on the host
        if not (cuda and mixture):
            forms[EXACT_COMPILED] = exact, one_cache, compilers
    if len(ids) <= _MOST_ROWS:
        forms[_NAMES[DecodeMode.TWO_STREAM]] = stable, DecodeMode.TWO_STREAM
        forms[EXACT_TWO_PASSES] = exact, DecodeMode.TWO_PASS
    forms[OURS_COMPILED] = stable, mode, compilers
    return {name: functools.partial(_step, ids, *form) for name, form in forms.items()}


def _step(
    ids: Tensor, patcher: ContextPatcher, mode: DecodeMode, compilers: tuple[str, ...] = ()
) -> Step:
    """Our step of the last token, undone after it: over a dynamic cache, or over static buffers,
    compiled, as a CUDA graph, or both.

    A layer with a full window has dropped a token, which only a dynamic cache gets back, after
    ``Cache.activate_past_recording``.
    """
    plan, mask, token = patcher.plans.of(mode), torch.ones_like(ids).bool(), ids[:, -1].clone()
    attached, width = patcher.attached_model, ids.shape[1]
    state = prefill(attached, plan, ids, mask, width, reserve=not compilers)
    cache: Any = state.inputs.cache
    if compilers:
        use_compiled_step(patcher.plans, state, compilers)
    else:
        cache.activate_past_recording()
    step_inputs = state.inputs

    def rewind() -> None:
        step_inputs.length -= 1
        step_inputs.positions -= 1
        step_inputs.mask[:, step_inputs.length] = 0
        if step_inputs.slot is not None:
            step_inputs.slot -= 1
        else:
            cache.crop(-1)

    step = repeatable(lambda: decode_one_token(state, token).logits, rewind)
    for _ in range(_WARM_UP if compilers else 0):
        step()
    return step
