"""Examples: from text, with the model's answers, and as the rows of both runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import build, shallow, tokens
from support.static import IDS

from icl_patch import embedded
from icl_patch.static.block_parts import read_blocks
from icl_patch.static.block_runner import BlockRunner, Stream, make_batches
from icl_patch.static.examples import Example, answered, documents, preserved_rows, rows_of

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return embedded.load()


def test_text_becomes_the_ids_of_its_parts(loaded: tuple) -> None:
    _, tokenizer = loaded
    example = Example.from_text(tokenizer, "say x\n", ["1.", "2."], ["un", "deux"], end="\n")
    whole = tokenizer("say x\n1.un\n")["input_ids"]
    assert example.answers is not None
    assert [*example.prefix, *example.context, *example.questions[0], *example.answers[0]] == whole
    assert example.prefix == (tokenizer.bos_token_id,)
    assert documents(tokenizer, ["say x\n1.un\n"]) == [tuple(whole)]


def test_a_chat_template_is_split_around_the_system_message(loaded: tuple) -> None:
    tokenizer = embedded.load()[1]
    with pytest.raises(ValueError, match="expected a tokenizer with a chat template"):
        Example.from_text(tokenizer, "c", ["q"], chat=True)
    tokenizer.chat_template = CHAT
    example = Example.from_text(tokenizer, "mode upper", ["abc>", "d>"], chat=True, end="\n")

    def ids(messages: list) -> list:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for question, text in zip(example.questions, ("abc>", "d>"), strict=True):
        user = {"role": "user", "content": text}
        system = {"role": "system", "content": "mode upper"}
        assert [*example.prefix, *example.context, *question] == ids([system, user])
        assert [*example.prefix, *question] == ids([user])
    tokenizer.chat_template = "{% if messages[0].role != 'system' %}default {% endif %}" + CHAT
    with pytest.raises(ValueError, match="writes something else"):
        Example.from_text(tokenizer, "mode upper", ["abc>"], chat=True)


def test_answers_are_the_models_own_with_the_context(loaded: tuple) -> None:
    model, tokenizer = loaded
    example = Example.from_text(tokenizer, "say german\n", ["1 2 3.", "4 7 7."], end="\n")
    (got,) = answered(model, [example], 27)
    assert got.answers is not None
    texts = [tokenizer.decode(answer) for answer in got.answers]
    assert texts == ["eins zwei drei\n", "vier sieben sieben\n"]
    given = replace(example, answers=((5, 6), (7,)))
    assert answered(model, [given], 27) == [given]


def test_answers_are_the_first_choices_whatever_the_model_generates_by_default() -> None:
    model, example = build("llama"), Example((5, 6), ((7, 8), (9, 10)), end=(0,))
    (plain,) = answered(model, [example], 8)
    assert plain.answers is not None
    first = plain.answers[0][0]
    for name, value in (
        ("repetition_penalty", 5.0),
        ("num_beams", 3),
        ("suppress_tokens", [first]),
    ):
        model = build("llama")
        setattr(model.generation_config, name, value)
        assert answered(model, [example], 8) == [plain]
        assert getattr(model.generation_config, name) == value


def test_rows_meet_token_by_token() -> None:
    model = build("llama")
    example = Example((5, 6, 7), ((11, 12), (13,)), ((21, 22, 23), (24,)), prefix=(1,))
    rows = [*rows_of([example]), *preserved_rows([(31, 32, 33)])]
    runner = BlockRunner(model, read_blocks(model))
    (batch,) = make_batches(runner, rows, [0, 0, 0], kappa=2.0)
    by_row = {row.without: at for at, row in enumerate(batch.rows)}
    assert list(by_row) == [(31, 32, 33), (1, 13), (1, 11, 12, 21, 22)]
    for row, at in by_row.items():
        kept = batch.valid[at]
        assert int(kept.sum()) == len(row)
        assert batch.teacher.ids[at, batch.place[at]][kept].tolist() == list(row)
    assert batch.labels[2][batch.answer[2]].tolist() == [21, 22, 23]
    assert batch.student.ids[2][batch.answer[2]].tolist() == [12, 21, 22]
    assert not batch.answer[0].any()
    weights = [float(batch.weight[at][batch.valid[at]].sum()) for at in range(3)]
    assert weights[0] == pytest.approx(2 * (weights[1] + weights[2]))


def test_block_by_block_is_the_model() -> None:
    model = build("gemma3")
    runner = BlockRunner(model, read_blocks(model))
    ids = tokens(3, 2, 9)
    with torch.no_grad():
        stream = Stream(runner, ids)
        for index in range(len(runner.blocks)):
            stream.hidden = runner.run(index, stream)
        expected = model(ids).logits
        assert torch.equal(runner.final(ids), stream.hidden)
        # the head's product has other shapes for tokens one by one
        torch.testing.assert_close(runner.logits(stream.hidden[0]), expected[0])


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "gpt_bigcode", "granite", "llava"])
def test_a_pass_that_ends_at_the_last_block_is_the_models(name: str) -> None:
    model = shallow(name)
    runner = BlockRunner(model, read_blocks(model))
    with torch.no_grad():
        got = runner.logits(runner.final(IDS).flatten(0, 1))
        torch.testing.assert_close(got, model(IDS).logits.flatten(0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": ()}, "expected a context"),
        ({"questions": ()}, "at least one question"),
        ({"questions": ((1,), ())}, "none of them empty"),
        ({"answers": ((1,),)}, "expected 2 answers"),
        ({"answers": ((1,), ())}, "none empty"),
    ],
)
def test_empty_parts_are_refused(change: dict, message: str) -> None:
    arguments = {"context": (1,), "questions": ((2,), (3,))}
    with pytest.raises(ValueError, match=message):
        Example(**{**arguments, **change})


@pytest.mark.parametrize(
    ("questions", "answers"),
    [("3 8 1.", None), (["3 8 1."], "drei"), ([381], None)],
)
def test_a_text_is_no_list_of_texts(loaded: tuple, questions: Any, answers: Any) -> None:
    """Its letters would be taken as questions."""
    with pytest.raises(ValueError, match="lists of texts as questions and answers"):
        Example.from_text(loaded[1], "say german\n", questions, answers, end="\n")


def test_one_question_cannot_have_two_answers() -> None:
    one = Example((5,), ((9, 8),), ((1,),))
    assert len(rows_of([one, replace(one, context=(6,))])) == 2
    with pytest.raises(ValueError, match="different answers to the question"):
        rows_of([one, replace(one, context=(6,), answers=((2,),))])
