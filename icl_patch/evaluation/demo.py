"""The main job: answer with the context, without it, and with its patch; on the embedded model or
on any other.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.evaluation import embedded
from icl_patch.evaluation.embedded import Prompt
from icl_patch.evaluation.verify import VerifyReport, verify
from icl_patch.generation.settings import switched_off
from icl_patch.layers.device_hooks import input_device
from icl_patch.models.ends import chat_ends
from icl_patch.models.prompts import make_prompt, padded, split_ids
from icl_patch.patch.serialization import UPDATES
from icl_patch.patcher import ContextPatcher

GRID = [(dtype, update) for dtype in (torch.float32, torch.bfloat16) for update in UPDATES]
FEW_SHOT = (
    ("hot - cold\nbig - small\nfast - slow\nlight - dark\n", "old -"),
    ("cat -> cats\nbox -> boxes\ncity -> cities\nleaf -> leaves\n", "baby ->"),
    ("France: Paris\nJapan: Tokyo\nItaly: Rome\nEgypt: Cairo\n", "Germany:"),
)
"""Examples of a task, and a question, for any language model."""
PASSAGE = (
    "A lighthouse keeper named Ada lives on the island of Skarn. Every evening she feeds her three"
    " goats and lights the green lamp.\n\n",
    "Question: What is the keeper's name?\nAnswer:",
)
"""A text, and a question about it, for models without a chat template."""
CHATS = (
    ("You are a pirate. Talk like a pirate in every answer.", "What did you do today?"),
    ("Answer every question in French.", "What is the capital of Italy?"),
    ("Your name is Pip. You are a robot who waters plants.", "Who are you?"),
)
"""System messages, and a user's question, for models with a chat template."""
_ANSWER_TOKENS = 24  # as many as the longest answer of the embedded model's tasks


def held_out(count: int) -> list[Prompt]:
    """``count`` prompts that the embedded model was not trained on, as many of each kind."""
    per_kind = -(-count // len(embedded.KINDS))
    every = [embedded.held_out_prompts(kind, per_kind) for kind in embedded.KINDS]
    return [prompt for prompts in every for prompt in prompts][:count]


def prompts_for(tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """:data:`FEW_SHOT`, and :data:`CHATS` if the tokenizer has a chat template that takes a system
    message: this is the context; else :data:`PASSAGE`.
    """
    few_shot = [Prompt("few-shot", *texts, "") for texts in FEW_SHOT]
    chats = [Prompt("chat", *texts, "") for texts in CHATS]
    try:
        encoded(tokenizer, chats[0])
    except ValueError:  # no template, or none with a system message
        return [*few_shot, Prompt("passage", *PASSAGE, "")]
    return few_shot + chats


def encoded(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """The tokens of a prompt's context (1, C) and of its question (1, T)."""
    place: Any = {"system" if prompt.kind == "chat" else "context": prompt.context}
    return split_ids(tokenizer, make_prompt(tokenizer, prompt.question, **place))


@torch.no_grad()
def three_continuations(
    patcher: ContextPatcher,
    context_ids: Tensor,
    question_ids: Tensor,
    max_new_tokens: int,
    *,
    chat: bool,
    keep_first: int = 0,
) -> dict[str, Tensor]:
    """Greedy tokens (1, N) after a prompt with its context, without it, and of the patched model:
    ``with_context``, ``without`` and ``patched``.

    Without the context the unmodified model runs on the tokens that the patched model has too: the
    context's first ``keep_first`` tokens and the question.

    The patched model takes steps of two passes, each replayed: where the replay on the current
    token alone prefers another token than the step, this token counts.

    context_ids: (1, C) int64. question_ids: (1, T). chat: whether the answers end with the turn.
    """
    assert patcher.tokenizer is not None
    greedy: Any = {"max_new_tokens": max_new_tokens, "do_sample": False}
    greedy |= chat_ends(patcher.model, patcher.tokenizer, chat) | switched_off(patcher.model)

    def generated(prompt: Tensor) -> Tensor:
        generate: Any = patcher.model.generate
        out = generate(prompt, attention_mask=torch.ones_like(prompt), **greedy)
        return out[:, prompt.shape[1] :]

    ids, patched = torch.cat([context_ids, question_ids], 1), []
    given: Any = {"context_mask": torch.ones_like(ids), "keep_first": keep_first, **greedy}
    for step in patcher.generate(ids, mode="two_pass", **given):
        replayed = patcher.forward(step.patch.kept_ids, step.patch)[:, -1].argmax(-1)
        patched.append(torch.where(replayed == step.logits.argmax(-1), step.token_ids, replayed))
    return {
        "with_context": generated(ids),
        "without": generated(torch.cat([context_ids[:, :keep_first], question_ids], 1)),
        "patched": torch.stack(patched, 1),
    }


def answer_each(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    keep_first: int = 0,
) -> Iterator[dict[str, str]]:
    """The prompts with the three answers to each, one at a time; the patch is exact. An answer is
    its first line, in a chat all of it. ``front`` is the text of the tokens that stay.

    keep_first: as in :meth:`icl_patch.ContextPatcher.compute`.
    """
    decode: Any = tokenizer.decode
    with ContextPatcher(model, "exact", tokenizer=tokenizer) as patcher:
        for prompt in prompts:
            chat = prompt.kind == "chat"
            context, question = (x.to(input_device(model)) for x in encoded(tokenizer, prompt))
            found = three_continuations(
                patcher, context, question, _ANSWER_TOKENS, chat=chat, keep_first=keep_first
            )
            texts = {key: decode(x[0], skip_special_tokens=True) for key, x in found.items()}
            if not chat:
                texts = {key: text.split("\n", 1)[0] for key, text in texts.items()}
            front = decode(context[0, :keep_first])
            yield {**vars(prompt), "front": front, **texts}


def verify_grid(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    max_new_tokens: int,
    keep_first: int = 0,
) -> Iterator[VerifyReport]:
    """Verify prompts together, for every dtype and update of :data:`GRID`."""
    rows = [torch.cat(encoded(tokenizer, prompt), 1)[0] for prompt in prompts]
    context = dict(zip(("input_ids", "attention_mask"), padded(rows, "left"), strict=True))
    for dtype, update in GRID:
        options: Any = {"max_new_tokens": max_new_tokens, "update": update, "dtype": dtype}
        options["keep_first"] = keep_first
        yield verify(model, tokenizer, context=context, **options)
