"""``model.generate(custom_generate=...)`` with every token from freshly patched weights.

    python examples/generation/custom_generate.py [MODEL]

Sampling, stopping and the rest of the generation configuration are transformers' own. Without MODEL
it is the embedded one.
"""

import sys
from collections.abc import Sequence

import torch
from transformers import TextStreamer

from icl_patch import ContextPatcher, embedded
from icl_patch.evaluation.loading import load_model


def main(arguments: Sequence[str]) -> bool:
    """Returns whether the patched model gives the same text as the model."""
    model, tokenizer = load_model(
        arguments[0] if arguments else None, None, torch.float32, None, None
    )
    prompts = [
        prompt.context + prompt.question for prompt in embedded.held_out_prompts("language", 3)
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
        said = model.generate(
            **inputs,
            max_new_tokens=20,
            do_sample=False,
            custom_generate=patcher.decoding_method(mode="auto"),
        )
        one = tokenizer(prompts[0], return_tensors="pt")
        streamed = patcher.decoding_method(streamer=TextStreamer(tokenizer, skip_prompt=True))
        model.generate(
            **one, max_new_tokens=20, do_sample=True, temperature=0.7, custom_generate=streamed
        )
    for prompt, row in zip(
        prompts,
        tokenizer.batch_decode(said[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True),
        strict=True,
    ):
        print(f"{prompt!r} -> {row!r}")
    same = torch.equal(said, expected)
    print(f"the same tokens as without custom_generate: {same}")
    return same


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
