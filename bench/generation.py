"""A decode step that recomputes and applies every layer's patch, beside the model's own step and the ways it is done otherwise.

Random weights of the shape that is named; one token a row after a context of random tokens, eagerly. `fast` keeps one cache for both
streams, `two streams` stacks them; `exact` takes two passes. `replay` runs the current token alone with a patch that is there already.
`W + ΔW built` is Algorithm 1 with materialised matrices, row after row; the arithmetic of its update is not counted. The error is that of
the logits against the plain step's. Not among them: the compiled step with a static cache, and PEFT.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.bench.harness import Case, Comparison
from icl_patch.bench.linear import relative_error
from icl_patch.bench.results import Results
from icl_patch.bench.throughput import twin
from icl_patch.decoding import Way, decode_one_token, prefill
from icl_patch.generation import History

PLAIN = "plain step"
_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.15}


@dataclass(frozen=True)
class Shape:
    """A Qwen3-like model: its name and what its configuration says."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    vocabulary: int

    def build(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """Random weights, seeded."""
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            head_dim=128,
            max_position_embeddings=16384,
            tie_word_embeddings=True,
        )
        with torch.device(device):
            return Qwen3ForCausalLM(config).to(dtype).eval()


_SMALL = Shape("0.22B", 1024, 3072, 12, 16, 32000)
_QWEN = Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 151936)
Step = Callable[[], Tensor]


def cases(device: torch.device, quick: bool, results: Results) -> list[Case]:
    """Context by context for every batch, the papers' protocol in between first; on a CPU a model of 0.2B."""
    cpu = device.type == "cpu"
    dtype, shape = (torch.float32, _SMALL) if cpu else (torch.bfloat16, _QWEN)
    contexts = (256,) if quick else (256, 16, 1024) if cpu else (1024, 16, 256, 8192)
    found = []
    for batch in (1, 4) if cpu or quick else (1, 8, 4, 32):
        for context in contexts:
            title = f"{shape.name} {str(dtype).removeprefix('torch.')} B={batch} context={context}"
            parameters: dict[str, str | int] = {"model": shape.name, "batch": batch, "context": context}
            found.append(Case(title, functools.partial(comparison, shape, batch, context, dtype, device), parameters))
    return found


@functools.lru_cache(maxsize=1)
def _models(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, ContextPatcher, ContextPatcher]:
    """The model, untouched, and patchers on its weights."""
    model = shape.build(device, dtype).requires_grad_(False)
    return model, ContextPatcher(twin(model), "stable"), ContextPatcher(twin(model), "exact")


@torch.no_grad()
def comparison(shape: Shape, batch: int, context: int, dtype: torch.dtype, device: torch.device) -> Comparison:
    """What is timed in one case."""
    model, stable, exact = _models(shape, dtype, device)
    ids = torch.randint(0, 1000, (batch, context), generator=torch.Generator().manual_seed(context)).to(device)
    plain = _plain(model, ids)
    expected = plain().double()
    patch = decode_one_token(_state(stable, ids, Way.STACKED), ids[:, -1]).make_patch()
    calls: dict[str, Step] = {
        "recompute and apply, fast": _ours(stable, ids, Way.FOLDED),
        "recompute and apply, two streams": _ours(stable, ids, Way.STACKED),
        "recompute and apply, exact": _exact(exact, ids),
        "replay of a given patch": lambda: stable.forward(patch.kept_ids, patch)[:, -1],
        PLAIN: plain,
        "W + ΔW built, with a cache": _naive(model, ids, patch, plain),
        "W + ΔW built, Algorithm 1 without a cache": _without_cache(model, ids, patch),
    }
    return Comparison(
        ours="recompute and apply, fast",
        calls={name: torch.no_grad()(call) for name, call in calls.items()},
        check=lambda _name, logits: relative_error(logits, expected, _LIMIT[dtype]),
        units=dict.fromkeys(calls, batch),
        unit="tokens",
        most_seconds=6.0,
    )


def _plain(model: PreTrainedModel, ids: Tensor) -> Step:
    """The model's own cached step; the cache is cut back to the context, so that every call is the same."""
    cache = DynamicCache(config=model.config)
    run: Any = model
    run(ids[:, :-1], past_key_values=cache, logits_to_keep=1)

    def step() -> Tensor:
        logits: Tensor = run(ids[:, -1:], past_key_values=cache, logits_to_keep=1).logits[:, -1]
        cache.crop(-1)
        return logits

    return step


def _state(patcher: ContextPatcher, ids: Tensor, way: Way) -> Any:
    return prefill(patcher, ids, torch.ones_like(ids, dtype=torch.bool), ids.shape[1] + 1, way)


def _ours(patcher: ContextPatcher, ids: Tensor, way: Way) -> Step:
    state = _state(patcher, ids, way)

    def step() -> Tensor:
        logits = decode_one_token(state, ids[:, -1]).logits
        state.cache.crop(-1)
        state.length, state.positions = state.length - 1, state.positions - 1
        return logits

    return step


def _exact(patcher: ContextPatcher, ids: Tensor) -> Step:
    history = History(patcher, ids, None)

    def step() -> Tensor:
        logits = history.step().reduced_logits[:, -1]
        history._cache.crop(-1)
        return logits

    return step


@contextmanager
def _materialised(model: nn.Module, patch: ContextPatch) -> Iterator[None]:
    """Within this context every changed matrix is ``W + u vᵀ`` of the first row, built now."""
    before: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for block, factors in zip(patch.blocks, patch.layers, strict=True):
            for name in (*block.form.readers, str(block.form.down)):
                weight: Any = model.get_submodule(block.path_of(name)).weight
                v = factors[f"{name}.v" if f"{name}.v" in factors else "readers.v"][0, 0]
                before.append((weight, weight.data))
                weight.data = torch.addr(weight.data, factors[f"{name}.u"][0, 0].to(weight.dtype), v.to(weight.dtype))
        yield
    finally:
        for weight, data in reversed(before):
            weight.data = data


def _alone(model: PreTrainedModel, ids: Tensor, patch: ContextPatch) -> Tensor:
    """Every row's token with its own materialised weights, one row after the other."""
    run: Any = model
    rows = []
    for row in range(len(ids)):
        with _materialised(model, patch.select(rows=slice(row, row + 1))):
            token = ids[row : row + 1, -1:]
            rows.append(run(token, position_ids=patch.position_ids[row : row + 1], use_cache=False).logits[:, -1])
    return torch.cat(rows)


def _naive(model: PreTrainedModel, ids: Tensor, patch: ContextPatch, plain: Step) -> Step:
    """A context step, every matrix materialised, a reduced step; the update's own arithmetic is not counted."""

    def step() -> Tensor:
        plain()
        return _alone(model, ids, patch)

    return step


def _without_cache(model: PreTrainedModel, ids: Tensor, patch: ContextPatch) -> Step:
    run: Any = model

    def step() -> Tensor:
        run(ids, use_cache=False, logits_to_keep=1)
        return _alone(model, ids, patch)

    return step
