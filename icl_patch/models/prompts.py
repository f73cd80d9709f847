"""Prompts with a context and without it: text or chats, as text and as token ids."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from icl_patch.texts import check_text

Tokens = tuple[int, ...]
Messages = Sequence[Mapping[str, str]]
Question = str | Messages

# Characters that Unicode keeps out of texts: they mark two places while a template writes a chat.
_END, _BEGIN = "\ufdd0", "\ufdd1"
_ANY_TEXT = "a 0"  # which every tokenizer has tokens for


@dataclass(frozen=True)
class Prompt:
    """A prompt with its context and the same prompt without it.

    Attributes:
        with_context, without: the two texts.
        kept: the place in ``with_context`` behind the context, from which the text stays if a patch
            for each token takes the context's place.
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
    message of their own, such as Qwen 2.5's, then write that one. The kept text of a chat begins
    with the turn behind the system message, or with the user's words if the template writes both
    into one turn (Gemma 3, Mistral).

    Args:
        question: text, or a chat's messages, ``[{"role": "user", "content": ...}, ...]``. The first
            and the last are the user's.
        context, system: one of them.

    Raises:
        ValueError: there is no context or more than one; an empty question; or the tokenizer has no
            chat template, or one that takes no system message or leaves the context out.
        TypeError: the context is no text, or the question neither text nor messages.
    """
    if (context is None) is (system is None):
        given = "none" if context is None else "both"
        raise ValueError(f"expected either a context or a system message, got {given}")
    text = context if system is None else system
    check_text(text)
    assert text is not None
    if not isinstance(question, Sequence):
        raise TypeError(
            f"expected a question as text, or as messages, got {question!r:.40}"
            f" ({type(question).__name__})"
        )
    if not text or not question:
        raise ValueError(
            "expected a context and a question of at least one token each, got"
            f" {text!r:.40} and {question!r:.40}"
        )
    if isinstance(question, str) and system is None and not chat:
        return Prompt(text + question, question, len(text), chat=False)
    messages = _messages(question)
    without = chat_text(tokenizer, messages)
    if system is not None:
        with_context = chat_text(tokenizer, messages, system)
        kept = _end_of_system(tokenizer, system, messages, with_context)
    else:
        words = messages[0]["content"]

        def beginning(begin: str) -> str:
            return chat_text(tokenizer, [{**messages[0], "content": begin + words}, *messages[1:]])

        with_context = beginning(text)
        kept = beginning(text + _BEGIN).index(_BEGIN)
        if with_context == without:
            raise ValueError(f"expected a context that the chat template writes, got {text!r:.40}")
    return Prompt(with_context, without, kept, chat=True)


def chat_text(
    tokenizer: PreTrainedTokenizerBase, question: Question, system: str | None = None
) -> str:
    """A chat up to the place where the assistant answers: a user's message or several messages,
    behind a system message if one is given.

    Raises:
        ValueError: the tokenizer has no chat template, or one that refuses these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"expected a tokenizer with a chat template, {type(tokenizer).__name__} has none: leave"
            " out chat and system, and give the context as text"
        )
    messages = _messages(question)
    cure = (
        ". Leave out chat and system, and give as text what the template would write: the context,"
        " and the question with the turn behind it"
    )
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
        cure = (
            ". Give the system message as the context of a chat, context=... with chat=True"
            " (--context with --chat), which puts it before the user's words"
        )
    roles = ", ".join(message["role"] for message in messages)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(
            f"expected a chat template that takes messages of {roles}, got one that refuses them:"
            f" {str(error).rstrip('.')}{cure}"
        ) from error
    if messages[0]["content"].strip() not in text:
        raise ValueError(
            f"expected a chat template that writes the {messages[0]['role']} message as it is, got"
            f" one without it: {text!r:.120}{cure}"
        )
    return str(text)


def _messages(question: Question) -> list[dict[str, str]]:
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    known = all(
        isinstance(message, Mapping)
        and set(message) == {"role", "content"}
        and isinstance(message["content"], str)
        for message in question
    )
    if not known or (question[0]["role"], question[-1]["role"]) != ("user", "user"):
        raise ValueError(
            "expected messages with a role and a content of text, the first and the last of the"
            f" user (a system message is an argument of its own, system), got {question!r:.120}"
        )
    return [dict(message) for message in question]


def _end_of_system(
    tokenizer: PreTrainedTokenizerBase,
    system: str,
    messages: Sequence[Mapping[str, str]],
    with_context: str,
) -> int:
    """The place behind the system message: the end of its own turn, else the user's next words."""
    # marks do not hide from a template the whitespace that it may strip
    marked = re.sub(r"\s*\Z", _END + r"\g<0>", system, count=1)
    users = [
        {**message, "content": re.sub(r"(?=\S|\Z)", _BEGIN, message["content"], count=1)}
        if message["role"] == "user"
        else message
        for message in messages
    ]
    try:
        turn = {"role": "system", "content": system}
        alone = str(tokenizer.apply_chat_template([turn], tokenize=False))
    except TemplateError:
        alone = ""
    if alone and system.strip() in alone and with_context.startswith(alone):
        return len(alone)
    before, _, behind = chat_text(tokenizer, users, marked).partition(_END)
    between, found, _ = behind.partition(_BEGIN)
    if not found:
        raise ValueError(
            "expected a chat template that writes the system message before the user's last one,"
            f" got {with_context!r:.120}"
        )
    return len(before.replace(_BEGIN, "")) + len(between)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, front: bool = False) -> Tokens:
    """The ids of a text that the model is to continue, with ``front`` behind :func:`own_front`.

    A token that the tokenizer puts behind a text by itself, such as ``</s>``, is left out: the
    model would answer behind the end.

    Raises:
        ValueError: UTF-8 cannot encode the text.
    """
    check_text(text)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return (*(own_front(tokenizer) if front else ()), *ids)


def padded(rows: Sequence[Sequence[int] | Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows of ids as one batch, padded with 0 on the ``"left"`` or ``"right"``, and its mask:
    (B, T) int64 and bool.
    """
    ids = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    masks = [torch.ones_like(row, dtype=torch.bool) for row in ids]
    return pad_sequence(ids, True, padding_side=side), pad_sequence(masks, True, padding_side=side)


def own_front(tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The tokens, such as ``<bos>``, that the tokenizer puts before every text by itself."""
    encoded = tokenizer(_ANY_TEXT, return_special_tokens_mask=True)
    special = [*encoded["special_tokens_mask"], 0]
    return tuple(encoded["input_ids"][: special.index(0)])


def check_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a slow tokenizer: it does not know where in a text a token begins."""
    if not tokenizer.is_fast:
        raise ValueError(
            "expected a fast tokenizer, which knows where in a text a token begins, to cut a prompt"
            f" behind its context, got {type(tokenizer).__name__}, which is slow: give the model's"
            " folder a tokenizer.json, or in Python give ids, context_ids and kept_ids, to compute"
        )


def split_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """The tokens of the prompt with its context, (1, C) and (1, T), cut where the kept text begins:
    together those of :func:`encode`. A token across the cut is kept.

    Raises:
        ValueError: one side has no tokens; or as :func:`encode` and :func:`check_offsets`.
    """
    check_offsets(tokenizer)
    text, at = prompt.with_context, prompt.kept
    check_text(text)
    # of long texts the tokenizer warns where we raise an error
    options: Any = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    encoded = tokenizer(text, **options)
    ids, ends = encoded["input_ids"], [end for _, end in encoded["offset_mapping"]]
    cut = next((i for i, end in enumerate(ends) if end > at), len(ends))
    if not any(ends[:cut]) or not any(ends[cut:]):
        raise ValueError(
            "expected a context and a question of at least one token each, got"
            f" {text[:at]!r} and {text[at:]!r}, which share a token: let each end where a word ends"
        )
    first = () if prompt.chat else own_front(tokenizer)
    return torch.tensor([[*first, *ids[:cut]]]), torch.tensor([ids[cut:]])
