"""Text in, text out: a context and a question give an answer and its patch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icl_patch.generation import loop
from icl_patch.generation.plans import StepPlans
from icl_patch.layers.device_hooks import input_device
from icl_patch.models.ends import chat_ends
from icl_patch.models.prompts import Question, make_prompt, split_ids
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording.sequences import assemble


@dataclass(frozen=True)
class Answer:
    """An answer and the patch that it can be replayed from without the context.

    Attributes:
        text: the answer, without special tokens.
        token_ids: (1, N) int64, the answer's tokens, its end of sequence included.
        patch: of the question's tokens and the answer's tokens but the last:
            ``patcher.forward(patch.kept_ids, patch)`` gives the answer's logits in its last N
            places.
    """

    text: str
    token_ids: Tensor
    patch: ContextPatch


def answer(
    plans: StepPlans,
    context: str | None,
    question: Question | None,
    *,
    system: str | None,
    chat: bool,
    max_new_tokens: int | None,
    **arguments: Any,
) -> Answer:
    """See :meth:`icl_patch.ContextPatcher.ask`."""
    attached = plans.attached
    if attached.tokenizer is None:
        raise ValueError(
            "expected ContextPatcher(model, tokenizer=...) for texts, got no tokenizer"
        )
    if question is None:
        raise TypeError("expected ask(context, question) or ask(question=..., system=...)")
    asked = make_prompt(attached.tokenizer, question, context=context, system=system, chat=chat)
    context_ids, question_ids = (
        ids.to(input_device(attached.model)) for ids in split_ids(attached.tokenizer, asked)
    )
    prompt = torch.cat([context_ids, question_ids], 1)
    if not {"eos_token_id", "generation_config"} & arguments.keys():
        arguments |= chat_ends(attached.model, attached.tokenizer, asked.chat)
    # in two passes, as the patch below is computed
    steps = loop.generate(plans, prompt, None, max_new_tokens, None, "two_pass", **arguments)
    token_ids = torch.stack([step.token_ids for step in steps], 1)
    if len(token_ids) != 1:
        raise ValueError(f"expected one answer, got num_return_sequences={len(token_ids)}")
    kept_ids = torch.cat([question_ids, token_ids[:, :-1]], 1)
    patch = attached.compute(assemble(context_ids, kept_ids)).patch
    text = str(attached.tokenizer.decode(token_ids[0], skip_special_tokens=True))
    return Answer(text, token_ids, patch)
