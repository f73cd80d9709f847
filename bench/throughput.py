"""Patches a second, of one layer and one token each: computed, applied, and both, against weights
that are built.

`lazy` is ours with the stable update, `lazy, exact` with the exact one. `W + ΔW built` is Algorithm
1 with every changed weight built, one sequence and one token at a time. Computing runs a context of
16 tokens and 4 kept tokens with it and without; applying runs the 4 kept tokens alone. Random
models with the layers of the named ones, fewer of them, and a vocabulary of 1024. The error is the
largest difference of the logits from those with the context, relative to the largest.
"""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.bench.harness import Call, Case, Comparison
from icl_patch.bench.linear import relative_error
from icl_patch.bench.naive import Naive
from icl_patch.bench.results import Results

# Family, width, inner width, query heads, key-value heads, size of a head.
MODELS: dict[str, tuple[type[PreTrainedConfig], int, int, int, int, int]] = {
    "Gemma-3-1B": (Gemma3TextConfig, 1152, 6912, 4, 1, 256),
    "Llama-3-8B": (LlamaConfig, 4096, 14336, 32, 8, 128),
    "Qwen3-0.6B": (Qwen3Config, 1024, 3072, 16, 8, 128),
    "Gemma-3-4B": (Gemma3TextConfig, 2560, 10240, 8, 4, 256),
    "Gemma-3-12B": (Gemma3TextConfig, 3840, 15360, 16, 8, 256),
    "Gemma-3-27B": (Gemma3TextConfig, 5376, 21504, 32, 16, 128),
    "Llama-3-70B": (LlamaConfig, 8192, 28672, 64, 8, 128),
}
LAYERS, CONTEXT, KEPT = 4, 16, 4
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


@functools.lru_cache(maxsize=1)
def model_of(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A random model with the named model's layers."""
    kind, width, inner, heads, key_value_heads, head = MODELS[name]
    config = kind(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **({"query_pre_attn_scalar": head} if kind is Gemma3TextConfig else {}),
    )
    with torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for path, parameter in model.named_parameters():
            if "norm" in path:
                nn.init.normal_(parameter, 0.0 if kind is Gemma3TextConfig else 1.0, 0.3)
            elif "embed" not in path:
                nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model's patchers and what they are given; made once for all kinds of work."""

    patchers: dict[str, ContextPatcher]
    naive: Naive
    patches: dict[str, ContextPatch]
    context: Tensor
    kept: Tensor
    expected: Tensor


@functools.lru_cache(maxsize=1)
def prepared(name: str, batch: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    """Patchers on one model's weights, random tokens, and the logits with the context."""
    model = model_of(name, dtype, device)
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
    return Prepared(patchers, Naive(model), patches, context, kept, expected)


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

    return Comparison(
        ours="lazy",
        calls=calls,
        check=check,
        units={call: LAYERS * KEPT * (1 if call == "W + ΔW built" else batch) for call in calls},
        unit="patches",
        most_seconds=4.0,
    )


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Another model on the same weights, for another patcher."""
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, weights)


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
    naive, context, kept, patch = (
        found.naive,
        found.context[:1],
        found.kept[:1],
        found.patches["lazy"],
    )

    def both() -> Tensor:
        naive.compute(context, kept)
        return naive.apply(patch)

    return {
        "computed": lambda: naive.compute(context, kept),
        "applied": lambda: naive.apply(patch),
        "both": both,
    }[work]
