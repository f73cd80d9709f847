"""Patches a second, of one layer and one token each: computed, applied, and both.

`lazy` is ours with the stable update, `lazy, exact` with the exact one. `W + ΔW built` is Algorithm
1 with every changed weight built, one sequence and one token at a time. Computing runs a context of
16 tokens and 4 kept tokens with it and without it; applying runs the 4 kept tokens alone. The
models have random weights, layers of the named models' shapes, fewer of them, and a vocabulary of
1024. The error is the largest difference of the logits from those with the context, relative to the
largest.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedModel

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.bench.baselines.materialised import algorithm_1_logits, applied_logits
from icl_patch.bench.cases.models import GPU_SHAPES, RandomModel, twin
from icl_patch.bench.harness import Case, Comparison, dtype_name, relative_error

LAYERS, CONTEXT, KEPT, VOCABULARY = 4, 16, 4, 1024
BUILT = "W + ΔW built"
_QWEN, _GEMMA_1B, _, _, _GEMMA_4B = GPU_SHAPES
MODELS = {
    model.name: replace(model, layers=LAYERS, vocabulary=VOCABULARY)
    for model in (
        _GEMMA_1B,
        RandomModel("Llama-3-8B", LlamaConfig, 4096, 14336, 32, 32, 8, 128, 128256),
        _QWEN,
        _GEMMA_4B,
        RandomModel("Gemma-3-12B", Gemma3TextConfig, 3840, 15360, 48, 16, 8, 256, 262208, 1024),
        RandomModel("Gemma-3-27B", Gemma3TextConfig, 5376, 21504, 62, 32, 16, 128, 262208, 1024),
        RandomModel("Llama-3-70B", LlamaConfig, 8192, 28672, 80, 64, 8, 128, 128256),
    )
}
# the direct update divides by activations; bf16 weights round ΔW away
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.3}
WORK = ("computed", "applied", "both")


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Work by work for every model and batch; on a CPU the shapes of 0.1B models."""
    names, batches, dtype = list(MODELS), [1, 8, 32], torch.bfloat16
    if device.type == "cpu":
        names, batches, dtype = ["Gemma-3-1B", "Qwen3-0.6B"], [1, 4], torch.float32
    elif quick:
        names, batches = names[:2], batches[:2]
    return [
        Case(
            f"{name} × {LAYERS} layers {dtype_name(dtype)} B={batch} {work}",
            functools.partial(comparison, name, batch, work, dtype, device),
            {"model": name, "batch": batch, "work": work},
        )
        for name, batch, work in itertools.product(names, batches, WORK)
    ]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model, its patchers by call, and their inputs; shared by all kinds of work."""

    model: PreTrainedModel
    patchers: dict[str, ContextPatcher]
    patches: dict[str, ContextPatch]
    context: Tensor
    kept: Tensor
    expected: Tensor


@functools.lru_cache(maxsize=1)
def prepared(name: str, batch: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    """Patchers on one model's weights, random tokens, and the logits with the context."""
    model = MODELS[name].build(device, dtype)
    rng = torch.Generator().manual_seed(1)
    context, kept = (
        torch.randint(VOCABULARY, (batch, length), generator=rng).to(device)
        for length in (CONTEXT, KEPT)
    )
    with torch.no_grad():
        expected = model(input_ids=torch.cat([context, kept], 1)).logits[:, CONTEXT:].double()
    patchers = {
        call: ContextPatcher(twin(model), update)
        for call, update in (("lazy", "stable"), ("lazy, exact", "exact"))
    }
    patches = {call: patcher.compute(context, kept) for call, patcher in patchers.items()}
    return Prepared(model, patchers, patches, context, kept, expected)


def comparison(
    name: str, batch: int, work: str, dtype: torch.dtype, device: torch.device
) -> Comparison:
    """The calls of one case."""
    shared = prepared(name, batch, dtype, device)
    context, kept = shared.context, shared.kept
    steps: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {}
    for call, patcher in shared.patchers.items():
        steps[call] = (
            functools.partial(patcher.compute, context, kept),
            functools.partial(patcher.forward, kept),
        )
    blocks = shared.patchers["lazy"].attached_model.block_specs
    steps[BUILT] = (
        lambda: algorithm_1_logits(shared.model, blocks, context[:1], kept[:1]),
        lambda _: applied_logits(shared.model, shared.patches["lazy"]),
    )

    def run(call: str) -> Any:
        compute, apply = steps[call]
        patch = shared.patches.get(call) if work == "applied" else compute()
        return patch if work == "computed" else apply(patch)

    def check(call: str, result: Any) -> float:
        logits = (
            shared.patchers[call].forward(kept, result)
            if isinstance(result, ContextPatch)
            else result
        )
        return relative_error(logits, shared.expected[: len(logits)], TOLERANCE[dtype])

    layers = MODELS[name].layers
    return Comparison(
        ours="lazy",
        calls={call: functools.partial(run, call) for call in steps},
        check=check,
        units={call: layers * KEPT * (1 if call == BUILT else batch) for call in steps},
        unit="patches",
    )
