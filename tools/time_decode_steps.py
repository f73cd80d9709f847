"""Time decode steps of the installed package, and print the seconds of a step in each mode as JSON.

``tools/bench_compare.py`` runs this file with the packages of two commits. It therefore uses public
names only.

- ``plain``: the model's own step. ``replay``: the current token with a given patch, no context.
- ``two_pass``: the exact update in the model's own arithmetic. ``exact``: in one pass, in the
  batch-invariant one. ``two_stream``, ``shared_cache``: the stable update over one cache
  for each stream, and over one for both. ``compiled``: the latter with a compiled step.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import icl_patch
from icl_patch import ContextPatcher

MODES = ("plain", "exact", "two_pass", "two_stream", "shared_cache", "compiled", "replay")
# hidden, inner, layers, heads, width of a head, vocabulary. "large" is the model of `icl_patch
# bench generation` on a CPU, 0.22B. Python code takes a larger share of a step of "small", and most
# of "tiny".
SIZES = {
    "tiny": (32, 48, 2, 2, 16, 97),
    "small": (512, 1536, 8, 8, 64, 8192),
    "large": (1024, 3072, 12, 16, 128, 32000),
}
WARM_UP = 5  # steps; a compiled step is made at the first two


def build_model(size: str) -> PreTrainedModel:
    """A random Qwen3 with matrices of unit gain, so that a context changes the logits."""
    hidden, inner, layers, heads, width, vocabulary = SIZES[size]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


def plain_steps(model: PreTrainedModel, ids: Tensor) -> Iterator[object]:
    """The model's own greedy decode steps, over its own cache."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
    token = ids[:, -1:]
    while True:
        token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        yield token


def attach(model: PreTrainedModel, mode: str) -> ContextPatcher:
    """A patcher with the update of a mode."""
    return ContextPatcher(model, "exact" if mode in ("exact", "two_pass") else "stable")


def patched_steps(patcher: ContextPatcher, mode: str, ids: Tensor, count: int) -> Iterator[object]:
    """Decode steps of the package: generated tokens, or one token replayed again and again."""
    if mode != "replay":
        cache = "shared_cache" if mode in ("compiled", "exact") else mode
        options = {"mode": cache, "compile": mode == "compiled"}
        return iter(patcher.generate(ids, max_new_tokens=count, **options))
    kept = ids[:, -1:]
    patch = patcher.compute(ids[:, :-1], kept)
    return (patcher.forward(kept, patch) for _ in range(count))


def step_seconds(steps: Iterator[object], count: int) -> float:
    """The lower quartile of the seconds of ``count`` steps after the first ones, which warm up.

    Interruptions only add to a step's time: the median would move with the machine's load.
    """
    for _ in range(WARM_UP):
        next(steps)
    samples = []
    for _ in range(count):
        begun = time.perf_counter()
        next(steps)
        samples.append(time.perf_counter() - begun)
    return statistics.quantiles(samples, n=4)[0]


@torch.no_grad()
def measure(size: str, modes: list[str], shape: tuple[int, int], steps: int) -> dict[str, float]:
    """The seconds of a step in each mode, after a context of ``shape`` (rows, tokens)."""
    model = build_model(size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SIZES[size][-1], shape, generator=generator)
    found = {}
    for mode in modes:
        if mode == "plain":
            found[mode] = step_seconds(plain_steps(model, ids), steps)
            continue
        with attach(model, mode) as patcher:
            found[mode] = step_seconds(patched_steps(patcher, mode, ids, WARM_UP + steps), steps)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print one JSON object: the package that was timed, and the seconds by mode."""
    parser = argparse.ArgumentParser(description="Time decode steps of the installed package.")
    parser.add_argument("--modes", nargs="+", choices=MODES, required=True)
    parser.add_argument("--size", choices=SIZES, required=True, help="of the model")
    parser.add_argument("--rows", type=int, required=True, help="of the batch")
    parser.add_argument("--context", type=int, required=True, help="tokens of the context")
    parser.add_argument("--steps", type=int, required=True, help="timed steps of a mode")
    parser.add_argument("--threads", type=int, required=True, help="of the CPU")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    context = (options.rows, options.context)
    seconds = measure(options.size, options.modes, context, options.steps)
    print(json.dumps({"package": icl_patch.__file__, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
