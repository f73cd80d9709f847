"""Text in, text out: a context and a question give an answer and its patch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch.generation.sampling_loop import GenerationStep
from icl_patch.generation.settings import setting
from icl_patch.layers.device_hooks import input_device
from icl_patch.models.ends import chat_ends
from icl_patch.models.forward import further_inputs
from icl_patch.models.prompts import Question, make_prompt, split_ids
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.recording.attached_model import AttachedModel
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
    attached: AttachedModel,
    generate: Callable[..., Iterator[GenerationStep]],
    context: str | None,
    question: Question | None,
    *,
    system: str | None,
    chat: bool,
    keep_first: int,
    **arguments: Any,
) -> Answer:
    """See :meth:`icl_patch.ContextPatcher.ask`; ``generate`` takes the prompt's ids and the
    arguments.
    """
    if attached.tokenizer is None:
        raise ValueError(
            "expected ContextPatcher(model, tokenizer=...) for texts, got no tokenizer"
        )
    if question is None:
        raise TypeError("expected ask(context, question) or ask(question=..., system=...)")
    _check_arguments(attached.model, arguments)
    asked = make_prompt(attached.tokenizer, question, context=context, system=system, chat=chat)
    context_ids, question_ids = (
        ids.to(input_device(attached.model)) for ids in split_ids(attached.tokenizer, asked)
    )
    if not {"eos_token_id", "generation_config"} & arguments.keys():
        arguments |= chat_ends(attached.model, attached.tokenizer, asked.chat)
    prompt_ids = torch.cat([context_ids, question_ids], 1)
    mask = torch.ones_like(prompt_ids)  # a text may hold the padding id
    steps = generate(prompt_ids, context_mask=mask, keep_first=keep_first, **arguments)
    token_ids = torch.stack([step.token_ids for step in steps], 1)
    kept_ids = torch.cat([question_ids, token_ids[:, :-1]], 1)
    patch = attached.compute(assemble(context_ids, kept_ids, keep_first=keep_first)).patch
    text = str(attached.tokenizer.decode(token_ids[0], skip_special_tokens=True))
    return Answer(text, token_ids, patch)


def _check_arguments(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Raises TypeError for inputs of the model, which a text is, and ValueError for several answers
    to one question.
    """
    inputs = {"input_ids", "attention_mask", "context_mask", *further_inputs(model)}
    if beside := [name for name in arguments if name in inputs]:
        raise TypeError(
            f"expected texts and arguments of a generation, got {', '.join(beside)}: give these and"
            " the ids to generate, or to compute"
        )
    if (count := setting(model, arguments, "num_return_sequences")) not in (None, 1):
        raise ValueError(
            f"expected one answer, got num_return_sequences={count}: pass num_return_sequences=1"
            " and ask again for another answer, or give the ids to generate"
        )
