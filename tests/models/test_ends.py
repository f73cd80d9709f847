"""Where answers end, with the templates and configurations of well-known models."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.random_models import build
from support.word_tokenizer import VOCABULARY, word_tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast

from icl_patch import ContextPatcher, static
from icl_patch.evaluation.demo import three_continuations
from icl_patch.models.ends import answer_ends, chat_ends
from icl_patch.static.answers import answered

_OPENING = "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
_TURNS = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + END }}{% endfor %}"
LLAMA3 = _TURNS.replace("END", "'<|end|>'") + _OPENING
GEMMA = "{{ bos_token }}" + _TURNS.replace("m.content", "m.content | trim").replace(
    "END", "'<|end|>\n'"
)
GEMMA += _OPENING
PHI3 = (
    _TURNS.replace("END", "'<|end|>\n'")
    + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = _TURNS.replace("END", "(eos_token if m.role == 'assistant' else '')") + _OPENING
GLM4 = _TURNS.replace("+ END", "") + _OPENING
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
NO_ANSWERS = "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}" + LLAMA3
CASES = {  # template, the configuration's ends, those of a chat, those of a text
    "Llama 3": (LLAMA3, ["</s>", "<|end|>"], ["<|end|>", "</s>"], ["</s>", "<|end|>"]),
    "Gemma": (GEMMA, ["</s>", "<|end|>"], ["<|end|>", "</s>"], ["</s>", "<|end|>"]),
    "Phi-3": (PHI3, ["</s>", "<|user|>", "<|end|>"], ["<|end|>", "</s>", "<|user|>"], None),
    "the turn's end not configured": (LLAMA3, ["</s>"], ["<|end|>", "</s>"], ["</s>"]),
    "only the turn's end configured": (LLAMA3, ["<|end|>"], ["<|end|>"], ["<|end|>"]),
    "Mistral": (MISTRAL, ["</s>"], ["</s>"], ["</s>"]),
    "GLM-4": (GLM4, ["</s>", "<|user|>"], ["<|user|>", "</s>"], ["</s>", "<|user|>"]),
    "a template without ends": (PLAIN, ["</s>"], ["</s>"], ["</s>"]),
    "a template that takes no answers": (NO_ANSWERS, ["</s>"], ["</s>"], ["</s>"]),
    "an end with the id 0": (LLAMA3.replace("<|end|>", "<pad>"), ["</s>"], ["<pad>", "</s>"], None),
    "nothing configured": (PHI3, None, ["<|end|>"], ["</s>"]),
}


def ids(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> tuple[int, ...]:
    return tuple(tokenizer.convert_tokens_to_ids(tokens))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_answer_ends_as_the_template_writes_it(case: tuple) -> None:
    template, configured, of_chat, of_text = case
    tokenizer = word_tokenizer(template=template)
    config = GenerationConfig()
    config.eos_token_id = None if configured is None else [*ids(tokenizer, configured)]
    model: Any = SimpleNamespace(generation_config=config)
    assert answer_ends(model, tokenizer, chat=True) == ids(tokenizer, of_chat)
    assert answer_ends(model, tokenizer, chat=False) == ids(tokenizer, of_text or configured)
    assert chat_ends(model, tokenizer, chat=True)["eos_token_id"] == [*ids(tokenizer, of_chat)]
    assert chat_ends(model, tokenizer, chat=False) == {}
    given = {"system": "Be brief.", "answers": ["bleu"]}
    (example,) = static.examples(model, tokenizer, ["What is rain?"], **given)
    assert example.end == ids(tokenizer, of_chat)
    answer = tokenizer("bleu", add_special_tokens=False).input_ids
    assert example.answer == (*answer, *ids(tokenizer, of_chat[:1]))


def test_no_end_at_all() -> None:
    model: Any = SimpleNamespace(generation_config=None)
    assert answer_ends(model, word_tokenizer(template=PLAIN, eos=None), chat=True) == ()
    with pytest.raises(ValueError, match="a tokenizer without one: end="):
        static.examples(model, word_tokenizer(eos=None), ["q"], context="c")
    end = ids(word_tokenizer(), ["<|end|>"])
    (example,) = static.examples(model, word_tokenizer(eos=None), ["q"], context="c", end="<|end|>")
    assert example.end == end


@torch.no_grad()
def test_every_answer_to_a_chat_ends_with_its_turn() -> None:
    """Of a model that ends turns always, and whose configuration has another end alone."""
    model, tokenizer = build("llama", vocab_size=VOCABULARY), word_tokenizer(template=PHI3)
    (end,) = ids(tokenizer, ["<|end|>"])
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.lm_head.register_forward_hook(
        lambda _, __, logits: logits.index_fill(-1, torch.tensor([end]), 99)
    )
    given = {"question": "What is rain?", "system": "Be brief."}
    with ContextPatcher(model, tokenizer=tokenizer) as patcher:
        answer = patcher.ask(**given, max_new_tokens=4)
        chosen = patcher.ask(**given, max_new_tokens=2, eos_token_id=tokenizer.eos_token_id)
        prompt = torch.tensor([[1, 7, 9]])
        found = three_continuations(patcher, prompt, prompt[:, 1:], 4, chat=True)
    assert (answer.token_ids.tolist(), answer.text) == ([[end]], "")
    assert chosen.token_ids.tolist() == [[end, end]]
    assert {name: x.tolist() for name, x in found.items()} == {key: [[end]] for key in found}
    examples = static.examples(model, tokenizer, [given["question"]], system=given["system"])
    assert answered(model, examples, 4)[0].answer == (end,)
