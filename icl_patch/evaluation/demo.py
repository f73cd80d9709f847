"""The main job: answer with the context, without it, and with its patch; on the embedded model or
on any other.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.evaluation import embedded
from icl_patch.evaluation.embedded import Prompt
from icl_patch.evaluation.embedded.scoring import (
    LONGEST_ANSWER,
    answers,
    decode_answers,
)
from icl_patch.evaluation.loading import encode_contexts
from icl_patch.evaluation.verify import VerifyReport, verify
from icl_patch.layers.device_hooks import input_device
from icl_patch.models.prompts import make_prompt, split_ids
from icl_patch.patch.serialization import UPDATES
from icl_patch.patcher import ContextPatcher

DTYPES = (torch.float32, torch.bfloat16)
FEW_SHOT = (
    ("hot - cold\nbig - small\nfast - slow\nlight - dark\n", "old -"),
    ("cat -> cats\nbox -> boxes\ncity -> cities\nleaf -> leaves\n", "baby ->"),
    ("France: Paris\nJapan: Tokyo\nItaly: Rome\nEgypt: Cairo\n", "Germany:"),
)
"""Examples of a task, and a question, for any language model."""
CHATS = (
    ("You are a pirate. Talk like a pirate in every answer.", "What did you do today?"),
    ("Answer every question in French.", "What is the capital of Italy?"),
    ("Your name is Pip. You are a robot who waters plants.", "Who are you?"),
)
"""System messages, and a user's question, for models with a chat template."""
_CHAT_TOKENS = 24  # of an answer in a chat
_PLAIN: Any = {"skip_special_tokens": True}


@dataclass(frozen=True)
class Answers:
    """One held-out prompt and the three answers to it."""

    prompt: Prompt
    with_context: str
    without: str
    patched: str

    def texts(self) -> dict[str, str]:
        """The three answers by name."""
        return {"with_context": self.with_context, "without": self.without, "patched": self.patched}


@torch.no_grad()
def patched_answers(
    patcher: ContextPatcher, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> list[str]:
    """Greedy answers in which every token comes from a replay on the current token alone."""
    ids, mask = (x.to(input_device(patcher.model)) for x in encode_contexts(tokenizer, texts))
    return decode_answers(tokenizer, _patched_ids(patcher, ids, mask, LONGEST_ANSWER))


def _patched_ids(patcher: ContextPatcher, ids: Tensor, mask: Tensor, max_new_tokens: int) -> Tensor:
    """Greedy tokens (B, N) by steps of two passes, each replayed: where the replay of its patch on
    the current token alone prefers another token than the step, this token.
    """
    greedy: Any = {"max_new_tokens": max_new_tokens, "do_sample": False}
    tokens = []
    for step in patcher.generate(ids, context_mask=mask, mode="two_pass", **greedy):
        replayed = patcher.forward(step.patch.kept_ids, step.patch)[:, -1].argmax(-1)
        tokens.append(torch.where(replayed == step.logits.argmax(-1), step.token_ids, replayed))
    return torch.stack(tokens, 1)


@torch.no_grad()
def three_continuations(
    patcher: ContextPatcher, ids: Tensor, without_ids: Tensor, max_new_tokens: int
) -> dict[str, Tensor]:
    """Greedy tokens (1, N) after a prompt with its context, after one without it, and of the
    patched model: the fields of :class:`Answers` by name.

    ids: (1, C + T) int64. without_ids: (1, T').
    """

    def generated(prompt: Tensor) -> Tensor:
        generate: Any = patcher.model.generate
        options: Any = {"max_new_tokens": max_new_tokens, "do_sample": False}
        mask = torch.ones_like(prompt)
        return generate(prompt, attention_mask=mask, **options)[:, prompt.shape[1] :]

    mask = torch.ones_like(ids, dtype=torch.bool)
    return {
        "with_context": generated(ids),
        "without": generated(without_ids),
        "patched": _patched_ids(patcher, ids, mask, max_new_tokens),
    }


def three_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts_per_kind: int
) -> list[Answers]:
    """The answers to ``prompts_per_kind`` held-out prompts of every kind; the patch is exact."""
    groups = [embedded.held_out_prompts(kind, prompts_per_kind) for kind in embedded.KINDS]
    texts = [[prompt.context + prompt.question for prompt in group] for group in groups]
    with_context = [answers(model, tokenizer, of_kind) for of_kind in texts]
    without = [answers(model, tokenizer, [prompt.question for prompt in each]) for each in groups]
    with ContextPatcher(model, "exact", tokenizer=tokenizer) as patcher:
        patched = [patched_answers(patcher, tokenizer, of_kind) for of_kind in texts]
    return [
        Answers(*row)
        for of_kind in zip(groups, with_context, without, patched, strict=True)
        for row in zip(*of_kind, strict=True)
    ]


@dataclass(frozen=True)
class Encoded:
    """A prompt, and its tokens: (1, C) of the context and (1, T) of the question."""

    prompt: Prompt
    context_ids: Tensor
    question_ids: Tensor

    @property
    def ids(self) -> Tensor:
        """(1, C + T)."""
        return torch.cat([self.context_ids, self.question_ids], 1)


def prompts_for(tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    """:data:`FEW_SHOT`, and :data:`CHATS` if the tokenizer has a chat template that takes a system
    message: this is the context.
    """
    found = []
    for context, question in FEW_SHOT:
        ids = split_ids(tokenizer, make_prompt(tokenizer, question, context=context))
        found.append(Encoded(Prompt("few-shot", context, question, ""), *ids))
    for system, question in CHATS:
        try:
            chat = make_prompt(tokenizer, question, system=system)
        except ValueError:  # no template, or none with a system message
            break
        ids = split_ids(tokenizer, chat)
        found.append(Encoded(Prompt("chat", system, question, ""), *ids))
    return found


@torch.no_grad()
def answer_each(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[Encoded]
) -> list[Answers]:
    """The three answers to each prompt, one at a time; the patch is exact."""

    def decoded(prompt: Prompt, ids: Tensor) -> str:
        text = decode_answers(tokenizer, ids)[0]  # its first line
        return text if prompt.kind == "few-shot" else str(tokenizer.decode(ids[0], **_PLAIN))

    rows = []
    with ContextPatcher(model, "exact", tokenizer=tokenizer) as patcher:
        for one in prompts:
            ids, question_ids = (x.to(input_device(model)) for x in (one.ids, one.question_ids))
            found = three_continuations(patcher, ids, question_ids, _CHAT_TOKENS)
            texts = {name: decoded(one.prompt, answer) for name, answer in found.items()}
            rows.append(Answers(one.prompt, **texts))
    return rows


def up_to_the_end(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generated: list[int],
    *,
    one_line: bool,
) -> list[int]:
    """The tokens of an answer, its end of sequence or (``one_line``) its line end included."""
    assert model.generation_config is not None
    given = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(given if isinstance(given, list) else [given])}
    for number, token in enumerate(generated, 1):
        if token in ends or (one_line and "\n" in str(tokenizer.decode([token]))):
            return generated[:number]
    return generated


def verify_grid(
    context: list[str] | dict[str, Tensor],
    max_new_tokens: int,
    progress: Callable[[int, int], None] | None = None,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[VerifyReport]:
    """Verify a model, by default the embedded one, for every update and dtype."""
    grid = [(dtype, update) for dtype in DTYPES for update in UPDATES]
    reports = []
    for done, (dtype, update) in enumerate(grid, 1):
        options: Any = {"max_new_tokens": max_new_tokens, "update": update, "dtype": dtype}
        reports.append(verify(model, tokenizer, context=context, **options))
        if progress is not None:
            progress(done, len(grid))
    return reports


def first_of_each_kind(
    tokenizer: PreTrainedTokenizerBase, prompts: list[Encoded]
) -> dict[str, Tensor]:
    """A batch of the first prompt of each kind, with its mask."""
    first = {one.prompt.kind: one for one in reversed(prompts)}
    rows = [one.ids[0] for one in first.values()]
    pad = functools.partial(pad_sequence, batch_first=True, padding_side="left")
    return {
        "input_ids": pad(rows, padding_value=tokenizer.pad_token_id or 0),
        "attention_mask": pad([torch.ones_like(row) for row in rows]),
    }


def held_out_texts(count: int) -> list[str]:
    """Held-out prompts of the embedded model, as many of each kind."""
    per_kind = -(-count // len(embedded.KINDS))
    chosen = [
        prompt for kind in embedded.KINDS for prompt in embedded.held_out_prompts(kind, per_kind)
    ]
    return [prompt.context + prompt.question for prompt in chosen[:count]]
