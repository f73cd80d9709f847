"""The embedded model and its tasks: the split is clean, the answers need the context, and a patch
carries it.
"""

import random

import pytest
import torch

from icl_patch import embedded
from icl_patch.evaluation import demo
from icl_patch.evaluation.embedded import tasks
from icl_patch.evaluation.loading import encode_contexts
from tools.train_embedded import build_tokenizer, train


@pytest.fixture(scope="module")
def training_text() -> str:
    """Five thousand of the documents that training draws."""
    rng = random.Random(0)
    return "\x00".join(tasks.training_document(rng)[0] for _ in range(5_000))


@pytest.mark.parametrize("kind", embedded.KINDS)
def test_held_out_prompts_are_distinct_and_not_in_the_training_data(
    kind: str, training_text: str
) -> None:
    prompts = embedded.held_out_prompts(kind, 200)
    assert len({(prompt.context, prompt.question) for prompt in prompts}) == 200
    assert prompts == embedded.held_out_prompts(kind, 200)
    for prompt in prompts:
        assert prompt.kind == kind and prompt.answer and "\n" not in prompt.answer
        assert prompt.question not in training_text


def test_training_is_deterministic() -> None:
    """Two runs of the script give the same bits; another seed gives others."""
    first, again, other = (train(2, 4, seed)[0].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def right_answers(kind: str, with_context: bool) -> float:
    """The share of 40 held-out prompts to which the shipped model gives the whole answer."""
    model, tokenizer = embedded.load()
    prompts = embedded.held_out_prompts(kind, 40)
    texts = [prompt.context * with_context + prompt.question for prompt in prompts]
    ids, mask = encode_contexts(tokenizer, texts)
    out = model.generate(ids, attention_mask=mask.long(), max_new_tokens=24, do_sample=False)
    answers = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    pairs = zip(answers, prompts, strict=True)
    return sum(text.startswith(f"{x.answer}\n") for text, x in pairs) / len(prompts)


def test_the_shipped_model_needs_its_context() -> None:
    """Whole answers: at least 90 % of every kind and 95 % overall with the context, near chance
    without. And its file is small.
    """
    files = list(embedded.MODEL_DIR.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    shares = {kind: right_answers(kind, with_context=True) for kind in embedded.KINDS}
    assert min(shares.values()) >= 0.90
    assert sum(shares.values()) / len(shares) >= 0.95
    for kind in embedded.KINDS:
        assert right_answers(kind, with_context=False) <= embedded.CHANCE[kind] + 0.1


CHAT_ML = (
    "{% if messages[0]['role'] != 'system' %}<s>system\nAssist.</s>\n{% endif %}"
    "{% for turn in messages %}<s>{{ turn['role'] }}\n{{ turn['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def test_prompts_for_any_model_are_cut_before_the_users_turn() -> None:
    tokenizer = build_tokenizer()
    assert {prompt.kind for prompt in demo.prompts_for(tokenizer)} == {"few-shot", "passage"}
    tokenizer.chat_template = CHAT_ML
    chats = [prompt for prompt in demo.prompts_for(tokenizer) if prompt.kind == "chat"]
    assert [(prompt.context, prompt.question) for prompt in chats] == list(demo.CHATS)
    for chat in chats:
        texts = [tokenizer.decode(ids[0]) for ids in demo.encoded(tokenizer, chat)]
        turn = f"<s>user\n{chat.question}</s>\n<s>assistant\n"
        assert texts == [f"<s>system\n{chat.context}</s>\n", turn]
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"  # takes no system message
    assert {prompt.kind for prompt in demo.prompts_for(tokenizer)} == {"few-shot", "passage"}
