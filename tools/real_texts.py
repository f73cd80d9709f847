"""Real text as batches of tokens: the repository's own pages and sources, and chats."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[1]
CHATS = (
    "What is the capital of Finland, and what is it known for?",
    "Write a haiku about the first snow of the year.",
    "My bread does not rise. The yeast is fresh, the water was boiling. What went wrong?",
    "Translate into French: The train to Lyon leaves at half past seven.",
    "Explain to a child of eight why the sky is blue.",
    "List five things to check before a long bicycle tour.",
    "A shop sells three pens for two euros. How much do twelve pens cost? Show the steps.",
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "Which planet of the solar system has the shortest day?",
    "Summarise in one sentence: Bees collect nectar and pollen. On the way they carry pollen from"
    " flower to flower, so that fruit and seeds can grow. Without them many plants would die out.",
    "Give me a polite way to say that I cannot come to the meeting on Thursday.",
    "What is the difference between weather and climate?",
    "Name three uses of copper and the property that each of them needs.",
    "Is 91 a prime number? Answer yes or no, then give the reason.",
    "Write the first paragraph of a story that begins in a lighthouse.",
    "How do I undo the last commit in git without losing my changes?",
)


@dataclass(frozen=True)
class Case:
    """Contexts of ``rows`` rows and the tokens that follow them.

    Attributes:
        source: ``"pages"``, ``"sources"`` or ``"chats"``.
        context: tokens of the longest context; chats have the length that they have.
        padded: whether the rows have different lengths. Chats are padded in any case.
        steps: tokens after the context, of every row.
    """

    source: str
    rows: int
    context: int
    padded: bool
    steps: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Contexts (B, C), left-padded, with their mask; the tokens (B, N) that follow, or None if the
    model is to choose them; and the mask (B, N) of those tokens when they are computed at once.
    """

    ids: Tensor
    mask: Tensor
    tokens: Tensor | None
    kept_mask: Tensor


def batch_of(case: Case, number: int, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """The batch of the ``number``-th case. Cases of different numbers have different texts."""
    rows, steps = range(case.rows), case.steps
    short = [(row * 5) % steps // 2 if case.padded else 0 for row in rows]
    kept_mask = torch.arange(steps) < torch.tensor([steps - less for less in short])[:, None]
    if case.source == "chats":
        chats = [CHATS[(number + row) % len(CHATS)] for row in rows]
        return Batch(*_left_padded([_chat(text, tokenizer) for text in chats]), None, kept_mask)
    text = _text(case.source, tokenizer)
    room = len(text) - case.context - steps
    if room < 1:
        raise ValueError(f"expected more than {case.context + steps} tokens, got {len(text)}")
    starts = [(number * 7919 + row * 1009) % room for row in rows]
    cuts = [row * case.context // (2 * case.rows) if case.padded else 0 for row in rows]
    ids, mask = _left_padded(
        [text[start + cut : start + case.context] for start, cut in zip(starts, cuts, strict=True)]
    )
    following = [text[start + case.context :][:steps] for start in starts]
    return Batch(ids, mask, torch.stack(following), kept_mask)


def _left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    return ids, torch.arange(ids.shape[1]) >= ids.shape[1] - lengths


def _chat(text: str, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """A question as the tokenizer's chat template writes it, up to the answer; as it is where there
    is no template.
    """
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]


@cache
def _text(source: str, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The tokens of all pages or all Python sources, one file after another."""
    if source == "pages":
        files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    else:
        files = [*(ROOT / "icl_patch").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
