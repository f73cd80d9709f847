"""Score a model on the held-out prompts: whole answers right, with the context and without it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.evaluation.embedded.tasks import ANSWER_END, CHANCE, KINDS, Prompt, held_out_prompts
from icl_patch.evaluation.loading import encode_contexts

# In bytes, line end included: "quattro quattro quattro" is the longest held-out answer.
LONGEST_ANSWER = 26


@dataclass(frozen=True)
class KindScore:
    """Shares of whole answers right for one kind of task."""

    prompts: int
    with_context: float
    without_context: float
    chance: float


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[str]:
    """The model's greedy continuation of each text, up to the end of its line."""
    ids, mask = encode_contexts(tokenizer, texts)
    generate: Any = model.generate
    with torch.inference_mode():
        out = generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device).long(),
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
        )
    return decode_answers(tokenizer, out[:, ids.shape[1] :])


def decode_answers(tokenizer: PreTrainedTokenizerBase, generated: Tensor) -> list[str]:
    """Generated ids (B, T) as text, up to the first line end or end of sequence."""
    answers = []
    for row in generated.tolist():
        kept = row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row
        answers.append(
            str(tokenizer.decode(kept, skip_special_tokens=True)).split(ANSWER_END, 1)[0]
        )
    return answers


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts_per_kind: int = 200
) -> dict[str, KindScore]:
    """Whole answers right on held-out prompts, with and without the context, by kind."""

    def share(prompts: list[Prompt], texts: list[str]) -> float:
        pairs = zip(answers(model, tokenizer, texts), prompts, strict=True)
        return sum(answer == prompt.answer for answer, prompt in pairs) / len(prompts)

    scores = {}
    for kind in KINDS:
        prompts = held_out_prompts(kind, prompts_per_kind)
        scores[kind] = KindScore(
            prompts=len(prompts),
            with_context=share(prompts, [prompt.context + prompt.question for prompt in prompts]),
            without_context=share(prompts, [prompt.question for prompt in prompts]),
            chance=CHANCE[kind],
        )
    return scores
