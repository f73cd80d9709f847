"""Text in, text out: a context and a question give an answer and its patch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from icl_patch.generation import loop
from icl_patch.generation.decoder import Decoder
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
    decoder: Decoder,
    context: str,
    question: str,
    *,
    chat: bool,
    max_new_tokens: int | None,
    **arguments: Any,
) -> Answer:
    """See :meth:`icl_patch.ContextPatcher.ask`."""
    attached = decoder.attached
    if attached.tokenizer is None:
        raise ValueError(
            "expected ContextPatcher(model, tokenizer=...) for texts, got no tokenizer"
        )
    context_ids, question_ids = (
        ids.to(attached.model.device)
        for ids in encode_pair(attached.tokenizer, context, question, chat)
    )
    prompt = torch.cat([context_ids, question_ids], 1)
    options = loop.Options(patches=False, arithmetic="model")  # as the patch below is computed
    steps = loop.generate(decoder, prompt, None, max_new_tokens, None, options, **arguments)
    token_ids = torch.stack([step.token_ids for step in steps], 1)
    if len(token_ids) != 1:
        raise ValueError(f"expected one answer, got num_return_sequences={len(token_ids)}")
    kept_ids = torch.cat([question_ids, token_ids[:, :-1]], 1)
    patch = attached.compute(assemble(context_ids, kept_ids)).patch
    text = str(attached.tokenizer.decode(token_ids[0], skip_special_tokens=True))
    return Answer(text, token_ids, patch)


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, context: str, question: str, chat: bool
) -> tuple[Tensor, Tensor]:
    """The tokens of ``context + question``, (1, C) and (1, T), cut where the question begins.

    A token across the cut belongs to the question. With ``chat`` both stand in one user's turn of
    the chat template; tokens that the template puts before them join the context.

    Raises:
        ValueError: the tokenizer has no chat template or is slow; or one side has no tokens.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"expected a fast tokenizer, which knows where each token begins in the text, got"
            f" {type(tokenizer).__name__}: encode the texts and use compute and generate"
        )
    if chat and not tokenizer.chat_template:
        raise ValueError(
            f"expected a tokenizer with a chat template, {type(tokenizer).__name__} has none"
        )
    if not (isinstance(context, str) and isinstance(question, str)):
        kinds = f"{type(context).__name__} and {type(question).__name__}"
        raise TypeError(f"expected a context and a question as text, got {kinds}")
    text, cut = context + question, len(context)
    if chat:
        turn = [{"role": "user", "content": text}]
        text = str(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))
        cut = text.rindex(question.strip())  # templates may strip a turn
    encoded = tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"]]
    count = next((place for place, end in enumerate(ends) if end > cut), len(ends))
    ids = torch.tensor([encoded["input_ids"]], dtype=torch.int64)
    if not 0 < count < ids.shape[1]:
        raise ValueError(
            "expected a context and a question of at least one token each, got"
            f" {context!r} and {question!r}"
        )
    return ids[:, :count], ids[:, count:]
