"""A decode step that recomputes and applies every layer's patch, beside the model's own step and
other ways to do the same.

The models are saved ones, or have random weights and the named shapes (`0.22B`). One step gives
every row one token after a context of random tokens; the same step is timed again and again,
without the choice of the token.
All ways run in turns, on the same weights and tokens. In the order of the tables:

- `the model's own step` is 1×: eager, as `model.generate` takes it. `compiled` is the same through
  `torch.compile` over a static cache, and on a GPU a CUDA graph.
- `exact` and `stable` make and apply a new patch. `exact` is bit-identical to the model on
  batch-invariant functions, and `exact, two passes` to the model as it is. `stable` runs in the
  mode that it takes by itself: over a cache that both streams share, or as `stable, two streams`
  (two passes and two streams only up to 8 rows, in the model's own code; in older tables two
  streams have a cache of twice the rows). They run as `generate` does by default, as a program over
  a static cache. With `compile=True` the step is compiled; on a GPU both are a CUDA graph. With
  `compile=False` it runs the model's own code.
- `a given patch applied`, in older tables, is the model's own step with a given patch applied in
  every layer, over the same caches, in the same two forms.
- `a given patch replayed` runs the current token alone with its own patch, through
  `patcher.forward`, without a cache.
- `the changed weights built as matrices` is Algorithm 1, row by row. `PEFT` is a LoRA of rank 1 on
  the same matrices, one adapter a row. Both take a context step, change the weights, and take a
  reduced step; computing the update is not timed. They change the weights row by row, and are left
  out beyond 8 rows.

A mixture of experts has our own forms and the model's own step only: a patch changes the experts
that a token chose and no others, and PEFT has no adapter for experts. The model's own step runs the
experts as transformers does by default.

The middle half and the error are those of `stable`, in older tables of `exact` where there is no
`stable`. The error is the largest difference of the logits from the model's own, relative to the
largest logit. It must be smaller than the patch's own effect; a step that fails has no time. Older
tables have `of ceiling` too, the time to read every weight once at the best bandwidth measured
beside, divided by the step's time, and the operators and the memory of our step.
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
from icl_patch.generation.decode_mode import DecodeMode
from icl_patch.generation.decoding import decode_one_token, start_decoding
from icl_patch.generation.reusable_step import use_reusable_step
from icl_patch.invariance.arithmetic import reason_against

OWN = "the model's own step"
OWN_COMPILED = "the model's own step, compiled"
EXACT = "exact"
EXACT_COMPILED = "exact, compile=True"
EXACT_OWN_CODE = "exact, compile=False"
EXACT_TWO_PASSES = "exact, two passes"
STABLE = "stable"
STABLE_COMPILED = "stable, compile=True"
STABLE_OWN_CODE = "stable, compile=False"
TWO_STREAMS = "stable, two streams"
NAIVE = "the changed weights built as matrices"
PEFT = "PEFT: a LoRA adapter of rank 1, swapped"
# Error limits: of ways that round W + ΔW or its factors to the model's dtype, and of the others.
LIMITS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.25, 0.15)}
_MOST_ROWS = 8  # of ways that change the weights row by row, and of the slow forms of ours
_WARM_UP = 4  # calls until our step is compiled, or recorded and, at the third, captured


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
    builders: dict[str, Callable[[], Step]] = {
        OWN: lambda: plain,
        OWN_COMPILED: lambda: compiled_step(models.plain, ids),
        **_ours(models, ids, mode, mixture),
    }
    if dense:
        builders["a given patch replayed"] = lambda: (
            lambda: models.stable.forward(patch.kept_ids, patch)[:, -1]
        )
        if batch <= _MOST_ROWS:
            builders[NAIVE] = lambda: naive_step(models.plain, patch, plain)
            if has_peft():
                builders[PEFT] = lambda: lora_step(twin(models.plain), patch, plain)
    return Comparison(
        ours=STABLE,
        base=OWN,
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
    """The forms of our step by name, the stable ones in ``mode``; the slow ones for few rows."""
    stable, exact, cuda = models.stable, models.exact, ids.is_cuda
    forms: dict[str, tuple[Any, ...]] = {}
    one_cache = DecodeMode.SHARED_CACHE
    if reason_against(exact.model) is None:
        # no CUDA graph can hold a mixture's exact products, which read their rows on the host
        if not (cuda and mixture):
            forms[EXACT] = exact, one_cache, "auto"
            forms[EXACT_COMPILED] = exact, one_cache, True
        forms[EXACT_OWN_CODE] = exact, one_cache
    forms[STABLE] = stable, mode, "auto"
    forms[STABLE_COMPILED] = stable, mode, True
    forms[STABLE_OWN_CODE] = stable, mode
    if len(ids) <= _MOST_ROWS:
        forms[EXACT_TWO_PASSES] = exact, DecodeMode.TWO_PASS
        if mode is not DecodeMode.TWO_STREAM:
            forms[TWO_STREAMS] = stable, DecodeMode.TWO_STREAM
    return {name: functools.partial(_step, ids, *form) for name, form in forms.items()}


def _step(
    ids: Tensor, patcher: ContextPatcher, mode: DecodeMode, compile: bool | str = False
) -> Step:
    """Our step of the last token, undone after it: over a dynamic cache, or over static buffers, as
    a program or compiled.

    A layer with a full window has dropped a token, which only a dynamic cache gets back, after
    ``Cache.activate_past_recording``.
    """
    plan, mask, token = (
        patcher.plans.for_mode(mode),
        torch.ones_like(ids).bool(),
        ids[:, -1].clone(),
    )
    attached, width = patcher.attached_model, ids.shape[1]
    state = start_decoding(attached, plan, ids, mask, width, reserve=not compile)
    cache: Any = state.inputs.cache
    if compile:
        use_reusable_step(patcher.plans, state, compiled=compile is True)
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
    for _ in range(_WARM_UP if compile else 0):
        step()
    return step
