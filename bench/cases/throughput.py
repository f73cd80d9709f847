"""Patches a second, of one layer and one token each: computed, applied, and both.

`lazy` is ours with the stable update, `lazy, exact` with the exact one. `W + ΔW built` is Algorithm
1 with every changed weight built, one sequence and one token at a time. Computing runs a context of
16 tokens and 4 kept tokens with it and without it; applying runs the 4 kept tokens alone. The
models have random weights, layers of the named models' shapes, fewer of them, and a vocabulary of
1024. The error is the largest difference of the logits from those with the context, relative to the
largest.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.bench.baselines.algorithm1 import Algorithm1
from icl_patch.bench.cases.random_models import RandomModel, twin
from icl_patch.bench.harness import Case, Comparison, relative_error
from icl_patch.bench.results import Results
from icl_patch.bench.timing import Call

LAYERS, CONTEXT, KEPT = 4, 16, 4
MODELS = {
    model.name: model
    for model in (
        RandomModel("Gemma-3-1B", Gemma3TextConfig, 1152, 6912, LAYERS, 4, 1, 256, 1024),
        RandomModel("Llama-3-8B", LlamaConfig, 4096, 14336, LAYERS, 32, 8, 128, 1024),
        RandomModel("Qwen3-0.6B", Qwen3Config, 1024, 3072, LAYERS, 16, 8, 128, 1024),
        RandomModel("Gemma-3-4B", Gemma3TextConfig, 2560, 10240, LAYERS, 8, 4, 256, 1024),
        RandomModel("Gemma-3-12B", Gemma3TextConfig, 3840, 15360, LAYERS, 16, 8, 256, 1024),
        RandomModel("Gemma-3-27B", Gemma3TextConfig, 5376, 21504, LAYERS, 32, 16, 128, 1024),
        RandomModel("Llama-3-70B", LlamaConfig, 8192, 28672, LAYERS, 64, 8, 128, 1024),
    )
}
BATCHES = (1, 8, 32)
# the direct update divides by activations; bf16 weights round ΔW away
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.3}
WORK = ("computed", "applied", "both")


def cases(device: torch.device, quick: bool, results: Results) -> list[Case]:
    """Work by work for every model and batch; on a CPU the shapes of 0.1B models."""
    cpu = device.type == "cpu"
    names = (
        ("Gemma-3-1B", "Qwen3-0.6B")
        if cpu
        else ("Gemma-3-1B", "Llama-3-8B")
        if quick
        else tuple(MODELS)
    )
    batches = (1, 4) if cpu else (1, 8) if quick else BATCHES
    dtype = torch.float32 if cpu else torch.bfloat16
    found = []
    for name in names:
        for batch in batches:
            for work in WORK:
                title = (
                    f"{name} × {LAYERS} layers {str(dtype).removeprefix('torch.')} B={batch} {work}"
                )
                parameters: dict[str, str | int] = {"model": name, "batch": batch, "work": work}
                found.append(
                    Case(
                        title,
                        functools.partial(comparison, name, batch, work, dtype, device),
                        parameters,
                    )
                )
    return found


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model's patchers and what they are given; made once for all kinds of work."""

    patchers: dict[str, ContextPatcher]
    algorithm1: Algorithm1
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
        torch.randint(1024, (batch, length), generator=rng).to(device) for length in (CONTEXT, KEPT)
    )
    with torch.no_grad():
        expected = model(input_ids=torch.cat([context, kept], 1)).logits[:, CONTEXT:].double()
    patchers = {
        call: ContextPatcher(twin(model), update)
        for call, update in (("lazy", "stable"), ("lazy, exact", "exact"))
    }
    patches = {call: patcher.compute(context, kept) for call, patcher in patchers.items()}
    return Prepared(patchers, Algorithm1(model), patches, context, kept, expected)


def comparison(
    name: str, batch: int, work: str, dtype: torch.dtype, device: torch.device
) -> Comparison:
    """What is timed in one case."""
    found = prepared(name, batch, dtype, device)
    calls = {
        call: _lazy(patcher, found.patches[call], work, found.context)
        for call, patcher in found.patchers.items()
    }
    calls["W + ΔW built"] = _built(found, work)

    def check(call: str, result: Any) -> float:
        logits = (
            found.patchers[call].forward(found.kept, result)
            if isinstance(result, ContextPatch)
            else result
        )
        return relative_error(logits, found.expected[: len(logits)], TOLERANCE[dtype])

    layers = MODELS[name].layers
    return Comparison(
        ours="lazy",
        calls=calls,
        check=check,
        units={call: layers * KEPT * (1 if call == "W + ΔW built" else batch) for call in calls},
        unit="patches",
        most_seconds=4.0,
    )


def _lazy(patcher: ContextPatcher, patch: ContextPatch, work: str, context: Tensor) -> Call:
    """Through the public API."""
    kept = patch.kept_ids
    calls: dict[str, Call] = {
        "computed": lambda: patcher.compute(context, kept),
        "applied": lambda: patcher.forward(kept, patch),
        "both": lambda: patcher.forward(kept, patcher.compute(context, kept)),
    }
    return calls[work]


def _built(found: Prepared, work: str) -> Call:
    """Of the first row alone."""
    algorithm1, context, kept, patch = (
        found.algorithm1,
        found.context[:1],
        found.kept[:1],
        found.patches["lazy"],
    )

    def both() -> Tensor:
        algorithm1.compute(context, kept)
        return algorithm1.apply(patch)

    return {
        "computed": lambda: algorithm1.compute(context, kept),
        "applied": lambda: algorithm1.apply(patch),
        "both": both,
    }[work]
