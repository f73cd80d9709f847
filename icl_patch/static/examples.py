"""Examples of a context's effect: prompts with the context, the same without it, and answers."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from operator import index
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.errors import StaticPatchWarning
from icl_patch.layers.device_hooks import input_device
from icl_patch.models.ends import answer_ends
from icl_patch.models.language_model import check_length, check_vocabulary, vocabulary
from icl_patch.models.model_checks import check_eval
from icl_patch.models.prompts import Question, Tokens, encode, make_prompt, own_front, padded
from icl_patch.texts import check_text

ROW_TOKENS = 8192  # of a batch without gradients: bounds its memory
_T = TypeVar("_T")
_FRONT_TEXTS = 4  # by which the token before a text is chosen


@dataclass(frozen=True)
class Example:
    """A prompt as the model sees it with the context and without it, and the answer with it.

    With a static patch, ``without`` should get the answers of ``with_context``. The two may differ
    in any way: in a chat the context may replace the template's own system message.

    Attributes:
        with_context, without: the ids of the prompt.
        answer: the ids of the answer, with its last token; None means the model's own greedy answer
            with the context.
        end: ids that end an answer; if empty, those of the model's generation configuration.
        end_is_guessed: whether ``end`` is only a guess, as for a text without ``end=``.

    Raises:
        ValueError: one of them is empty, or no row of ids.
    """

    with_context: Tokens
    without: Tokens
    answer: Tokens | None = None
    end: Tokens = ()
    end_is_guessed: bool = False

    def __post_init__(self) -> None:
        for name in ("with_context", "without", "answer", "end"):
            ids = getattr(self, name)
            optional = ids is None and name == "answer"
            object.__setattr__(self, name, None if optional else as_ids(name, ids))
        if not self.with_context or not self.without or self.answer == ():
            lengths = len(self.with_context), len(self.without)
            raise ValueError(
                f"expected two prompts and an optional answer, none of them empty, got {lengths[0]}"
                f" and {lengths[1]} tokens and the answer {self.answer}"
            )


def as_ids(name: str, ids: Any) -> Tokens:
    """Ids of a list, an array or a tensor as integers, which can be compared and written to JSON.

    Raises:
        ValueError: they are no row of integers.
    """
    try:
        return tuple(map(index, ids.tolist() if hasattr(ids, "tolist") else ids))
    except TypeError as error:
        raise ValueError(
            f"expected {name} as one row of integer ids, got {ids!r:.80}: of a batch (B, T) give"
            " each row by itself, and encode texts with a tokenizer, as static.examples and"
            " static.documents do"
        ) from error


def examples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    context: str | None = None,
    system: str | None = None,
    chat: bool = False,
    answers: Sequence[str] | None = None,
    end: str | None = None,
) -> list[Example]:
    """Make an example of each question, from texts or chats.

    Args:
        model, tokenizer: a text begins with the token that :func:`front` chooses for them. A chat
            begins as the template writes it.
        questions: texts, or chats of several messages.
        context: the text before a question; with ``chat`` it begins the user's first message.
        system: the system message of a chat. Give either it or ``context``; see
            :func:`icl_patch.models.prompts.make_prompt`.
        answers: a text for each question; by default the model answers.
        end: the single token that ends an answer; it is added to the given answers. By default
            :func:`icl_patch.models.ends.answer_ends`: in a chat the end of the template's turn.

    Raises:
        ValueError: questions or answers are not lists; ``end`` is not one token; or as
            :func:`icl_patch.models.prompts.make_prompt`.
        TypeError: one of the texts is not a string.
    """
    if isinstance(questions, str) or isinstance(answers, str):
        raise ValueError(
            f"expected lists of questions and answers, got {questions!r:.40} and {answers!r:.40}"
        )
    if not questions or (answers is not None and len(answers) != len(questions)):
        raise ValueError(
            f"expected at least one question, and no answers or one for each, got {len(questions)}"
            f" and {0 if answers is None else len(answers)}"
        )
    prompts = [
        make_prompt(tokenizer, question, context=context, system=system, chat=chat)
        for question in questions
    ]
    kinds = {prompt.chat for prompt in prompts}
    ends = {in_chat: _ends(model, tokenizer, end, in_chat) for in_chat in kinds}
    before = {True: (), False: front(model, tokenizer) if False in kinds else ()}
    texts = [None] * len(prompts) if answers is None else answers
    found = []
    for prompt, answer in zip(prompts, texts, strict=True):
        with_context, without = (
            (*before[prompt.chat], *encode(tokenizer, text))
            for text in (prompt.with_context, prompt.without)
        )
        ids = None
        if answer is not None:
            ids = (*_behind(tokenizer, prompt.with_context, answer), ends[prompt.chat][0])
        is_guessed = end is None and not prompt.chat
        found.append(Example(with_context, without, ids, ends[prompt.chat], is_guessed))
    return found


def _ends(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, end: str | None, chat: bool
) -> Tokens:
    """The ids that end an answer, at least one; the first is put behind the given answers."""
    if end is None:
        if ends := answer_ends(model, tokenizer, chat):
            return ends
        raise ValueError(
            "expected the token that ends an answer, got a tokenizer without one: end="
        )
    if len(ends := encode(tokenizer, end)) != 1:
        raise ValueError(f"expected an end of one token, got {end!r}, which is {len(ends)}")
    return ends


def _behind(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> Tokens:
    """The ids of an answer as they follow those of the prompt, with a warning if a token spans
    both: the model does not write the answer so.
    """
    check_text(answer)
    ids, whole = encode(tokenizer, prompt), encode(tokenizer, prompt + answer)
    if whole[: len(ids)] == ids:
        return whole[len(ids) :]
    warnings.warn(
        f"a token spans the prompt's end, {prompt[-20:]!r}, and the answer's beginning,"
        f" {answer[:20]!r}, so the model would not write this answer: let the question end where a"
        " word ends, and the answer begin with the space",
        StaticPatchWarning,
        stacklevel=3,
    )
    return encode(tokenizer, answer)


def documents(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[Tokens]:
    """Texts as ids after the token that stays in front, for ``preserve`` of a fit."""
    first = front(model, tokenizer)
    return [(*first, *encode(tokenizer, text)) for text in texts]


@torch.no_grad()
def front(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """The tokens to put before every text; empty without special tokens.

    Trained models give most of their attention to the first token. A token that stays in front
    keeps this attention in its place, with a context and without it. If the question's first token
    gets this attention, a fit destroys it. The tokens are those that the tokenizer adds by itself.
    If it adds none, it is the special token after which the model finds a few texts most likely,
    such as the one that separated the documents in training.

    Raises:
        ValueError: the tokenizer adds none, and the model is training.
    """
    if own := own_front(tokenizer):
        return own
    check_eval(model.modules())
    rows = [encode(tokenizer, text) for text in preserved_texts()[:_FRONT_TEXTS]]

    def surprise(token: int) -> float:
        ids = pad([(token, *row) for row in rows], input_device(model))
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        total = 0.0
        for row, own in zip(logits, rows, strict=True):  # all but the first token of each text
            labels = torch.tensor(own[1:], device=row.device)
            total += float(F.cross_entropy(row[1 : len(own)].float(), labels, reduction="sum"))
        return total

    known = range(vocabulary(model))
    special: list[int] = sorted(token for token in set(tokenizer.all_special_ids) if token in known)
    return (min(special, key=surprise),) if special else ()


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Right-padded ids (B, T)."""
    return padded(rows, "right")[0].to(device)


def preserved_texts() -> list[str]:
    """A hundred short texts of many kinds, shipped with the package."""
    content = files("icl_patch.static").joinpath("preserved_texts.txt").read_text(encoding="utf-8")
    return content.strip().split("\n\n")


def check_row(model: PreTrainedModel, row: Sequence[int], new: int = 0) -> None:
    """Raises ValueError unless the model has the ids of a row, and positions for the row and
    ``new`` tokens after it.
    """
    ids = torch.tensor([list(row)])
    check_vocabulary(model, ids, torch.ones_like(ids, dtype=torch.bool))
    check_length(model, ids.shape[1] - 1, new)  # the last token may be an answer's end: no input


def batches(
    items: Sequence[_T],
    length: Callable[[_T], int],
    kind: Callable[[int], int] = lambda _: 0,
    *,
    count: int | None = None,
    tokens: int = ROW_TOKENS,
) -> list[list[_T]]:
    """The items, sorted by length, in groups of at most ``count`` items and ``tokens`` tokens,
    padding included. The lengths of a group are of one kind.
    """
    groups: list[list[_T]] = []
    for item in items:
        longest = length(item)
        if (
            not groups
            or len(groups[-1]) == count
            or (len(groups[-1]) + 1) * longest > tokens
            or kind(longest) != kind(length(groups[-1][0]))
        ):
            groups.append([])
        groups[-1].append(item)
    return groups
