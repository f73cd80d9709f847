"""Questions that the model writes itself."""

import re
from dataclasses import replace

import pytest
import torch
from support.models import build
from support.static import random_examples

from icl_patch import embedded, static
from icl_patch.static import self_study
from icl_patch.static.examples import answered


def test_the_model_writes_questions_like_the_given_ones() -> None:
    model, tokenizer = embedded.load()
    given = static.examples(model, tokenizer, ["bcdf>", "ghjk>"], context="mode flip\n", end="\n")
    state = torch.get_rng_state()
    more = self_study(model, given, 40)
    assert torch.equal(torch.get_rng_state(), state)
    assert more[:2] == given and len({example.without for example in more}) == 40
    texts = [tokenizer.decode(example.without[1:]) for example in more]
    # the model was trained on words of four consonants and flips nearly all of them
    assert all(re.fullmatch(r"[a-z]{4}>", text) for text in texts)
    for example, text in zip(more, texts, strict=True):
        assert tokenizer.decode(example.with_context[1:]) == "mode flip\n" + text
        assert (example.answer, example.end) == (None, given[0].end)
    answers = [tokenizer.decode(example.answer) for example in answered(model, more, 6)]
    assert sum(a == text[3::-1] + "\n" for a, text in zip(answers, texts, strict=True)) >= 36
    assert self_study(model, given, 40) == more
    assert self_study(model, given, 40, seed=1) != more


def test_examples_that_cannot_be_continued_are_refused() -> None:
    model, examples = build("llama"), random_examples()
    ended = [
        replace(x, with_context=(*x.with_context, 7), without=(*x.without, 7)) for x in examples
    ]
    assert len(self_study(model, ended, 8)) == 8
    with pytest.raises(ValueError, match="end with the same token"):
        self_study(model, examples, 9)
    with pytest.raises(ValueError, match="count of at least 8, got 7"):
        self_study(model, ended, 7)
    other = [replace(x, without=(3, *x.without)) for x in ended[:1]]
    for wrong in (ended[:1], other + ended[1:], [replace(x, with_context=(5,)) for x in ended]):
        with pytest.raises(ValueError, match="at least two examples of one context"):
            self_study(model, wrong, 9)
