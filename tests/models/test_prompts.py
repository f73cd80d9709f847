"""Prompts from texts and chats, with templates of well-known models, against what they write."""

import importlib.util

import pytest
import torch
from support.random_models import build
from support.word_tokenizer import VOCABULARY, word_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from icl_patch import static
from icl_patch.evaluation import demo
from icl_patch.evaluation.embedded import Prompt
from icl_patch.evaluation.loading import encode_contexts
from icl_patch.models.prompts import chat_text, encode, make_prompt, own_front, split_ids
from tools.train_embedded import build_tokenizer

OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
SMOLLM2 = (
    "{% for m in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}" + OPENING
)
# Qwen 3.5 refuses a system message alone.
STRICT_QWEN = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found') }}{% endif %}" + SMOLLM2
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set front = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set front = '' %}{% set turns = messages %}{% endif %}{% for m in turns %}"
    "{% set name = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<turn>' + name + '\n' + (front if loop.first else '') + m.content | trim + '</turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}{{ bos_token }}"
    "{% for m in turns %}{% if m.role == 'user' %}"
    "{% if loop.last and system is defined %}{{ '[INST] ' + system + '\n\n' + m.content }}"
    "{% else %}{{ '[INST] ' + m.content }}{% endif %}{{ '[/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
STRIPPING = "{% for m in messages %}{{ m.content.strip() }}|{% endfor %}"
SYSTEM = "Talk like a pirate."
QUESTION = "Who are you?"
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": QUESTION},
]


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.eos_token = "</s>"
    return tokenizer


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of a text by themselves."""
    return tokenizer(text, add_special_tokens=False).input_ids


def chatml(*turns: str) -> str:
    """Turns of ChatML, each ``role text``, and the opening of the answer."""
    lines = [f"<|im_start|>{turn.replace(' ', chr(10), 1)}<|im_end|>\n" for turn in turns]
    return "".join(lines) + "<|im_start|>assistant\n"


ASK = f"user {QUESTION}"
GEMMA_END = f"{QUESTION}</turn>\n<turn>model\n"
SYSTEM_CASES = {  # template: what stands before the kept text, the kept text, without the context
    "smollm2": (
        SMOLLM2,
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n",
        chatml(ASK),
        chatml("system You are SmolLM.", ASK),
    ),
    "strict qwen": (
        STRICT_QWEN,
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n",
        f"{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
        chatml("system You are SmolLM.", ASK),
    ),
    "gemma 3": (
        GEMMA,
        f"<bos><turn>user\n{SYSTEM}\n\n",
        GEMMA_END,
        f"<bos><turn>user\n{GEMMA_END}",
    ),
    "mistral": (
        MISTRAL,
        f"<bos>[INST] {SYSTEM}\n\n",
        f"{QUESTION}[/INST]",
        f"<bos>[INST] {QUESTION}[/INST]",
    ),
    "stripping": (STRIPPING, f"{SYSTEM}|", f"{QUESTION}|", f"{QUESTION}|"),
}


@pytest.mark.parametrize("case", SYSTEM_CASES.values(), ids=SYSTEM_CASES)
def test_a_system_message_is_the_context(case: tuple[str, str, str, str]) -> None:
    template, before, kept, without = case
    tokenizer = tokenizer_with(template)
    prompt = make_prompt(tokenizer, QUESTION, system=SYSTEM)
    assert (prompt.with_context, prompt.kept) == (before + kept, len(before))
    assert (prompt.without, prompt.chat) == (without, True)
    assert chat_text(tokenizer, QUESTION, SYSTEM) == before + kept
    context_ids, kept_ids = split_ids(tokenizer, prompt)
    assert tokenizer.decode(context_ids[0]) == before  # one <bos> at most, the template's
    assert tokenizer.decode(kept_ids[0]) == kept


def test_the_templates_own_system_message_can_be_the_context() -> None:
    prompt = make_prompt(tokenizer_with(SMOLLM2), QUESTION, system="You are SmolLM.")
    assert prompt.with_context == prompt.without
    assert prompt.with_context[prompt.kept :] == chatml(ASK)


CONTEXT_CASES = {
    "smollm2": (
        SMOLLM2,
        "<|im_start|>system\nYou are SmolLM.<|im_end|>\n<|im_start|>user\n Two moons. ",
        f"{QUESTION} <|im_end|>\n<|im_start|>assistant\n",
    ),
    "gemma 3": (GEMMA, "<bos><turn>user\nTwo moons. ", GEMMA_END),
    "mistral": (MISTRAL, "<bos>[INST]  Two moons. ", f"{QUESTION} [/INST]"),
    "stripping": (STRIPPING, "Two moons. ", f"{QUESTION}|"),
}


@pytest.mark.parametrize("case", CONTEXT_CASES.values(), ids=CONTEXT_CASES)
def test_a_context_begins_the_users_message(case: tuple[str, str, str]) -> None:
    """With spaces around the message, which some templates strip."""
    template, before, kept = case
    tokenizer = tokenizer_with(template)
    prompt = make_prompt(tokenizer, f"{QUESTION} ", context=" Two moons. ", chat=True)
    assert (prompt.with_context, prompt.kept) == (before + kept, len(before))
    assert prompt.without == chat_text(tokenizer, f"{QUESTION} ")
    assert tokenizer.decode(split_ids(tokenizer, prompt)[1][0]) == kept


def test_chats_of_several_turns() -> None:
    ask = chatml("user Hi", "assistant Hello.", ASK)
    prompt = make_prompt(tokenizer_with(SMOLLM2), TURNS, system=SYSTEM)
    assert prompt.with_context[prompt.kept :] == ask
    prompt = make_prompt(tokenizer_with(SMOLLM2), TURNS, context="Be brief. ")  # a chat by itself
    assert prompt.with_context[prompt.kept :] == ask.removeprefix("<|im_start|>user\n")
    assert prompt.without == chatml("system You are SmolLM.", "user Hi", "assistant Hello.", ASK)
    prompt = make_prompt(tokenizer_with(GEMMA), TURNS, system=SYSTEM)
    assert prompt.with_context[prompt.kept :] == (
        f"Hi</turn>\n<turn>model\nHello.</turn>\n<turn>user\n{GEMMA_END}"
    )
    # Mistral writes the system message into the last turn: the earlier ones are before the context
    prompt = make_prompt(tokenizer_with(MISTRAL), TURNS, system=SYSTEM)
    assert prompt.with_context[: prompt.kept] == (
        f"<bos>[INST] Hi[/INST] Hello.</s>[INST] {SYSTEM}\n\n"
    )
    assert prompt.with_context[prompt.kept :] == f"{QUESTION}[/INST]"


def test_plain_text() -> None:
    tokenizer = tokenizer_with(None)
    prompt = make_prompt(tokenizer, "fmrp>", context="mode upper\n")
    assert (prompt.with_context, prompt.without) == ("mode upper\nfmrp>", "fmrp>")
    context_ids, kept_ids = split_ids(tokenizer, prompt)
    assert tokenizer.decode(context_ids[0]) == "<bos>mode upper\n"
    assert tokenizer.decode(kept_ids[0]) == "fmrp>"
    assert own_front(tokenizer) == (tokenizer.bos_token_id,)
    assert encode(tokenizer, "fmrp>") == tuple(kept_ids[0].tolist())


def test_a_token_across_the_cut_is_kept() -> None:
    bpe = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    context_ids, kept_ids = split_ids(tokenizer, make_prompt(tokenizer, "ba", context="ba"))
    assert (context_ids.tolist(), kept_ids.tolist()) == ([[1]], [[2, 0]])
    message = "at least one token each, got 'a' and 'b', which share a token: let each end where"
    with pytest.raises(ValueError, match=message):
        split_ids(tokenizer, make_prompt(tokenizer, "b", context="a"))
    assert split_ids(tokenizer, make_prompt(tokenizer, "b", context="b"))[1].tolist() == [[1]]
    assert own_front(tokenizer) == ()


CUT = [  # where a word's tokens are not those of its parts
    ("red -> rouge\nblue -> ", "bleu"),
    ("Be brief. ", "What is rain?"),
    ("The capital of Fr", "ance is"),
    ("red -> rouge\n", "blue ->"),
]
TOKENIZERS = {  # what they put in front of a text and behind it
    "front": ("<s>",),
    "two in front": ("<gmask>", "<s>"),
    "both": ("<s>",),
    "behind": (),
    "none": (),
}


@pytest.mark.parametrize("text", CUT, ids=[question for _, question in CUT])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_context_and_its_question_are_one_text_without_an_end_everywhere(
    kind: str, text: tuple[str, str]
) -> None:
    context, question = text
    front = TOKENIZERS[kind]
    tokenizer = word_tokenizer(front, ("</s>",) if kind in ("both", "behind") else ())
    own = [*tokenizer.convert_tokens_to_ids(front)]
    whole = [*own, *ids_of(tokenizer, context + question)]
    assert own_front(tokenizer) == tuple(own)
    assert encode(tokenizer, context + question, front=True) == tuple(whole)
    prompt = make_prompt(tokenizer, question, context=context)
    context_ids, kept_ids = split_ids(tokenizer, prompt)
    assert torch.cat([context_ids, kept_ids], 1).tolist() == [whole]
    assert tokenizer.decode(kept_ids[0]).strip() == ("France is" if "Fr" in context else question)
    model = build("llama", vocab_size=VOCABULARY)
    (example,) = static.examples(model, tokenizer, [question], context=context)
    # by default the model chooses one
    first = own or [*static.front(model, tokenizer)]
    assert [*example.with_context] == first + whole[len(own) :]
    assert [*example.without] == first + ids_of(tokenizer, question)
    assert encode_contexts(tokenizer, [context + question])[0].tolist() == [whole]
    few_shot = Prompt("few-shot", context, question, "")
    assert torch.cat(demo.encoded(tokenizer, few_shot), 1).tolist() == [whole]
    if importlib.util.find_spec("pyarrow"):
        from icl_patch.scale.rows import Columns, Row, encode_row

        row = encode_row(model, tokenizer, Row(0, context, question), Columns())
        assert torch.cat([row.context_ids, row.kept_ids], 1).tolist() == [whole]


REFUSED = {
    "no context": (SMOLLM2, {"question": "q"}, "either a context or a system message, got none"),
    "both": (SMOLLM2, {"question": "q", "context": "a", "system": "b"}, "system message, got both"),
    "empty context": (SMOLLM2, {"question": "q", "context": ""}, "at least one token each"),
    "empty question": (SMOLLM2, {"question": [], "system": "a"}, "at least one token each"),
    "no template": (None, {"question": "q", "system": "a"}, "with a chat template, .* has none"),
    "no system role": (
        "{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}" + SMOLLM2,
        {"question": "q", "system": "a"},
        "messages of system, user, got one that refuses them: System role not supported. Give the"
        r" system message as the context of a chat, context=\.\.\. with chat=True",
    ),
    "no chat without a system message": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}",
        {"question": "q", "system": "a"},
        "messages of user, got one that refuses them: no system. Leave out chat and system",
    ),
    "system left out": (
        "{{ messages[-1].content }}",
        {"question": "q", "system": "be brief"},
        "that writes the system message as it is, .* context=",
    ),
    "system last": (
        "{{ messages[-1].content }}{{ messages[0].content }}",
        {"question": "q", "system": "be brief"},
        "writes the system message before the user's last one, got 'qbe brief'",
    ),
    "stripped context": (
        STRIPPING,
        {"question": "q", "context": " ", "chat": True},
        "expected a context that the chat template writes, got ' '",
    ),
    "a list of texts": (SMOLLM2, {"question": ["q", "r"], "system": "a"}, "with a role and"),
    "the assistant last": (SMOLLM2, {"question": TURNS[:2], "system": "a"}, "the last of the user"),
    "a system message among them": (
        SMOLLM2,
        {"question": [{"role": "system", "content": "a"}, TURNS[0]], "context": "b"},
        "an argument of its own, system",
    ),
}


@pytest.mark.parametrize(("template", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(template: str | None, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_prompt(tokenizer_with(template), **arguments)
