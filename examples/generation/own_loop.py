"""Patched modules in a loop of one's own, without a patcher: the model sees one token, and its
weights hold the rest.

    python examples/generation/own_loop.py

A patcher computes the patch of every token once. After it is detached, ``PatchedLinear`` and
``PatchedRMSNorm`` take the places of the modules that a patch changes, and a plain loop runs the
model on the current token alone: no context, no cache.
"""

import sys

import torch
from torch import nn

from icl_patch import ContextPatch, ContextPatcher, PatchedLinear, PatchedRMSNorm, embedded


def patched_modules(model: nn.Module, patch: ContextPatch) -> dict[str, nn.Module]:
    """Put patched modules where the patch changes weights; returns them by path."""
    placed: dict[str, nn.Module] = {}
    for block in patch.blocks:
        spec = block.spec
        for name in (*spec.readers, spec.down, spec.post_norm):
            if name is None:
                continue
            holder, _, attribute = block.path_of(name).rpartition(".")
            base = model.get_submodule(block.path_of(name))
            if name == spec.post_norm:
                module: nn.Module = PatchedRMSNorm(
                    base, scale_offset=spec.scale_offset, cast_first=spec.cast_first
                )
            else:
                module = PatchedLinear(base)
            setattr(model.get_submodule(holder), attribute, module)
            placed[block.path_of(name)] = module
    return placed


def set_patch(placed: dict[str, nn.Module], patch: ContextPatch) -> None:
    """Hand every module its factors of a patch of one row and one token: u (1, N), v (1, K),
    new_scale (1, 1, n).
    """
    for block, factors in zip(patch.blocks, patch.layers, strict=True):
        spec = block.spec
        for name in spec.readers:
            placed[block.path_of(name)].set_patch(factors[f"{name}.u"][0], factors["readers.v"][0])
        placed[block.path_of(spec.down)].set_patch(
            factors[f"{spec.down}.u"][0], factors[f"{spec.down}.v"][0]
        )
        placed[block.path_of(spec.post_norm)].set_patch(factors[f"{spec.post_norm}.new_scale"])


@torch.no_grad()
def main() -> bool:
    """Returns whether the loop gives the same text as the model with the context."""
    model, tokenizer = embedded.load()
    prompt = embedded.held_out_prompts("recall", 1)[0]
    ids = tokenizer(prompt.context + prompt.question, return_tensors="pt")["input_ids"]
    with ContextPatcher(model, "stable") as patcher:
        patches = [step.patch for step in patcher.generate(ids, max_new_tokens=8)]
    placed = patched_modules(model, patches[0])
    token, said = ids[:, -1:], []
    for patch in patches:
        set_patch(placed, patch)
        logits = model(token, position_ids=patch.position_ids, use_cache=False).logits  # (1, 1, V)
        token = logits[:, -1].argmax(-1, keepdim=True)
        said.append(int(token))
    answer = tokenizer.decode(said, skip_special_tokens=True).split("\n")[0]
    print(
        f"{prompt.context!r} in the weights, {prompt.question!r} -> {answer!r}, expected"
        f" {prompt.answer!r}"
    )
    return answer == prompt.answer


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
