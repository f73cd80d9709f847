"""Examples: from text and chats, the token in front, and the model's answers."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from support.chats import TEMPLATE
from support.random_models import build, longrope, tokens
from support.word_tokenizer import VOCABULARY, word_tokenizer

from icl_patch import embedded, static
from icl_patch.errors import StaticPatchWarning
from icl_patch.evaluation import tiny_models
from icl_patch.static.answers import answered
from icl_patch.static.examples import Example, batches, pad
from icl_patch.static.student import Student
from icl_patch.static.targets import measure, targets_of
from icl_patch.static.training import _shuffled
from tools import model_types

DEFAULT = "{% if messages[0].role != 'system' %}<system>be kind\n{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return embedded.load()


def test_text_becomes_the_ids_of_both_prompts(loaded: tuple) -> None:
    model, tokenizer = loaded
    first, second = static.examples(
        model, tokenizer, ["1.", "2."], context="say x\n", answers=["un", "deux"], end="\n"
    )
    whole = tokenizer("say x\n1.un\n")["input_ids"]
    assert first.answer is not None
    assert [*first.with_context, *first.answer] == whole
    assert [*first.without, *first.answer] == tokenizer("1.un\n")["input_ids"]
    assert second.without[0] == tokenizer.bos_token_id
    assert static.documents(model, tokenizer, ["say x\n1.un\n"]) == [tuple(whole)]


@pytest.mark.parametrize("template", [TEMPLATE, DEFAULT])
def test_a_chat_is_what_the_template_writes(template: str) -> None:
    """Its own system message, where it has one, stands in the prompt without the given one."""
    model, tokenizer = embedded.load()
    with pytest.raises(ValueError, match="expected a tokenizer with a chat template"):
        static.examples(model, tokenizer, ["q"], system="c")
    tokenizer.chat_template = template

    def ids(*messages: dict) -> tuple:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    system = {"role": "system", "content": "mode upper"}
    user, answer = {"role": "user", "content": "abc>"}, {"role": "assistant", "content": "ABC"}
    several = [user, answer, {"role": "user", "content": "d>"}]
    found = static.examples(model, tokenizer, ["abc>", several], system="mode upper", end="\n")
    for example, messages in zip(found, ([user], several), strict=True):
        assert example.with_context == ids(system, *messages)
        assert example.without == ids(*messages)
    arguments = {"context": "mode upper\n", "chat": True, "end": "\n"}
    (inside,) = static.examples(model, tokenizer, ["abc>"], **arguments)
    assert inside.with_context == ids({"role": "user", "content": "mode upper\nabc>"})
    assert inside.without == ids(user)


class Plain:
    """A tokenizer that puts nothing in front of a text."""

    all_special_ids = (3, 5, 7)

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        return self.tokenizer(text, **options | {"add_special_tokens": False})


def test_the_token_in_front_is_the_one_that_makes_texts_likely(loaded: tuple) -> None:
    model, tokenizer = loaded
    assert static.front(model, tokenizer) == (tokenizer.bos_token_id,)
    plain: Any = Plain(tokenizer)
    texts = [plain(text)["input_ids"] for text in static.preserved_texts()[:4]]
    losses = {}
    for token in plain.all_special_ids:
        losses[token] = 0.0
        for text in texts:
            ids = torch.tensor([[token, *text]])
            with torch.no_grad():
                logits = model(ids).logits[0].double()
            losses[token] += float(F.cross_entropy(logits[1:-1], ids[0, 2:], reduction="sum"))
    assert static.front(model, plain) == (min(losses, key=losses.__getitem__),)
    refusal = pytest.raises(ValueError, match="in eval mode, got one that is training")
    model.train()
    with refusal:
        static.front(model, plain)
    model.eval()
    plain.all_special_ids = ()
    assert static.front(model, plain) == ()


def test_answers_are_the_models_own_with_the_context(loaded: tuple) -> None:
    model, tokenizer = loaded
    examples = static.examples(
        model, tokenizer, ["1 2 3.", "4 7 7."], context="say german\n", end="\n"
    )
    got = answered(model, examples, 27)
    texts = [tokenizer.decode(example.answer) for example in got]
    assert texts == ["eins zwei drei\n", "vier sieben sieben\n"]
    given = [replace(example, answer=(5, 6)) for example in examples]
    assert answered(model, given, 27) == given


def test_answers_are_the_first_choices_whatever_the_model_generates_by_default() -> None:
    model, examples = build("llama"), [static.Example((5, 6, 7), (7,)), static.Example((9,), (10,))]
    plain = answered(model, examples, 8)
    assert plain[0].answer is not None
    first = [plain[0].answer[0]]
    for name, value in (("repetition_penalty", 5.0), ("num_beams", 3), ("suppress_tokens", first)):
        model = build("llama")
        setattr(model.generation_config, name, value)
        assert answered(model, examples, 8) == plain
        assert getattr(model.generation_config, name) == value


@pytest.mark.parametrize("name", ["bart", "roberta", "git"])
def test_answers_where_padding_or_generate_would_change_them(name: str) -> None:
    """BART sees padding, GIT sees it behind a cache; RoBERTa's ``generate`` has other positions."""
    if name == "git" and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("transformers 5.17 counts GIT's positions twice on a cache")
    sizes = {"vocab_size": 97, "max_position_embeddings": 64, "pad_token_id": 1}
    model = model_types.build(name, sizes)
    for path, parameter in model.named_parameters():
        if "position" in path:  # else the head's biases choose one token everywhere
            parameter.data.mul_(3)
    lengths = (3, 9, 4, 7, 2, 6)
    rows = [(5, *x) for n in lengths for x in tokens(n, 1, n).clamp(3, 95).tolist()]
    examples = [static.Example(row, row, end=(96,)) for row in rows]
    for row, example in zip(rows, answered(model, examples, 12), strict=True):
        own = list(row)
        while len(own) < len(row) + 12 and own[-1] != 96:
            with torch.no_grad():
                own.append(int(model(torch.tensor([own]), use_cache=False).logits[0, -1].argmax()))
        assert example.answer == tuple(own[len(row) :])


def test_an_answers_last_token_needs_no_position() -> None:
    model = tiny_models.build("gpt2", max_position_embeddings=12)
    prompt = tuple(range(5, 14))
    [found] = answered(model, [static.Example(prompt, prompt)], 4)
    own = model.generate(
        torch.tensor([prompt]), max_new_tokens=4, do_sample=False, eos_token_id=None
    )
    assert found.answer == tuple(own[0, 9:].tolist())
    assert len(targets_of(Student(model), [found])[0].ids) == 12
    with pytest.raises(ValueError, match="expected at most 12 tokens"):
        answered(model, [static.Example(prompt, prompt)], 5)


def test_batches_hold_as_many_tokens_as_they_may() -> None:
    lengths = [3, 4, 4, 5, 9, 13]
    assert batches(lengths, lambda n: n, tokens=12) == [[3, 4, 4], [5], [9], [13]]
    assert batches(lengths, lambda n: n, lambda n: n > 4) == [[3, 4, 4], [5, 9, 13]]
    assert batches(lengths, lambda n: n, count=4) == [[3, 4, 4, 5], [9, 13]]


def test_a_given_answer_is_what_follows_the_prompt() -> None:
    model, tokenizer = build("llama", vocab_size=VOCABULARY), word_tokenizer(behind=["</s>"])

    def given(context: str, question: str, answer: str) -> list[int]:
        (example,) = static.examples(
            model, tokenizer, [question], context=context, answers=[answer]
        )
        assert example.answer is not None and example.end == (2,)
        return [*example.with_context, *example.answer]

    whole = tokenizer("red -> rouge\nblue -> bleu").input_ids
    assert given("red -> rouge\n", "blue ->", " bleu") == whole
    with pytest.warns(StaticPatchWarning, match=r"'.*blue -> ', and the answer's .*, 'bleu', so"):
        cut = given("red -> rouge\n", "blue -> ", "bleu")
    prompt, answer = tokenizer(["red -> rouge\nblue -> ", "bleu"]).input_ids
    assert cut == [*prompt[:-1], *answer[1:]]  # but the end of one and the beginning of the other


def test_empty_parts_are_refused() -> None:
    for change in ({"with_context": ()}, {"without": ()}, {"answer": ()}):
        with pytest.raises(ValueError, match="none of them empty"):
            static.Example(**{"with_context": (1, 2), "without": (2,), **change})


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_ids_of_every_kind_are_integers(kind: Any) -> None:
    plain = static.Example((1, 2), (2,), (3,), (4,))
    ids = (kind([1, 2]), kind([2]), kind([3]), kind([4]))
    found = static.Example(*ids)
    assert found == plain and hash(found) == hash(plain)
    assert json.dumps(found.with_context) == "[1, 2]"
    for bad in ([[1, 2]], [1.0]):
        with pytest.raises(ValueError, match="expected without as one row of integer ids, got"):
            static.Example((1,), kind(bad))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"questions": "3 8 1.", "context": "c"}, "expected lists of questions and answers"),
        ({"questions": ["3"], "answers": "drei", "context": "c"}, "expected lists of questions"),
        ({"questions": [], "context": "c"}, "at least one question"),
        ({"questions": ["3"], "answers": [], "context": "c"}, "or one for each, got 1 and 0"),
        ({"questions": ["3"], "context": "c", "end": "eins"}, "expected an end of one token"),
        ({"questions": ["3"]}, "expected either a context or a system message, got none"),
    ],
)
def test_bad_examples_are_refused(loaded: tuple, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        static.examples(*loaded, **arguments)


def test_one_prompt_cannot_have_two_answers() -> None:
    model, one = build("llama"), static.Example((5, 9, 8), (9, 8), (1,))
    assert len(answered(model, [one, replace(one, with_context=(6, 9, 8))])) == 2
    with pytest.raises(ValueError, match="different answers to the same prompt"):
        answered(model, [one, replace(one, with_context=(6, 9, 8), answer=(2,))])


def test_rows_on_both_sides_of_a_length_of_longrope() -> None:
    """A batch of the model's own goes by its longest row: answers and targets must not."""
    model = tiny_models.build(
        "phi3", rope_parameters=longrope(16), original_max_position_embeddings=16
    )
    contexts = [(1, *range(9, 9 + length)) for length in (5, 9, 11, 12, 20)]
    examples = [Example((*x, 7), (1, 7, i)) for i, x in enumerate(contexts)]
    together = answered(model, examples, 6)
    apart = [x for example in examples for x in answered(model, [example], 6)]
    assert together == apart
    student = Student(model)
    alone = [x for example in apart for x in targets_of(student, [example])]
    for found, expected in zip(targets_of(student, together), alone, strict=True):
        assert (found.hidden - expected.hidden).abs().max() < 1e-4 * expected.hidden.abs().max()
    long = replace(together[-1], answer=(3,) * 20)  # its row without the context is long, too
    targets = targets_of(student, [together[0], long])
    hidden = [student.final(pad([target.ids], model.device)) for target in targets]
    for batch in (targets, targets[::-1]):
        training = _shuffled(batch, 8, 0, kind=student.kind, tokens=512)
        assert [len(next(training)) for _ in range(4)] == [1] * 4
    own = torch.cat([x[0, target.asked] for x, target in zip(hidden, targets, strict=True)])
    wanted = torch.cat([target.hidden for target in targets])
    p, q = (student.logits(x).log_softmax(-1).double() for x in (wanted, own))
    kl = float((p.exp() * (p - q)).sum(-1).mean().detach())
    assert math.isclose(measure(student, targets).kl, kl, rel_tol=1e-3)
