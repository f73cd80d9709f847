"""The texts of examples/static/tasks, and the texts to preserve: what is fitted is not tested."""

import tomllib
from pathlib import Path
from typing import Any

import icl_patch.static

TASKS = Path(__file__).parents[2] / "examples" / "static" / "tasks"
PRESERVED = Path(icl_patch.static.__file__).with_name("preserved_texts.txt")


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((TASKS / f"{name}.toml").read_text(encoding="utf-8"))


def preserved() -> list[str]:
    return PRESERVED.read_text(encoding="utf-8").removesuffix("\n").split("\n\n")


def users(chat: dict[str, Any]) -> list[str]:
    """Every message of a user on which a patch of the chat is tested."""
    return chat["held_out"] + [turn for turns in chat["conversations"] for turn in turns[::2]]


def fact_prompts() -> tuple[list[str], list[str]]:
    """The prompts about the changed facts, and those about their neighbours."""
    facts = read("facts")["fact"]
    asked = [prompt for fact in facts for prompt in (fact["question"], *fact["paraphrases"])]
    return asked, [prompt for fact in facts for prompt, _ in fact["neighbours"]]


def questions() -> list[str]:
    """All questions of all tasks, as the model sees them."""
    pairs = [pair for task in read("few_shot")["task"] for pair in task["pairs"]]
    chats = [text for chat in read("chats")["chat"] for text in (*chat["fit"], *users(chat))]
    asked, neighbours = fact_prompts()
    unrelated = [prompt for kind in read("unrelated").values() for prompt in kind]
    return [*(f"{given} ->" for given, _ in pairs), *chats, *asked, *neighbours, *unrelated]


def unique(texts: list[str]) -> bool:
    return len(set(texts)) == len(texts)


def test_no_text_to_preserve_is_given_twice_or_contains_a_question() -> None:
    texts, asked = preserved(), questions()
    assert len(texts) == 100 and unique(texts)
    assert not [(text, prompt) for text in texts for prompt in asked if prompt in text]


def test_few_shot_tasks() -> None:
    for task in read("few_shot")["task"]:
        given, answers = zip(*task["pairs"], strict=True)
        assert len(given) >= 110 and unique(list(given)), task["name"]
        assert not [text for text in (*given, *answers) if "\n" in text or "->" in text]


def test_chats_are_not_tested_on_what_they_are_fitted_on() -> None:
    for chat in read("chats")["chat"]:
        assert (len(chat["fit"]), len(chat["held_out"]), len(chat["conversations"])) == (64, 20, 4)
        assert unique([*chat["fit"], *users(chat)]), chat["name"]


def test_no_neighbour_is_a_question_about_a_changed_fact() -> None:
    asked, neighbours = fact_prompts()
    assert len(asked) == 4 * 32 and len(neighbours) == 2 * 32 and unique([*asked, *neighbours])
    for fact in read("facts")["fact"]:
        assert fact["new"] in fact["statement"] and fact["true"] not in fact["statement"]


def test_unrelated_prompts_are_in_no_task() -> None:
    chats = [text for chat in read("chats")["chat"] for text in (*chat["fit"], *users(chat))]
    others = {*chats, *(prompt for part in fact_prompts() for prompt in part)}
    for prompts in read("unrelated").values():
        assert len(prompts) == 24 and unique(prompts) and not others & set(prompts)
