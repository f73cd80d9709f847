"""From text to text, and transformers' names for ids and masks."""

from typing import Any

import pytest
import torch
from support.chats import TEMPLATE
from torch import Tensor
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from icl_patch import ContextPatcher, embedded

KINDS = ("recall", "fewshot")
PROMPTS = [embedded.held_out_prompts(kind, 1)[0] for kind in KINDS]


@pytest.mark.parametrize("prompt", PROMPTS, ids=KINDS)
def test_an_answer_and_its_patch(prompt: embedded.Prompt) -> None:
    model, tokenizer = embedded.load()
    whole = tokenizer(prompt.context + prompt.question, return_tensors="pt")
    plain = model.generate(**whole, max_new_tokens=6, do_sample=False)
    new = plain[:, whole.input_ids.shape[1] :]
    with ContextPatcher(model, tokenizer=tokenizer) as patcher:
        answer = patcher.ask(prompt.context, prompt.question, max_new_tokens=6)
        replayed = patcher.forward(answer.patch.kept_ids, answer.patch)
        padding = int(answer.patch.kept_ids[0, 0])  # a text's tokens are tokens, this one too
        arguments = {"max_new_tokens": 6, "pad_token_id": padding}
        again = patcher.ask(prompt.context, prompt.question, **arguments)
    assert torch.equal(again.token_ids, answer.token_ids)
    assert torch.equal(answer.token_ids, new)
    assert answer.text == tokenizer.decode(new[0], skip_special_tokens=True)
    assert torch.equal(replayed[:, -new.shape[1] :].argmax(-1), new)
    kept = prompt.question + tokenizer.decode(new[0, :-1])
    assert tokenizer.decode(answer.patch.kept_ids[0]) == kept
    assert answer.patch.prefix_ids.numel() == 0  # all of the context is absorbed
    with torch.no_grad():  # the question alone does not give it
        alone = model(answer.patch.kept_ids).logits[:, -new.shape[1] :].argmax(-1)
    assert not torch.equal(alone, new)


def test_what_ask_refuses() -> None:
    model, tokenizer = embedded.load()
    refusal = pytest.raises(ValueError, match=r"ContextPatcher\(model, tokenizer=")
    with ContextPatcher(model, "stable") as patcher, refusal:
        patcher.ask("abc", "d")
    assert repr(patcher) == "ContextPatcher(embedded, stable, float32, detached)"
    tokenizer.chat_template = None
    with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
        assert repr(patcher) == "ContextPatcher(embedded, stable, float32, 6 blocks patched)"
        with pytest.raises(ValueError, match="at least one token each"):
            patcher.ask("abc", "")
        with pytest.raises(TypeError, match=r"expected text, got 3 \(int\)"):
            patcher.ask(3, "d")
        with pytest.raises(ValueError, match="chat template"):
            patcher.ask("abc", "d", chat=True)
        several = {"max_new_tokens": 1, "do_sample": True, "num_return_sequences": 2}
        with pytest.raises(ValueError, match="expected one answer, got num_return_sequences=2"):
            patcher.ask("abc", "d", **several)
        assert patcher.ask("abc", "d", **several | {"num_return_sequences": 1}).text is not None
        ids = tokenizer("abcd", return_tensors="pt")
        for name in ("input_ids", "attention_mask"):
            with pytest.raises(TypeError, match=rf"got {name}: give these and the ids to generate"):
                patcher.ask("abc", "d", **{name: ids[name]})
        [step] = patcher.generate(**ids, **several | {"num_return_sequences": 1})
        assert step.token_ids.shape == (1,)
        with pytest.raises(ValueError, match="expected compile True, False or 'auto', got 'all'"):
            patcher.ask("abc", "d", compile="all")


def test_ask_takes_the_arguments_of_generate() -> None:
    """In a chat, sampled, cut by a criterion, streamed, in each mode."""
    model, tokenizer = embedded.load()
    tokenizer.chat_template = TEMPLATE

    class Third(StoppingCriteria):
        def __call__(self, input_ids: Tensor, _scores: Any, **_: Any) -> Tensor:
            return torch.full((1,), input_ids.shape[1] >= ids.shape[1] + 3)

    ids = tokenizer(
        "<system>mode upper\n<user>fmrp>\n<model>", add_special_tokens=False, return_tensors="pt"
    ).input_ids
    arguments: dict[str, Any] = {
        "generation_config": GenerationConfig(do_sample=True, temperature=3.0, max_new_tokens=9),
        "eos_token_id": None,
    }
    torch.manual_seed(5)
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **arguments)[:, ids.shape[1] :][:, :3]
    with ContextPatcher(model, "stable", tokenizer=tokenizer) as patcher:
        for mode in (None, "two_pass", "shared_cache"):
            torch.manual_seed(5)
            answer = patcher.ask(
                question="fmrp>",
                system="mode upper",
                mode=mode,
                streamer=(streamer := TextIteratorStreamer(tokenizer, skip_prompt=True)),
                stopping_criteria=StoppingCriteriaList([Third()]),
                **arguments,
            )
            assert torch.equal(answer.token_ids, expected)
            assert "".join(streamer) == tokenizer.decode(expected[0])
        with pytest.raises(ValueError, match=r"expected mode .*two_pass.*, got .another."):
            patcher.ask("mode upper\n", "fmrp>", mode="another")


def test_what_a_tokenizer_returns_is_taken_by_its_own_names() -> None:
    model, tokenizer = embedded.load()
    context = tokenizer("mode upper\n", return_tensors="pt").input_ids
    question = tokenizer("fmrp>", add_special_tokens=False, return_tensors="pt")
    whole = tokenizer("mode upper\nfmrp>", return_tensors="pt")
    with ContextPatcher(model) as patcher:
        patch = patcher.compute(context, **question)
        logits = patcher.forward(patch=patch, **question)
        [step] = patcher.generate(**whole, max_new_tokens=1)
        assert torch.equal(logits, patcher.forward(question.input_ids, patch))
        with pytest.raises(TypeError, match="context_ids or input_ids"):
            patcher.generate(context, **whole)
        with pytest.raises(TypeError, match="kept_mask or attention_mask"):
            patcher.compute(context, kept_mask=question.attention_mask.bool(), **question)
        with pytest.raises(TypeError, match="kept_ids or input_ids"):
            patcher.forward(question.input_ids, patch, input_ids=question.input_ids)
        with pytest.raises(TypeError, match="expected a ContextPatch, got NoneType"):
            patcher.forward(question.input_ids)
        with pytest.raises(TypeError, match="expected kept_ids as a tensor, got NoneType"):
            patcher.compute(context)
    with torch.no_grad():
        expected = model(**whole).logits[0, -1].argmax()
    assert int(step.token_ids) == int(expected) == int(logits[0, -1].argmax())


def test_a_system_message_and_several_turns() -> None:
    model, tokenizer = embedded.load()
    tokenizer.chat_template = TEMPLATE
    turns = [("user", "bcdf>"), ("assistant", "BCDF"), ("user", "fmrp>")]
    messages = [{"role": role, "content": text} for role, text in turns]
    with ContextPatcher(model, tokenizer=tokenizer) as patcher:
        answer = patcher.ask(question=messages, system="mode upper", max_new_tokens=1)
        with pytest.raises(TypeError, match=r"ask\(question=..., system=...\)"):
            patcher.ask("fmrp>", system="mode upper")
    kept = "<user>bcdf>\n<assistant>BCDF\n<user>fmrp>\n<model>"
    assert tokenizer.decode(answer.patch.kept_ids[0]) == kept
    ids = tokenizer(f"<system>mode upper\n{kept}", add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        assert int(model(ids.input_ids).logits[0, -1].argmax()) == int(answer.token_ids)
