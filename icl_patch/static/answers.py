"""The model's own answers to questions with their context. A fit trains a patch to give them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from icl_patch.layers.device_hooks import input_device
from icl_patch.models.ends import configured_ends
from icl_patch.models.kv_cache import new_cache
from icl_patch.models.language_model import check_length
from icl_patch.models.positions import switch_lengths
from icl_patch.models.prompts import Tokens, padded
from icl_patch.recording.forward_passes import run
from icl_patch.recording.self_check import takes_padding
from icl_patch.recording.sequences import Sequences, switches
from icl_patch.static.examples import Example, batches, check_row

Answers = dict[tuple[Tokens, Tokens, int], Tokens]
"""Answers of one model by prompt, the ids that end an answer, and the most tokens of one."""

_TIMED = 4  # tokens of the first batch, after which the time of all answers is estimated


class _Estimate:
    """Estimates after a few tokens how long all answers take at most.

    It adds the time of the first token and of each later one, in proportion to the questions.

    share: the part of all questions that is in the timed batch.
    """

    def __init__(
        self, count: int, share: float, max_new_tokens: int, say: Callable[[str], None]
    ) -> None:
        self.count, self.share, self.tokens, self.say = count, share, max_new_tokens, say
        self.times = [time.perf_counter()]

    def __call__(self) -> None:
        """Another token of the batch is there."""
        self.times.append(time.perf_counter())
        if len(self.times) == _TIMED + 1:
            began, first, *_, last = self.times
            token = (last - first) / (_TIMED - 1)
            seconds = (first - began + (self.tokens - 1) * token) / self.share
            self.say(
                f"the model answers {self.count} question{'s' * (self.count > 1)} with at most"
                f" {self.tokens} tokens, in {seconds:.0f} s or less"
            )


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
    kind = _kind_of_length(model) if asked else (lambda _: 0)
    for batch in batches(asked, lambda i: len(found[i].with_context) + max_new_tokens, kind):
        for end in dict.fromkeys(found[i].end for i in batch):
            same_end = [i for i in batch if found[i].end == end]
            rows = [found[i].with_context for i in same_end]
            estimate = None
            if same_end[0] == asked[0]:
                estimate = _Estimate(len(asked), len(rows) / len(asked), max_new_tokens, say)
            own = greedy(model, rows, max_new_tokens, end, estimate)
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


def _kind_of_length(model: PreTrainedModel) -> Callable[[int], int]:
    """Equal for lengths of rows that may share a batch, in which each has the logits that it has
    alone: LongRoPE goes by the longest row, and some models do not hide padding.
    """
    if switch_lengths(model) or not takes_padding(model, recurrent=False, tokenizer=None):
        return lambda length: length
    return lambda _: 0


def ends_of(model: PreTrainedModel, end: Tokens) -> list[int]:
    """The ids that end an answer: ``end`` or those of the model's generation configuration."""
    return list(end or configured_ends(model))


@torch.no_grad()
def greedy(
    model: PreTrainedModel,
    rows: Sequence[Tokens],
    max_new_tokens: int,
    end: Tokens = (),
    on_token: Callable[[], None] | None = None,
) -> list[Tokens]:
    """The model's greedy continuation of each row of ids, up to and including the end token.

    It calls the model itself. ``model.generate`` has other positions in some classes (RoBERTa, GIT)
    than the model without a cache, and follows a generation configuration, in which penalties lead
    to other tokens than the model's first choice.

    on_token: called behind every token of the rows.
    """
    ends = ends_of(model, end)
    ids, mask = (x.to(input_device(model)) for x in padded(rows, "left"))
    start = done = ids.shape[1]
    check_length(model, start, max_new_tokens - 1)
    cache, ended = None, torch.zeros_like(mask[:, 0])
    for _ in range(max_new_tokens):
        sequences = Sequences(ids, mask, ~mask, head=0)
        if cache is None or switches(model, sequences):
            cache, done = new_cache(model), 0
        positions, longest = sequences.positions[:, done:], sequences.longest
        logits = run(model, ids[:, done:], mask, positions, cache, longest=longest, last_logits=1)
        done = ids.shape[1]
        chosen = logits[:, -1].argmax(-1, keepdim=True).to(ids.device)
        ids, mask = torch.cat([ids, chosen], 1), F.pad(mask, (0, 1), value=True)
        if on_token is not None:
            on_token()
        ended |= torch.isin(chosen[:, 0], ids.new_tensor(ends))
        if ended.all():
            break
    return [_up_to_end(row, ends) for row in ids[:, start:].tolist()]


def _up_to_end(ids: list[int], ends: list[int]) -> Tokens:
    place = next((at for at, token in enumerate(ids) if token in ends), len(ids) - 1)
    return tuple(ids[: place + 1])
