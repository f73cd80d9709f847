"""The tokens that end an answer."""

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.models.prompts import Tokens, encode

_ANSWER = "\ufdd0"  # Unicode keeps it out of texts: it marks the assistant's words


def configured_ends(model: PreTrainedModel) -> Tokens:
    """The ids at which the model's generation configuration ends an answer."""
    ids: Any = model.generation_config.eos_token_id if model.generation_config else None
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def answer_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat: bool) -> Tokens:
    """The ids that end an answer; first the one that is put behind a given answer.

    That one is, in a chat, the token that the template writes behind the assistant's words. In a
    text, or where a template writes none, it is the tokenizer's end of sequence, unless the model's
    generation configuration has other ends and not this one: then it is the first of those.
    """
    configured = configured_ends(model)
    own: int | None = _end_of_turn(tokenizer, configured) if chat else None
    eos = tokenizer.eos_token_id
    if own is None and (eos in configured or not configured):
        own = eos
    return tuple(dict.fromkeys(end for end in (own, *configured) if end is not None))


def chat_ends(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat: bool
) -> dict[str, Any]:
    """The argument with which ``generate`` ends an answer in a chat with the assistant's turn; none
    for a text, nor if there is no such end. The model's configuration may lack the turn's.
    """
    ends = answer_ends(model, tokenizer, chat) if chat else ()
    return {"eos_token_id": list(ends)} if ends else {}


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, configured: Tokens) -> int | None:
    """The special token that the template writes behind the assistant's words; else the one that
    begins the user's next turn, if the model's generation ends there (GLM-4).
    """
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for messages, ends in ((turns, special), ([*turns, turns[0]], {*configured})):
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateError:  # it takes no answer, or none as the last message
            continue
        behind = encode(tokenizer, text.partition(_ANSWER)[2])
        if found := [token for token in behind if token in ends]:
            return found[0]
    return None
