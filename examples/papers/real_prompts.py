"""Prompts for a pretrained model from the texts of this folder: contexts, and the questions that
follow them.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icl_patch.evaluation.loading import MARS_PROMPT

TEXTS = Path(__file__).with_name("texts")
# What the protocol of Goldwaser et al. starts from, the prompt of their Figure 3 first.
INSTRUCTIONS = (
    MARS_PROMPT,
    "Write a two-line poem about a lighthouse that is afraid of the dark.",
    "Explain to a child why the sky is blue, in two sentences.",
    "List three uses for a paperclip that is too long.",
)


@dataclass(frozen=True)
class Prompt:
    """A context that is absorbed, and the tokens after it.

    Attributes:
        kind, group, index: the sort of text; the prompts of a group share their context.
        context, question: token ids.
        answer: how many tokens the model is to add.
    """

    kind: str
    group: str
    index: int
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: int

    @property
    def name(self) -> str:
        """A name that is a file name too."""
        return f"{self.kind}-{self.group}-{self.index}".replace(" ", "-")


def read(name: str) -> list[dict[str, Any]]:
    """The entries of one file of texts."""
    [entries] = tomllib.loads((TEXTS / f"{name}.toml").read_text(encoding="utf-8")).values()
    return entries


def ids_of(tokenizer: Any, text: str, *, first: bool) -> tuple[int, ...]:
    """Token ids; those that a tokenizer puts in front of a text only if it is the first."""
    return tuple(tokenizer(text, add_special_tokens=first)["input_ids"])


def shots(pairs: list[list[str]]) -> str:
    """The lines of a few-shot context."""
    return "".join(f"{given} -> {answer}\n" for given, answer in pairs)


def few_shot(tokenizer: Any, groups: int, count: int, answer: int) -> Iterator[Prompt]:
    """The first eight pairs of each task as the context, and ``count`` others as prompts."""
    for task in read("few_shot")[:groups]:
        context = ids_of(tokenizer, shots(task["pairs"][:8]), first=True)
        for index, (given, _) in enumerate(task["pairs"][8:][:count]):
            question = ids_of(tokenizer, f"{given} ->", first=False)
            yield Prompt("few-shot", task["name"], index, context, question, answer)


def chats(tokenizer: Any, groups: int, count: int, answer: int) -> Iterator[Prompt]:
    """The system message is the context; nothing for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        return
    for group, chat in enumerate(read("chats")[:groups]):
        system = {"role": "system", "content": chat["system"]}
        context = _templated(tokenizer, [system])
        for index, text in enumerate(chat["users"][:count]):
            messages = [system, {"role": "user", "content": text}]
            whole = _templated(tokenizer, messages, add_generation_prompt=True)
            assert whole[: len(context)] == context, "the template begins with something else"
            yield Prompt("chat", str(group), index, context, whole[len(context) :], answer)


def _templated(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> tuple[int, ...]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return ids_of(tokenizer, text, first=False)


def passages(tokenizer: Any, groups: int, count: int, answer: int) -> Iterator[Prompt]:
    """A text, and questions about it."""
    for group, passage in enumerate(read("passages")[:groups]):
        context = ids_of(tokenizer, passage["text"] + "\n\n", first=True)
        for index, text in enumerate(passage["questions"][:count]):
            question = ids_of(tokenizer, f"Question: {text}\nAnswer:", first=False)
            yield Prompt("passage", str(group), index, context, question, answer)


def code(tokenizer: Any, groups: int, _count: int, answer: int) -> Iterator[Prompt]:
    """The first part of a program; each has one prompt."""
    for group, entry in enumerate(read("code")[:groups]):
        context = ids_of(tokenizer, entry["context"], first=True)
        question = ids_of(tokenizer, entry["prompt"], first=False)
        yield Prompt("code", str(group), 0, context, question, answer)


KINDS = {"few-shot": few_shot, "chat": chats, "passage": passages, "code": code}


def prompts(tokenizer: Any, sizes: dict[str, tuple[int, int, int]]) -> list[Prompt]:
    """All prompts, by kind: how many contexts, how many prompts of each, and the tokens of an
    answer.
    """
    return [prompt for kind, size in sizes.items() for prompt in KINDS[kind](tokenizer, *size)]


def programs_and_chats() -> list[str]:
    """Texts of these kinds, as they stand in their files."""
    chats = ["\n".join([chat["system"], *chat["users"]]) for chat in read("chats")]
    return [entry["context"] + entry["prompt"] for entry in read("code")] + chats


def long_text() -> str:
    """All texts one after the other: the long context. The committed numbers of contexts by length
    are of another text, two pages of this repository's documentation.
    """
    passages = ["\n".join([x["text"], *x["questions"]]) for x in read("passages")]
    return "\n\n".join(
        [*passages, *programs_and_chats(), *(shots(task["pairs"]) for task in read("few_shot"))]
    )


def excerpts(tokenizer: Any, length: int, kept: tuple[int, int], count: int) -> list[Prompt]:
    """``count`` parts of the long text, evenly spread: ``length`` tokens of context, with what the
    tokenizer puts in front of a text, and the tokens behind them.

    kept: how many tokens of the first part, and how many more of each next one. Whether a replay
    rounds as its recording does depends on their number.
    """
    ids, front = ids_of(tokenizer, long_text(), first=False), ids_of(tokenizer, "", first=True)
    least, more = kept
    room = len(ids) - length - least - more * (count - 1)
    assert room >= 0, f"expected a text of {len(ids) - room} tokens, got one of {len(ids)}"
    found = []
    for index in range(count):
        middle = room * index // max(count - 1, 1) + length
        tail = ids[middle : middle + least + more * index]
        context = front + ids[middle - length + len(front) : middle]
        found.append(Prompt("excerpt", str(length), index, context, tail, 0))
    return found
