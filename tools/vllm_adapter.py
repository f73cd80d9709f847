"""Serve a static patch as a LoRA with vLLM, and compare its tokens and log-probabilities with ours.

    make vllm             # in an environment of its own, build/vllm; MODEL=FOLDER: another model
    build/python tools/vllm_adapter.py export FOLDER build/vllm-adapter
    build/vllm/bin/python tools/vllm_adapter.py serve FOLDER build/vllm-adapter

``export`` fits a small patch, writes its LoRA, and the greedy tokens of the model with it and
without it on some prompts. ``serve`` loads both into vLLM and sends all prompts in one batch, each
with the LoRA and without it. The exit status is 0 if all tokens are the same and no log-probability
is more than 1e-3 off.

``max_loras`` is 2: with 1, vLLM gives the LoRA to requests without one in the same batch, too
(vllm #48421, #49656).
"""

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

SYSTEM = "You are a friendly pirate. Talk like a pirate."
QUESTIONS = (
    "What is the sun?",
    "How do I make tea?",
    "Why do cats sleep so much?",
    "Tell me about the sea.",
    "What should I eat today?",
    "How are you?",
    "Who wrote this book?",
    "What is a good name for a dog?",
    "How far is the moon?",
    "What do you like most?",
)
NEW_TOKENS, STEPS, LIMIT = 16, 20, 1e-3


def export(model_folder: str, folder: Path) -> None:
    """Write the LoRA and our answers."""
    import torch

    from icl_patch import static
    from icl_patch.evaluation.loading import load_model
    from icl_patch.static.answers import greedy

    model, tokenizer = load_model(model_folder, dtype=torch.float32)
    examples = static.examples(model, tokenizer, QUESTIONS, system=SYSTEM)
    patch = static.fit(
        model,
        examples,
        tokenizer=tokenizer,
        max_new_tokens=NEW_TOKENS,
        distillation=static.Distillation(steps=STEPS),
    )
    print(patch.report)
    patch.to_peft(folder / "lora", model)

    @torch.no_grad()
    def answer(prompt: Sequence[int]) -> dict[str, Any]:
        (tokens,) = greedy(model, [tuple(prompt)], NEW_TOKENS)
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        chosen = logits.log_softmax(-1)[range(len(tokens)), list(tokens)]
        return {"prompt": prompt, "tokens": tokens, "logprobs": chosen.tolist()}

    answers = []
    for example in examples:
        answers.append(answer(example.without) | {"patched": False})
        with patch.applied(model):
            answers.append(answer(example.without) | {"patched": True})
    (folder / "expected.json").write_text(json.dumps(answers))


def serve(model_folder: str, folder: Path) -> bool:
    """Whether vLLM gives the same."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    # with and without the LoRA in turn, so that both share every batch
    expected = json.loads((folder / "expected.json").read_text())
    engine = LLM(
        model_folder,
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        max_model_len=256,
        enforce_eager=True,
    )
    lora = LoRARequest("patch", 1, str((folder / "lora").resolve()))
    got = engine.generate(
        [{"prompt_token_ids": answer["prompt"]} for answer in expected],
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=1),
        lora_request=[lora if answer["patched"] else None for answer in expected],
    )
    same, errors = 0, []
    for answer, output in zip(expected, got, strict=True):
        out = output.outputs[0]
        tokens = list(out.token_ids)
        same += tokens == answer["tokens"]
        chosen = [step[token].logprob for step, token in zip(out.logprobs, tokens, strict=True)]
        pairs = zip(chosen, answer["logprobs"], strict=False)
        errors += [abs(own - ours) for own, ours in pairs]
    plain, patched = expected[::2], expected[1::2]
    result = {
        "model": Path(model_folder).name,
        "vllm": version("vllm-cpu"),
        "answers": len(expected),
        "same_tokens": same,
        "logprob_error": max(errors),
        "changed": sum(a["tokens"] != b["tokens"] for a, b in zip(plain, patched, strict=True)),
    }
    text = json.dumps(result, indent=2) + "\n"
    (folder / "result.json").write_text(text)
    print(text, end="")
    near = all(error <= LIMIT for error in errors)  # which NaN is not
    return same == len(expected) and near and result["changed"] > 0


if __name__ == "__main__":
    half, chosen, given = sys.argv[1:]
    if half == "export":
        Path(given).mkdir(parents=True, exist_ok=True)
        export(chosen, Path(given))
    else:
        sys.exit(not serve(chosen, Path(given)))
