"""One patch, from a file, applied to every token of an ordinary ``model.generate``.

    python examples/generation/static_patch.py

A patch is computed for one token, and is exact for that token after its history. This script
applies it to all tokens, like a LoRA, and prints the model's text without the context. The text
shows how much of the context one token's patch holds.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from icl_patch import ContextPatch, ContextPatcher, embedded


@torch.no_grad()
def main() -> bool:
    """Returns whether the model with the patch, on its own token, gave the logits it gives with the
    context.
    """
    model, tokenizer = embedded.load()
    prompt = embedded.held_out_prompts("format", 1)[0]

    def ids(text: str) -> Tensor:
        return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]

    def answer(of: torch.nn.Module, text: str) -> str:
        said = of.generate(
            ids(text), attention_mask=torch.ones_like(ids(text)), max_new_tokens=12, do_sample=False
        )
        return str(
            tokenizer.decode(said[0, ids(text).shape[1] :], skip_special_tokens=True).split("\n")[0]
        )

    text = prompt.context + prompt.question
    with tempfile.TemporaryDirectory() as folder, ContextPatcher(model, "stable") as patcher:
        path = Path(folder) / "patch.safetensors"
        patcher.compute(ids(text)[:, :-1], ids(text)[:, -1:]).save(path)
        patch = ContextPatch.load(path, model)
        with_context = model(ids(text)).logits[:, -1]
        plain = {
            "with the context": answer(model, text),
            "without it": answer(model, prompt.question),
        }
        with patcher.applied(patch) as changed:
            plain["without it, with one token's patch"] = answer(changed, prompt.question)
            alone = changed(
                patch.kept_ids, position_ids=patch.position_ids, use_cache=False
            ).logits[:, -1]
    print(f"{prompt.context!r}, {prompt.question!r}, expected {prompt.answer!r}")
    for name, said in plain.items():
        print(f"  {name}: {said!r}")
    error = float((alone - with_context).abs().max() / with_context.abs().max())
    print(
        f"on its own token the patch gives the logits of the context within {error:.1e} of the"
        " largest"
    )
    return error <= 1e-4


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
