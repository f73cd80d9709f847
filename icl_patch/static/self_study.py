"""More questions for a fit, written by the model itself."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from icl_patch.layers.device_hooks import input_device
from icl_patch.models.language_model import check_length, vocabulary
from icl_patch.models.prompts import Tokens
from icl_patch.static.examples import Example, plain_generate

_BATCH = 64  # questions that are written at a time
_FRUITFUL = 8  # new ones in a batch, without which the model repeats itself


@torch.no_grad()
def self_study(
    model: PreTrainedModel, examples: Sequence[Example], count: int, *, seed: int = 0
) -> list[Example]:
    """The examples and others, ``count`` in all, whose questions the model writes: it continues the
    context at temperature 1 until a question ends as all given ones do. A fit lets it answer them
    with the context. No other thread may use the model meanwhile.

    A fit generalises from the questions that it has seen, so more of them make a better patch. Look
    at some before the fit.

    Args:
        model: the model, unpatched.
        examples: at least two, with one context, and questions that end with the same token.
        count: of the result; there are fewer if the model repeats itself.
        seed: the same seed gives the same questions.

    Raises:
        ValueError: the examples have several contexts, or questions without a common end; or there
            are more than ``count``.
    """
    context, own, questions = _parts(examples)
    end = _common_end(questions)
    if not end:
        raise ValueError(
            "expected questions that end with the same token, got some that end with the ids"
            f" {sorted({question[-1] for question in questions})!s:.80}"
        )
    if count < len(examples):
        raise ValueError(f"expected a count of at least {len(examples)}, got {count}")
    longest = 2 * max(map(len, questions))
    known = dict.fromkeys(questions)
    wanted, batch, found = len(known) + count - len(examples), 0, _FRUITFUL
    while len(known) < wanted and found >= _FRUITFUL:
        before = len(known)
        known |= dict.fromkeys(_written(model, context, end, longest, (seed << 20) + batch))
        batch, found = batch + 1, len(known) - before
    new = list(known)[len(set(questions)) : wanted]
    first = replace(examples[0], answer=None)
    return [
        *examples,
        *(replace(first, with_context=(*context, *q), without=(*own, *q)) for q in new),
    ]


def _parts(examples: Sequence[Example]) -> tuple[Tokens, Tokens, list[Tokens]]:
    """The context, the text before a question without it, and the questions."""
    rows = [example.with_context for example in examples]
    context = _common(list(dict.fromkeys(rows)))
    questions = [row[len(context) :] for row in rows]
    own = {
        example.without[: len(example.without) - len(question)]
        for example, question in zip(examples, questions, strict=True)
        if question and example.without[-len(question) :] == question
    }
    whole = {(*text, *q) for text in own for q in questions}
    if not context or len(own) != 1 or {x.without for x in examples} != whole:
        raise ValueError(
            "expected at least two examples of one context, whose prompts end with their questions,"
            f" got {len(rows)} with {len(context)} tokens in common at the beginning"
        )
    return context, own.pop(), questions


def _common_end(questions: Sequence[Tokens]) -> Tokens:
    """The tokens that all questions have in common at their ends, but for one of each."""
    return _common([question[:0:-1] for question in questions])[::-1]


def _common(rows: Sequence[Tokens]) -> Tokens:
    """The tokens with which all rows begin."""
    columns = zip(*rows, strict=False)
    return tuple(column[0] for column in takewhile(lambda x: len(set(x)) == 1, columns))


def _written(
    model: PreTrainedModel, context: Tokens, end: Tokens, longest: int, seed: int
) -> list[Tokens]:
    """Questions that are sampled behind the context."""
    ids = torch.tensor([context], device=input_device(model))
    check_length(model, len(context), longest)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        rows = plain_generate(
            model,
            ids,
            torch.ones_like(ids),
            max_new_tokens=longest,
            num_return_sequences=_BATCH,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            stopping_criteria=StoppingCriteriaList([_EndsWith(end)]),
            eos_token_id=vocabulary(model),  # no id: a question may hold any
            pad_token_id=0,
        )
    found = []
    for row in rows[:, len(context) :].tolist():
        places = (i for i in range(1, len(row)) if tuple(row[i : i + len(end)]) == end)
        stop = next(places, None)
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
