"""The model's own answers to questions with their context. A fit trains a patch to give them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from icl_patch.layers.device_hooks import input_device
from icl_patch.models.ends import configured_ends
from icl_patch.models.language_model import check_length
from icl_patch.models.positions import switch_lengths
from icl_patch.models.prompts import Tokens, padded
from icl_patch.static.examples import Example, batches, check_row

Answers = dict[tuple[Tokens, Tokens, int], Tokens]
"""Answers of one model by prompt, the ids that end an answer, and the most tokens of one."""

_TIMED = 4  # tokens of the first batch, after which the time of all answers is estimated


class _Estimate(StoppingCriteria):
    """Estimates after a few tokens how long all answers take at most.

    It adds the time of the first token and of each later one, in proportion to the questions.

    share: the part of all questions that is in the timed batch.
    """

    def __init__(
        self, count: int, share: float, max_new_tokens: int, say: Callable[[str], None]
    ) -> None:
        self.count, self.share, self.tokens, self.say = count, share, max_new_tokens, say
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Stops no row."""
        self.times.append(time.perf_counter())
        if len(self.times) == _TIMED + 1:
            began, first, *_, last = self.times
            token = (last - first) / (_TIMED - 1)
            seconds = (first - began + (self.tokens - 1) * token) / self.share
            self.say(
                f"the model answers {self.count} question{'s' * (self.count > 1)} with at most"
                f" {self.tokens} tokens, in {seconds:.0f} s or less"
            )
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def answered(
    model: PreTrainedModel,
    examples: Sequence[Example],
    max_new_tokens: int = 64,
    known: Answers | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Example]:
    """The examples, with the model's own greedy answers for those that have none.

    Args:
        known: answers that the model has given before; new answers are added, batch by batch.
        say: called with a line about the time for the answers, once it can be estimated.

    Raises:
        ValueError: ids are not in the vocabulary; there are more tokens than positions; or the same
            prompt without its context has different answers, which no single patch can give.
    """
    known = {} if known is None else known

    def key(example: Example) -> tuple[Tokens, Tokens, int]:
        return example.with_context, tuple(ends_of(model, example.end)), max_new_tokens

    found = [x if x.answer else replace(x, answer=known.get(key(x))) for x in examples]
    asked = [i for i, example in enumerate(found) if example.answer is None]
    for example in found:
        new = 0 if example.answer else max_new_tokens
        for prompt in (example.with_context, example.without):
            check_row(model, (*prompt, *(example.answer or ())), new)
    asked.sort(key=lambda i: len(found[i].with_context))
    # in a batch of several lengths LongRoPE would go by the longest row
    kind = (lambda length: length) if switch_lengths(model) else (lambda _: 0)
    for batch in batches(asked, lambda i: len(found[i].with_context) + max_new_tokens, kind):
        for end in dict.fromkeys(found[i].end for i in batch):
            same_end = [i for i in batch if found[i].end == end]
            rows = [found[i].with_context for i in same_end]
            timed = []
            if same_end[0] == asked[0]:
                timed = [_Estimate(len(asked), len(rows) / len(asked), max_new_tokens, say)]
            own = greedy(model, rows, max_new_tokens, end, timed)
            for i, answer in zip(same_end, own, strict=True):
                known[key(found[i])] = answer
                found[i] = replace(found[i], answer=answer)
    taught: dict[Tokens, Tokens | None] = {}
    for example in found:
        if taught.setdefault(example.without, example.answer) != example.answer:
            raise ValueError(
                "expected contexts that share one instruction, got two that give different answers"
                f" to the same prompt: {taught[example.without]!s:.80} and {example.answer!s:.80}."
                " Fit a patch for each context"
            )
    return found


def ends_of(model: PreTrainedModel, end: Tokens) -> list[int]:
    """The ids that end an answer: ``end`` or those of the model's generation configuration."""
    return list(end or configured_ends(model))


def greedy(
    model: PreTrainedModel,
    rows: Sequence[Tokens],
    max_new_tokens: int,
    end: Tokens = (),
    criteria: Sequence[StoppingCriteria] = (),
) -> list[Tokens]:
    """The model's greedy continuation of each row of ids, up to and including the end token. It
    ignores the model's generation configuration, because penalties in it lead to other tokens than
    the model's first choice.
    """
    ends = ends_of(model, end)
    ids, mask = padded(rows, "left")
    check_length(model, ids.shape[1], max_new_tokens - 1)
    device = input_device(model)
    generate: Any = model.generate
    configured, model.generation_config = model.generation_config, GenerationConfig()
    try:
        generated: Tensor = generate(
            ids.to(device),
            attention_mask=mask.long().to(device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            stopping_criteria=StoppingCriteriaList(criteria),
        )
    finally:
        model.generation_config = configured
    return [_up_to_end(row, ends) for row in generated[:, ids.shape[1] :].tolist()]


def _up_to_end(ids: list[int], ends: list[int]) -> Tokens:
    place = next((at for at, token in enumerate(ids) if token in ends), len(ids) - 1)
    return tuple(ids[: place + 1])
