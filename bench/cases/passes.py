"""What comes before the second token: attaching, the patch of given tokens, the first token.

Attaching is compared with one of the model's own passes over 64 tokens, `compute` of 32 tokens with
a context of 2,048 with the model's own pass over the 2,080, and the first token of `generate` with
that of `model.generate`. The error is the largest difference of the kept tokens' logits, relative
to the largest; of a token, whether it is another than the model's.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import ContextPatcher
from icl_patch.bench.cases.models import SavedModel, twin
from icl_patch.bench.harness import Case, Comparison, dtype_name, relative_error
from icl_patch.bench.timing import InTurn

CHECKED = 64  # tokens of the pass that attaching is compared with
CONTEXT, KEPT = 2048, 32
CONTEXTS = (256, 2048, 8000)  # of the first token
UPDATES = ("exact", "stable")
OWN = "the model's own pass"
_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.15}
_TWINS = 20  # more than an attaching is timed: the second on one model remembers the first


def cases(device: torch.device, quick: bool, model: str | None = None) -> list[Case]:
    """A case for each pass and dtype; none without a saved model."""
    if model is None:
        return []
    saved = SavedModel.of(model)
    made: list[tuple[str, Callable[[PreTrainedModel, Callable[[int], Tensor]], Comparison]]]
    made = [("attaching", attaching), (f"{KEPT} tokens after {CONTEXT}", computing)]
    made += [
        (f"the first token after {context}", functools.partial(first_token, context))
        for context in CONTEXTS
    ]
    return [
        Case(
            f"{saved.name} {dtype_name(dtype)} {name}",
            functools.partial(_build, saved, dtype, device, comparison),
            {"model": saved.name, "dtype": dtype_name(dtype)},
        )
        for dtype in (torch.float32, torch.bfloat16)[: 1 if quick else 2]
        for name, comparison in made
    ]


@torch.no_grad()
def _build(
    saved: SavedModel,
    dtype: torch.dtype,
    device: torch.device,
    comparison: Callable[[PreTrainedModel, Callable[[int], Tensor]], Comparison],
) -> Comparison:
    def tokens(count: int) -> Tensor:
        rng = torch.Generator().manual_seed(count)
        return torch.randint(0, min(1000, saved.vocabulary), (1, count), generator=rng).to(device)

    return comparison(saved.build(device, dtype), tokens)


def attaching(model: PreTrainedModel, tokens: Callable[[int], Tensor]) -> Comparison:
    """The first and every further ``ContextPatcher(model)``."""
    ids = tokens(CHECKED)

    def attach(update: str, other: PreTrainedModel) -> None:
        ContextPatcher(other, update).detach()

    calls: dict[str, Callable[[], Any]] = {OWN: lambda: model(ids, use_cache=False)}
    for update in UPDATES:
        first = InTurn(functools.partial(attach, update), [twin(model) for _ in range(_TWINS)])
        again = functools.partial(attach, update, twin(model))
        calls |= {f"attaching, {update}": first, f"attaching again, {update}": again}
    return Comparison(ours=OWN, calls=calls, check=lambda name, result: None)


def computing(model: PreTrainedModel, tokens: Callable[[int], Tensor]) -> Comparison:
    """``compute`` of the kept tokens; each call gives their logits (1, 32, vocabulary)."""
    ids = tokens(CONTEXT + KEPT)
    context, kept = ids[:, :CONTEXT], ids[:, CONTEXT:]

    def own() -> Tensor:
        logits: Tensor = model(ids, use_cache=False, logits_to_keep=KEPT).logits
        return logits

    def compute(patcher: ContextPatcher) -> Tensor:
        logits = patcher.compute(context, kept).logits
        assert logits is not None
        return logits

    patchers = {update: ContextPatcher(twin(model), update) for update in UPDATES}
    calls: dict[str, Callable[[], Any]] = {OWN: own}
    calls |= {f"compute, {name}": functools.partial(compute, x) for name, x in patchers.items()}
    expected = own().double()
    return Comparison(
        ours=OWN,
        calls=calls,
        check=lambda name, logits: relative_error(logits, expected, _LIMITS[model.dtype]),
    )


def first_token(length: int, model: PreTrainedModel, tokens: Callable[[int], Tensor]) -> Comparison:
    """The first token of a generation; each call gives it (1,)."""
    ids = tokens(length)
    greedy: Any = {"max_new_tokens": 1, "do_sample": False}

    def own() -> Tensor:
        generate: Any = model.generate
        token: Tensor = generate(ids, attention_mask=torch.ones_like(ids), **greedy)[0, -1:]
        return token

    def step(patcher: ContextPatcher) -> Tensor:
        return next(iter(patcher.generate(ids, **greedy))).token_ids[0]

    patchers = {update: ContextPatcher(twin(model), update) for update in UPDATES}
    calls: dict[str, Callable[[], Any]] = {OWN: own}
    calls |= {f"generate, {name}": functools.partial(step, x) for name, x in patchers.items()}
    expected = own()

    def check(_name: str, token: Any) -> float:
        other = bool((token != expected).any())
        if other and model.dtype == torch.float32:
            raise AssertionError(
                f"expected the model's own token {expected.tolist()}, got {token.tolist()}"
            )
        return float(other)

    return Comparison(ours=OWN, calls=calls, check=check)
