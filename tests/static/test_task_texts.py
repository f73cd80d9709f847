"""The texts of examples/static/tasks, and the texts to preserve: how many, how long, and apart."""

import tomllib
from pathlib import Path
from typing import Any

import icl_patch.static

TASKS = Path(__file__).parents[2] / "examples" / "static" / "tasks"
PRESERVED = Path(icl_patch.static.__file__).with_name("preserved_texts.txt")
SHOTS = 8


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


def within(texts: list[str], least: int, most: int) -> list[str]:
    """The texts of another length, and those with spaces at an end."""
    return [text for text in texts if not least <= len(text) <= most or text != text.strip()]


def test_a_hundred_texts_to_preserve() -> None:
    texts = preserved()
    assert len(texts) == 100 and unique(texts)
    assert not within(texts, 20, 250)
    # no kind prevails: hardly two texts begin alike
    assert len({text[:8] for text in texts}) >= 95


def test_no_text_to_preserve_contains_a_question() -> None:
    asked = questions()
    assert not [(text, prompt) for text in preserved() for prompt in asked if prompt in text]


def test_few_shot_tasks() -> None:
    tasks = read("few_shot")["task"]
    assert len(tasks) >= 11 and unique([task["name"] for task in tasks])
    for task in tasks:
        given, answers = zip(*task["pairs"], strict=True)
        assert 110 <= len(given) <= 130 and unique(list(given)), task["name"]
        assert not within([*given, *answers], 1, 32), task["name"]
        assert not [text for text in (*given, *answers) if "\n" in text or "->" in text]
        assert 2 * len(set(answers[:SHOTS])) >= SHOTS, task["name"]


def test_chats() -> None:
    chats = read("chats")["chat"]
    assert len(chats) == 4 and unique([chat["system"] for chat in chats])
    for chat in chats:
        fit, tested = chat["fit"], users(chat)
        assert (len(fit), len(chat["held_out"]), len(chat["conversations"])) == (64, 20, 4)
        assert unique([*fit, *tested]), chat["name"]
        assert all(len(turns) == 3 for turns in chat["conversations"])
        answers = [turns[1] for turns in chat["conversations"]]
        assert not within([chat["system"], *fit, *tested, *answers], 5, 200), chat["name"]


def test_facts() -> None:
    facts = read("facts")["fact"]
    asked, neighbours = fact_prompts()
    assert len(facts) == 32 and len(asked) == 4 * 32 and len(neighbours) == 2 * 32
    # no neighbour is a question about a changed fact
    assert unique([*asked, *neighbours])
    assert not within([*asked, *neighbours], 9, 80)
    for fact in facts:
        assert fact["new"] in fact["statement"] and fact["true"] not in fact["statement"]
        assert fact["true"] != fact["new"] and not within([fact["true"], fact["new"]], 1, 24)
        assert fact["statement"].endswith("Everybody knows it:")


def test_unrelated_prompts() -> None:
    kinds = read("unrelated")
    assert list(kinds) == ["few_shot", "chat", "passage", "code"]
    asked, neighbours = fact_prompts()
    others = {
        *asked,
        *neighbours,
        *(text for chat in read("chats")["chat"] for text in users(chat)),
    }
    others |= {text for chat in read("chats")["chat"] for text in chat["fit"]}
    for prompts in kinds.values():
        assert len(prompts) == 24 and unique(prompts)
        assert not within(prompts, 13, 300) and not others & set(prompts)
