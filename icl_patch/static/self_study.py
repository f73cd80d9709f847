"""More questions for an example, written by the model itself."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from icl_patch.static.examples import Example, Tokens, answered, generated_ids

_SHOWN = 3  # questions with their answers before a new one
_BATCH = 64
_PATIENCE = 4  # batches without a new question


@torch.no_grad()
def self_study(
    model: PreTrainedModel,
    example: Example,
    count: int,
    *,
    end: Tokens = (),
    seed: int = 0,
    max_new_tokens: int = 64,
) -> Example:
    """The answered example with ``count`` questions: its own, and others that the model writes.

    The model sees the context and up to three of the example's questions with their answers, and
    samples a further question at temperature 1, at most twice as long as the longest given one. Its
    answer is the model's own with the context.

    Args:
        model: the model, unpatched.
        example: without answers the model gives them.
        count: questions of the result; there are fewer if the model repeats itself.
        end: the ids with which every question ends, such as those of a question mark or of the end
            of a chat's turn; by default all that the given questions, at least two, have in common
            at their ends.
        seed: the same seed gives the same questions.
        max_new_tokens: of an answer.

    Raises:
        ValueError: the questions do not end with ``end``, or with the same token; or there are more
            than ``count``.
    """
    questions = example.questions
    end = end or _common_end(questions)
    if not end or any(question[-len(end) :] != end for question in questions):
        raise ValueError(
            "expected at least two questions that end with the same token, or an end that all have,"
            f" got {len(questions)} that end with the ids"
            f" {sorted({question[-1] for question in questions})!s:.80}: give their end"
        )
    if count < len(questions):
        raise ValueError(f"expected a count of at least {len(questions)}, got {count}")
    [given] = answered(model, [example], max_new_tokens)
    assert given.answers is not None
    shown = list(zip(questions, given.answers, strict=True))
    rng, known, fruitless = random.Random(seed), dict.fromkeys(questions), 0
    while len(known) < count and fruitless < _PATIENCE:
        prompts = [
            _prompt(given, rng.sample(shown, min(_SHOWN, len(shown)))) for _ in range(_BATCH)
        ]
        before = len(known)
        for question in _written(model, prompts, questions, end, rng.getrandbits(62)):
            if len(known) < count:
                known.setdefault(question)
        fruitless = 0 if len(known) > before else fruitless + 1
    written = tuple(known)[len(questions) :]
    if not written:
        return given
    [new] = answered(model, [replace(given, questions=written, answers=None)], max_new_tokens)
    assert new.answers is not None
    return replace(given, questions=tuple(known), answers=given.answers + new.answers)


def _common_end(questions: Sequence[Tokens]) -> Tokens:
    """The tokens that all questions have in common at their ends; none if there is one question."""
    if len(set(questions)) == 1:
        return ()
    shortest = min(map(len, questions))
    ends = [questions[0][-size:] for size in range(shortest, 0, -1)]
    return next((end for end in ends if all(q[-len(end) :] == end for q in questions)), ())


def _prompt(example: Example, shown: Sequence[tuple[Tokens, Tokens]]) -> Tokens:
    pairs = [token for pair in shown for part in pair for token in part]
    return (*example.prefix, *example.context, *pairs)


def _written(
    model: PreTrainedModel,
    prompts: Sequence[Tokens],
    questions: Sequence[Tokens],
    end: Tokens,
    seed: int,
) -> list[Tokens]:
    """A sampled question behind each prompt, where there is one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        rows = generated_ids(
            model,
            prompts,
            2 * max(map(len, questions)),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            stopping_criteria=StoppingCriteriaList([_EndsWith(end)]),
            eos_token_id=model.config.get_text_config().vocab_size,  # no id: a question may hold it
            pad_token_id=0,
        )
    found = []
    for row in rows:
        stop = next((i for i in range(1, len(row)) if tuple(row[i : i + len(end)]) == end), None)
        if stop is not None:
            found.append(tuple(row[: stop + len(end)]))
    return found


class _EndsWith(StoppingCriteria):
    """Stops a row of ids that ends with some tokens."""

    def __init__(self, end: Tokens) -> None:
        self.end = torch.tensor(end)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_options: Any) -> Tensor:
        last = input_ids[:, -len(self.end) :]
        return (last == self.end.to(last.device)).all(-1)
