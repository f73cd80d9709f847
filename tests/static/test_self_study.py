"""Questions that the model writes itself."""

import re

import pytest
import torch
from support.models import build
from support.static import random_example

from icl_patch import embedded
from icl_patch.static import Example, self_study


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return embedded.load()


def test_the_model_writes_questions_like_the_given_ones(loaded: tuple) -> None:
    model, tokenizer = loaded
    context, questions = "mode flip\n", ["bcdf>", "ghjk>"]
    example = Example.from_text(tokenizer, context, questions, end="\n")
    state = torch.get_rng_state()
    more = self_study(model, example, 40)
    assert torch.equal(torch.get_rng_state(), state)
    assert more.questions[:2] == example.questions
    assert len(set(more.questions)) == 40
    assert more.answers is not None
    texts = [tokenizer.decode(question) for question in more.questions]
    pairs = zip(texts, (tokenizer.decode(answer) for answer in more.answers), strict=True)
    # the model was trained on words of four consonants and flips nearly all of them
    assert all(re.fullmatch(r"[a-z]{4}>", text) for text in texts)
    assert sum(answer == text[3::-1] + "\n" for text, answer in pairs) >= 36
    assert self_study(model, example, 40) == more
    assert self_study(model, example, 40, seed=1) != more


def test_a_question_ends_where_all_given_ones_do(loaded: tuple) -> None:
    model, tokenizer = loaded
    one = Example.from_text(tokenizer, "say german\n", ["3 8 1."], end="\n")
    with pytest.raises(ValueError, match=r"at least two questions .* give their end"):
        self_study(model, one, 4)
    end = tuple(tokenizer(".", add_special_tokens=False)["input_ids"])
    more = self_study(model, one, 8, end=end)
    assert [tokenizer.decode(question)[5:] for question in more.questions] == ["."] * 8
    with pytest.raises(ValueError, match="give their end"):
        self_study(model, one, 8, end=(*end, *end))
    with pytest.raises(ValueError, match="count of at least 8, got 7"):
        self_study(model, more, 7)


def test_questions_without_a_common_end_are_refused() -> None:
    with pytest.raises(ValueError, match="end with the same token"):
        self_study(build("llama"), random_example(), 9)
