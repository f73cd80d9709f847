"""What comes before the second token: attaching, the patch of given tokens, the first token.

Attaching is compared with one of the model's own passes over 64 tokens, `compute` of 32 tokens with
a context of 2,048 with the model's own pass over the 2,080, and the first token of `generate` with
that of `model.generate`. The error of a patch is that of its replay: the largest difference of the
kept tokens' logits, relative to the largest; of a token, whether it is another than the model's.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.bench.cases.answer import our_tokens, own_tokens, tokens_check
from icl_patch.bench.cases.generation import LIMITS
from icl_patch.bench.cases.models import SavedModel, random_ids, twin
from icl_patch.bench.harness import Case, Comparison, dtype_name, relative_error
from icl_patch.bench.timing import InTurn

CHECKED = 64  # tokens of the pass that attaching is compared with
CONTEXT, KEPT = 2048, 32
CONTEXTS = (256, 2048, 8000)  # of the first token
UPDATES = ("exact", "stable")
OWN = "the model's own pass"
_TWINS = 20  # more than an attaching is timed: the second on one model remembers the first


def cases(device: torch.device, quick: bool, model: str | None = None) -> list[Case]:
    """A case for each pass and dtype; none without a saved model."""
    if model is None:
        return []
    saved = SavedModel(model)
    made: dict[str, Callable[[PreTrainedModel], Comparison]] = {
        "attaching": attaching,
        f"{KEPT} tokens after {CONTEXT}": computing,
    }
    for context in CONTEXTS:
        made[f"the first token after {context}"] = functools.partial(first_token, context)
    return [
        Case(
            f"{saved.name} {dtype_name(dtype)} {name}",
            functools.partial(_build, saved, dtype, device, comparison),
        )
        for dtype in (torch.float32, torch.bfloat16)[: 1 if quick else 2]
        for name, comparison in made.items()
    ]


def _build(
    saved: SavedModel,
    dtype: torch.dtype,
    device: torch.device,
    comparison: Callable[[PreTrainedModel], Comparison],
) -> Comparison:
    return comparison(saved.build(device, dtype))


def attaching(model: PreTrainedModel) -> Comparison:
    """The first and every further ``ContextPatcher(model)``, which check the model."""
    ids = random_ids(model, 1, CHECKED)

    def attach(update: str, other: PreTrainedModel) -> None:
        ContextPatcher(other, update).detach()

    calls: dict[str, Callable[[], Any]] = {OWN: lambda: model(ids, use_cache=False)}
    for update in UPDATES:
        first = InTurn(functools.partial(attach, update), [twin(model) for _ in range(_TWINS)])
        again = functools.partial(attach, update, twin(model))
        calls |= {f"attaching, {update}": first, f"attaching again, {update}": again}
    return Comparison(ours=OWN, calls=calls, check=lambda name, result: None)


def computing(model: PreTrainedModel) -> Comparison:
    """The model's logits (1, 32, V) of the kept tokens, and ``compute`` of their patch."""
    ids = random_ids(model, 1, CONTEXT + KEPT)
    context, kept = ids[:, :CONTEXT], ids[:, CONTEXT:]

    def own() -> Tensor:
        logits: Tensor = model(ids, use_cache=False, logits_to_keep=KEPT).logits
        return logits

    patchers = {f"compute, {name}": ContextPatcher(twin(model), name) for name in UPDATES}
    calls: dict[str, Callable[[], Any]] = {OWN: own}
    calls |= {
        name: functools.partial(patcher.compute, context, kept)
        for name, patcher in patchers.items()
    }
    expected = own().double()

    def check(name: str, result: Tensor | ContextPatch) -> float:
        if isinstance(result, ContextPatch):
            result = patchers[name].forward(kept, result)
        return relative_error(result, expected, LIMITS[model.dtype][1])

    return Comparison(ours=OWN, calls=calls, check=check)


def first_token(length: int, model: PreTrainedModel) -> Comparison:
    """The first token of a generation; each call gives it (1,)."""
    ids = random_ids(model, 1, length)
    calls: dict[str, Callable[[], Any]] = {OWN: lambda: own_tokens(model, ids, 1)}
    for update in UPDATES:
        patcher = ContextPatcher(twin(model), update)
        calls[f"generate, {update}"] = functools.partial(our_tokens, patcher, ids, 1)
    check = tokens_check(own_tokens(model, ids, 1), model.dtype)
    return Comparison(ours=OWN, calls=calls, check=check)
