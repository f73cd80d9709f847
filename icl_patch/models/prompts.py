"""Prompts with a context and without it: text or chats, as text and as token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Tokens = tuple[int, ...]
Messages = Sequence[Mapping[str, str]]
Question = str | Messages


@dataclass(frozen=True)
class Prompt:
    """A prompt with its context and the same prompt without it.

    Attributes:
        with_context, without: the two texts.
        kept: the place in ``with_context`` from which the text stays if a patch for each token
            takes the context's place.
        chat: whether a chat template wrote them, special tokens included.
    """

    with_context: str
    without: str
    kept: int
    chat: bool


def make_prompt(
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    *,
    context: str | None = None,
    system: str | None = None,
    chat: bool = False,
) -> Prompt:
    """A question with a context and without it.

    ========================  =======================================================
    arguments                 the prompt
    ========================  =======================================================
    ``context``               the text ``context + question``
    ``context``, ``chat``     a chat: the context begins the user's first message
    ``system``                a chat: the context is the system message
    ========================  =======================================================

    Without the context a chat is what the template writes without it: templates with a system
    message of their own, such as Qwen 2.5's, then write that one.

    Args:
        question: text, or a chat's messages, ``[{"role": "user", "content": ...}, ...]``, of which
            the first and the last are the user's.
        context, system: one of them.

    Raises:
        ValueError: there is no context or more than one; an empty question; or the tokenizer has no
            chat template, or one that takes no system message.
        TypeError: a context or a question that is no text.
    """
    if (context is None) is (system is None):
        given = "none" if context is None else "both"
        raise ValueError(f"expected either a context or a system message, got {given}")
    text = context if system is None else system
    if not isinstance(text, str) or not isinstance(question, str | Sequence):
        kinds = f"{type(text).__name__} and {type(question).__name__}"
        raise TypeError(f"expected a context and a question as text, got {kinds}")
    if not text or not question:
        raise ValueError(
            "expected a context and a question of at least one token each, got"
            f" {text!r:.40} and {question!r:.40}"
        )
    if isinstance(question, str) and system is None and not chat:
        return Prompt(text + question, question, len(text), chat=False)
    messages = _messages(question)
    without = _render(tokenizer, messages)
    first = messages[0]["content"]
    if system is not None:
        turn = {"role": "system", "content": text}
        with_context = _render(tokenizer, [turn, *messages])
        alone = _opening(tokenizer, turn)
        if text.strip() in alone and with_context.startswith(alone):
            return Prompt(with_context, without, len(alone), chat=True)
        after = with_context.index(text.strip()) + len(text.strip())
        return Prompt(with_context, without, with_context.index(first.strip(), after), chat=True)
    whole = text + first
    with_context = _render(tokenizer, [{**messages[0], "content": whole}, *messages[1:]])
    stripped = len(whole) - len(whole.lstrip())  # templates may strip a message
    kept = with_context.index(whole.strip()) + len(text) - stripped
    return Prompt(with_context, without, kept, chat=True)


def _messages(question: Question) -> list[dict[str, str]]:
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    messages = [dict(message) for message in question]
    roles = [message.get("role") for message in messages]
    if (
        any(set(message) != {"role", "content"} for message in messages)
        or not all(isinstance(message["content"], str) for message in messages)
        or (roles[0], roles[-1]) != ("user", "user")
    ):
        raise ValueError(
            "expected messages with a role and a content of text, the first and the last of the"
            f" user, got {question!r:.120}"
        )
    return messages


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError unless the tokenizer has a chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"expected a tokenizer with a chat template, {type(tokenizer).__name__} has none: leave"
            " out chat and system, and give the context as text"
        )


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """The chat up to the place where the assistant answers."""
    check_chat_template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(
            "expected messages that the tokenizer's chat template takes, got roles"
            f" {', '.join(message['role'] for message in messages)}, which it refuses:"
            f" {error}. If it takes no system message, give the context as context=..., which puts"
            " it before the user's words"
        ) from error
    if messages[0]["content"].strip() not in text:
        raise ValueError(
            f"expected a chat template that writes the {messages[0]['role']} message as it is, got"
            f" one without it: {text!r:.120}. Give the context as context=..., which puts it before"
            " the user's words"
        )
    return str(text)


def _opening(tokenizer: PreTrainedTokenizerBase, turn: dict[str, str]) -> str:
    """What the template writes for a system message alone; nothing if it refuses that."""
    try:
        return str(tokenizer.apply_chat_template([turn], tokenize=False))
    except TemplateError:
        return ""


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tokens:
    """The ids of a text, without special tokens of the tokenizer's own."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def own_front(tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The one token, such as ``<bos>``, that the tokenizer puts before a text by itself, if any."""
    first = tokenizer("")["input_ids"][:1]
    return tuple(first) if first and first[0] == tokenizer.bos_token_id else ()


def split_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """The tokens of the prompt with its context, (1, C) and (1, T), cut where the kept text begins.
    A token across the cut is kept.

    Raises:
        ValueError: the tokenizer is slow, or one side has no tokens.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"expected a fast tokenizer, which knows where each token begins in the text, got"
            f" {type(tokenizer).__name__}: encode the texts and use compute and generate"
        )
    text: Any = prompt.with_context
    encoded = tokenizer(text, add_special_tokens=not prompt.chat, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"]]
    count = next((place for place, end in enumerate(ends) if end > prompt.kept), len(ends))
    ids = torch.tensor([encoded["input_ids"]], dtype=torch.int64)
    if not 0 < count < ids.shape[1]:
        raise ValueError(
            "expected a context and a question of at least one token each, got"
            f" {prompt.with_context[: prompt.kept]!r} and {prompt.with_context[prompt.kept :]!r}"
        )
    return ids[:, :count], ids[:, count:]
