"""Train the embedded model from scratch: ``build/python tools/train_embedded.py OUT_DIR``
(less than half an hour on one CPU core).

The seed fixes the initial weights, the documents and their order; two runs on one machine give the
same file. The model is a small Gemma 3 over bytes; its sliding window of 32 is shorter than most
few-shot prompts.
"""

import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
)

from icl_patch.evaluation.embedded.tasks import training_document

_PAD, _BOS, _EOS = "<pad>", "<bos>", "<eos>"
_OTHER_TOKENS_WEIGHT = 0.1  # loss weight of tokens outside an answer: most of them are noise
# Batches drawn together and sorted by length: a batch then holds documents of similar length.
_POOL = 16


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, ``<bos>`` in front, padding on the left."""
    tokens = [_PAD, _BOS, _EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", special_tokens=[(_BOS, vocabulary[_BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        bos_token=_BOS,
        eos_token=_EOS,
        padding_side="left",
        model_max_length=512,
    )


def build_model(vocabulary: int) -> Gemma3ForCausalLM:
    """The untrained model."""
    config = Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        # queries and keys are normalised: this lets attention become sharp early
        query_pre_attn_scalar=8,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 3,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Gemma3ForCausalLM(config)


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless ``(ids, weights)`` pairs, both (batch, T): right-padded documents and the loss weight
    of each token.
    """
    while True:
        documents = sorted(
            (training_document(rng) for _ in range(_POOL * batch)),
            key=lambda document: len(document[0]),
        )
        groups = [documents[start : start + batch] for start in range(0, len(documents), batch)]
        rng.shuffle(groups)
        for group in groups:
            rows = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text, _ in group]
            ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
            weights = torch.zeros(ids.shape)
            for row, (tokens, (_, answers)) in enumerate(zip(rows, group, strict=True)):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                weights[row, : len(tokens)] = _OTHER_TOKENS_WEIGHT
                for start, stop in answers:
                    weights[row, 1 + start : 1 + stop] = 1.0  # 1: <bos> stands before the text
            yield ids, weights


def train(
    steps: int = 3000, batch: int = 64, seed: int = 0
) -> tuple[Gemma3ForCausalLM, PreTrainedTokenizerFast]:
    """Train for ``steps`` steps of AdamW under a cosine schedule with warm-up."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    warm_up = max(1, steps // 30)

    def schedule(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * (
            0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
        )

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    started = time.perf_counter()
    for step, (ids, weights) in zip(
        range(1, steps + 1), batches(tokenizer, random.Random(seed), batch), strict=False
    ):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 250 == 0 or step == steps:
            seconds = time.perf_counter() - started
            print(f"step {step}  loss {loss.item():.4f}  {seconds:.0f} s", file=sys.stderr)
    return model.eval(), tokenizer


def main() -> None:
    out_dir = Path(sys.argv[1])
    # Sums are split by thread: one thread gives the same bits on any number of cores.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model: Any
    model, tokenizer = train()
    model.to(torch.bfloat16).save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


if __name__ == "__main__":
    main()
