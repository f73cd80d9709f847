"""A second model for the evaluation of static patches: a small Llama over bytes, trained on the
format and language tasks of the embedded model and on bare questions.

    python examples/static/llama_model.py build/static-llama   # some minutes on one core

A fifth of its documents has no context: there the answer is in English, or the word itself. So
without a context this model has an answer of its own, which a patch must overcome. It does not
learn ``flip``, which the evaluation leaves out. Two runs on one machine give the same weights.
"""

import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from icl_patch.evaluation.embedded import tasks
from icl_patch.evaluation.embedded.train import build_tokenizer, padded

FOLDER = Path(__file__).parents[2] / "build" / "static-llama"
STEPS, BATCH, LEARNING_RATE = 1200, 32, 3e-3
_BARE = {
    "format": "mode same\n",
    "language": "say english\n",
}  # the contexts that bare questions leave out
_BARE_SHARE = 0.2


def document(rng: random.Random) -> tuple[str, list[tuple[int, int]]]:
    """A text and the (start, stop) spans of its answers, line ends included."""
    kind, bare = rng.choice(list(_BARE)), rng.random() < _BARE_SHARE
    while True:
        context, pairs = tasks.document(kind, rng, held_out=False, questions=4)
        if not bare or context == _BARE[kind]:
            break
    return tasks.with_answers("" if bare else context, pairs)


def batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Right-padded ids (B, T) and whether a token belongs to an answer."""
    documents = [document(rng) for _ in range(BATCH)]
    rows = [tokenizer.encode(text) for text, _ in documents]
    return padded(rows, [spans for _, spans in documents])


@torch.enable_grad()
def train() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """AdamW on the answers' tokens, under a cosine schedule with a warm-up."""
    torch.manual_seed(0)
    tokenizer, rng = build_tokenizer(), random.Random(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    began = time.perf_counter()
    for step in range(STEPS):
        ids, answers = batch(tokenizer, rng)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits[answers[:, 1:]], ids[:, 1:][answers[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 40) * cosine
        optimizer.step()
        if step % 100 == 0:
            seconds = time.perf_counter() - began
            print(f"step {step} of {STEPS}: loss {loss.item():.4f}, {seconds:.0f} s", flush=True)
    return model.eval(), tokenizer


def main(arguments: Sequence[str]) -> None:
    """Train, and write the model with its tokenizer."""
    folder = Path(arguments[0]) if arguments else FOLDER
    torch.set_num_threads(1)
    model, tokenizer = train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
