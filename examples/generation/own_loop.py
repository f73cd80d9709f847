"""A loop of one's own: the model's forward on one token, and the context in its weights.

    python examples/generation/own_loop.py [MODEL]

``generate`` yields a patch for every step. The second loop takes them one by one: it runs the model
on the current token alone, without a context and without a cache. ``applied`` sets each factor of
the patch in its module, whatever the block's form. MODEL is a folder or a hub id; by default it is
the embedded model.
"""

import sys

import torch
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import ContextPatcher
from icl_patch.evaluation.loading import default_context, load_model

PROMPT = "Italy: Rome\nFrance: Paris\nJapan: Tokyo\nEgypt:"
NEW_TOKENS = 8


@torch.no_grad()
def own_loop(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The tokens (1, N) that follow a prompt (1, T), from the current token and its weights."""
    with ContextPatcher(model, "stable") as patcher:
        steps = list(patcher.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False))
        token, found = ids[:, -1:], []
        for step in steps:
            with patcher.applied(step.patch, token=None) as changed:
                position = step.patch.position_ids
                logits = changed(token, position_ids=position, use_cache=False).logits  # (1, 1, V)
            token = logits[:, -1].argmax(-1, keepdim=True)
            found.append(token)
    return torch.cat(found, 1)


def main(name: str | None = None) -> bool:
    """Returns whether the loop gives the same tokens as the model with the context."""
    model, tokenizer = load_model(name)
    text = default_context(model) if name is None else PROMPT
    prompt = tokenizer(text, return_tensors="pt")
    ids = prompt["input_ids"]
    expected = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = expected[:, ids.shape[1] :]
    found = own_loop(model, ids)
    print(f"{text!r} in the weights -> {tokenizer.decode(found[0])!r}")
    return torch.equal(found, expected)


if __name__ == "__main__":
    sys.exit(0 if main(*sys.argv[1:]) else 1)
