"""Examples of a context's effect: a context, questions about it, and the answers with it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.models.language_model import check_length, check_vocabulary

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """A context and questions; the model sees ``prefix + context + question`` before an answer.

    A static patch is to make ``prefix + question`` enough.

    Attributes:
        context: the ids that the patch replaces.
        questions: the ids of each question.
        answers: the ids of each answer, its last token included; None: the model's own greedy
            answers with the context, see :func:`answered`.
        prefix: the ids before the context that stay, such as ``<bos>``.
        end: ids that end an answer; the model's generation configuration names them by default.

    Raises:
        ValueError: the context, a question or an answer is empty, or there are not as many answers
            as questions.
    """

    context: Tokens
    questions: tuple[Tokens, ...]
    answers: tuple[Tokens, ...] | None = None
    prefix: Tokens = ()
    end: Tokens = ()

    def __post_init__(self) -> None:
        if not self.context or not self.questions or not all(self.questions):
            raise ValueError(
                f"expected a context and at least one question, none of them empty, got"
                f" {len(self.context)} tokens of context and {len(self.questions)} questions"
            )
        if self.answers is None:
            return
        if len(self.answers) != len(self.questions) or not all(self.answers):
            raise ValueError(
                f"expected {len(self.questions)} answers, one a question and none empty, got"
                f" {len(self.answers)} of lengths {[len(ids) for ids in self.answers]!s:.80}"
            )

    @classmethod
    def from_text(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        context: str,
        questions: Sequence[str],
        answers: Sequence[str] | None = None,
        *,
        end: str | None = None,
        chat: bool = False,
    ) -> "Example":
        """An example from text.

        Args:
            context, questions, answers: text; with ``chat`` the context is the system message and a
                question the user's.
            end: the one token that ends an answer; it is added to the given answers. By default the
                tokenizer's end of sequence.
            chat: apply the tokenizer's chat template.

        Raises:
            ValueError: questions or answers are no lists of text; ``end`` is not one token; or the
                tokenizer has no chat template, or one that puts another text in the place of a
                missing system message.
        """
        texts = (context, *questions, *(answers or ()))
        lists = not isinstance(questions, str) and not isinstance(answers, str)
        if not lists or not all(isinstance(text, str) for text in texts):
            raise ValueError(
                "expected a context of text, and lists of texts as questions and answers, got"
                f" {context!r:.40}, {questions!r:.40} and {answers!r:.40}"
            )
        ids = _encoder(tokenizer)
        ends = (tokenizer.eos_token_id,) if end is None else ids(end)
        if len(ends) != 1 or ends[0] is None:
            raise ValueError(f"expected an end of one token, got {end!r}, which is {len(ends)}")
        given = None if answers is None else tuple((*ids(text), *ends) for text in answers)
        if not chat:
            prefix = bos(tokenizer)
            return cls(ids(context), tuple(map(ids, questions)), given, prefix, ends)
        parts = [_chat_parts(tokenizer, context, question) for question in questions]
        if any(part[:2] != parts[0][:2] for part in parts):
            raise ValueError(
                "expected a chat template that puts the context in one place, got more"
            )
        return cls(parts[0][1], tuple(part[2] for part in parts), given, parts[0][0], ends)


def bos(tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The tokens that the tokenizer puts before a text: ``<bos>`` or none."""
    first = tokenizer("")["input_ids"][:1]
    return tuple(first) if first and first[0] == tokenizer.bos_token_id else ()


def documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Tokens]:
    """Texts as ids behind ``<bos>``, for a fit's ``preserve``."""
    ids = _encoder(tokenizer)
    return [(*bos(tokenizer), *ids(text)) for text in texts]


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Any:
    return lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _chat_parts(
    tokenizer: PreTrainedTokenizerBase, context: str, question: str
) -> tuple[Tokens, Tokens, Tokens]:
    """Prefix, context and question of one chat, from the template with and without the system
    message.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("expected a tokenizer with a chat template, got one without: chat=False")
    user = {"role": "user", "content": question}
    with_context, without = (
        _encoder(tokenizer)(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
        for messages in ([{"role": "system", "content": context}, user], [user])
    )
    same = 0
    while same < len(without) and with_context[same] == without[same]:
        same += 1
    rest = without[same:]
    if not rest or with_context[-len(rest) :] != rest:
        raise ValueError(
            "expected a chat template that leaves out a missing system message, got one that writes"
            " something else: put the context into the user's message instead, with chat=False"
        )
    return without[:same], with_context[same : len(with_context) - len(rest)], rest


@torch.no_grad()
def answered(
    model: PreTrainedModel,
    examples: Sequence[Example],
    max_new_tokens: int = 64,
    batch_size: int = 64,
) -> list[Example]:
    """The examples with the model's own greedy answers where none are given.

    Raises:
        ValueError: ids are not in the vocabulary, or there are more tokens than positions.
    """
    return [
        example
        if example.answers is not None
        else replace(example, answers=_answers(model, example, max_new_tokens, batch_size))
        for example in examples
    ]


def _answers(
    model: PreTrainedModel, example: Example, max_new_tokens: int, batch_size: int
) -> tuple[Tokens, ...]:
    found: list[Tokens] = []
    for start in range(0, len(example.questions), batch_size):
        rows = [
            (*example.prefix, *example.context, *question)
            for question in example.questions[start : start + batch_size]
        ]
        found += greedy(model, rows, max_new_tokens, example.end)
    return tuple(found)


def greedy(
    model: PreTrainedModel, rows: Sequence[Tokens], max_new_tokens: int, end: Tokens = ()
) -> list[Tokens]:
    """The model's greedy continuation of each row of ids, up to the end token and with it."""
    ends = list(end) or _model_ends(model)
    options = {"eos_token_id": ends or None, "pad_token_id": ends[0] if ends else 0}
    generated = generated_ids(model, rows, max_new_tokens, do_sample=False, **options)
    return [_up_to_end(row, ends) for row in generated]


def generated_ids(
    model: PreTrainedModel, rows: Sequence[Tokens], max_new_tokens: int, **options: Any
) -> list[list[int]]:
    """The new ids of ``model.generate`` for each row of ids, with these options alone: penalties
    and beams of the model's generation configuration give other tokens than its first choice.
    """
    width = max(map(len, rows))
    check_length(model, width, max_new_tokens)
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    check_vocabulary(model, ids, mask.bool())
    generate: Any = model.generate
    configured, model.generation_config = model.generation_config, GenerationConfig()
    try:
        generated: Tensor = generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            **options,
        )
    finally:
        model.generation_config = configured
    new: list[list[int]] = generated[:, width:].tolist()
    return new


def _model_ends(model: PreTrainedModel) -> list[int]:
    ends = getattr(model.generation_config, "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _up_to_end(ids: list[int], ends: list[int]) -> Tokens:
    place = next((at for at, token in enumerate(ids) if token in ends), len(ids) - 1)
    return tuple(ids[: place + 1])


@dataclass(frozen=True)
class Row:
    """One question with its answer, or a text to preserve, as the two runs see it.

    ``with_context`` and ``without`` are the inputs of the two runs: they agree in the first
    ``prefix`` tokens, and in all tokens of ``without`` after them. The tokens from ``answer`` on of
    ``without`` predict the answer ``labels``.
    """

    with_context: Tokens
    without: Tokens
    prefix: int
    answer: int
    labels: Tokens
    preserve: bool = False

    @property
    def shift(self) -> int:
        """How much further back a token after the prefix stands in the run with the context."""
        return len(self.with_context) - len(self.without)

    @property
    def question(self) -> tuple[bool, Tokens]:
        """What two rows share that are the same without their contexts."""
        return self.preserve, self.without


def rows_of(examples: Sequence[Example]) -> list[Row]:
    """A row for each question of answered examples, in the order of the questions.

    Raises:
        ValueError: the same question after the same prefix has different answers: no one patch can
            give both.
    """
    rows, known = [], dict[Tokens, Tokens]()
    for example in examples:
        assert example.answers is not None
        for question, answer in zip(example.questions, example.answers, strict=True):
            without = (*example.prefix, *question)
            if known.setdefault(without, answer) != answer:
                raise ValueError(
                    "expected contexts that share one instruction, got two that give different"
                    f" answers to the question {question!s:.80}: {known[without]!s:.80} and"
                    f" {answer!s:.80}. Fit a patch for each context"
                )
            rows.append(
                Row(
                    with_context=(*example.prefix, *example.context, *question, *answer[:-1]),
                    without=(*without, *answer[:-1]),
                    prefix=len(example.prefix),
                    answer=len(without) - 1,
                    labels=answer,
                )
            )
    return rows


def question_numbers(questions: Iterable[tuple[bool, Tokens]]) -> dict[tuple[bool, Tokens], int]:
    """A number for each :attr:`Row.question`; equal ones share it, and so their fold."""
    return {question: number for number, question in enumerate(dict.fromkeys(questions))}


def preserved_rows(texts: Sequence[Sequence[int]]) -> list[Row]:
    """Rows of texts on which the patched model is to stay as it is.

    Raises:
        ValueError: a text is empty.
    """
    if any(isinstance(text, str) for text in texts):
        raise ValueError("expected ids of texts to preserve, got text: static.documents gives them")
    if not all(len(text) for text in texts):
        raise ValueError("expected texts to preserve of at least one token each, got an empty one")
    return [Row(tuple(text), tuple(text), len(text), 0, (), preserve=True) for text in texts]


def check_rows(model: PreTrainedModel, rows: Sequence[Row]) -> None:
    """Raises ValueError unless the model has the ids and the positions of all rows."""
    for row in rows:
        ids = torch.tensor([[*row.with_context, *row.labels[-1:]]])  # an answer's end is no input
        check_vocabulary(model, ids, torch.ones_like(ids, dtype=torch.bool))
        check_length(model, len(row.with_context))
