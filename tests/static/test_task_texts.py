"""The texts of examples/static/tasks, and the texts to preserve: what is fitted is not tested."""

import tomllib
from pathlib import Path
from typing import Any

import icl_patch.static

TASKS = Path(__file__).parents[2] / "examples" / "static" / "tasks"
PRESERVED = Path(icl_patch.static.__file__).with_name("preserved_texts.txt")


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((TASKS / f"{name}.toml").read_text(encoding="utf-8"))


FACTS, CHATS, UNRELATED = read("facts")["fact"], read("chats")["chat"], read("unrelated").values()
SHOTS = [list(zip(*task["pairs"], strict=True)) for task in read("few_shot")["task"]]
ASKED = [prompt for fact in FACTS for prompt in (fact["question"], *fact["paraphrases"])]
NEIGHBOURS = [prompt for fact in FACTS for prompt, _ in fact["neighbours"]]
# of each chat all messages of users, on which a patch is fitted, and then tested
USERS = [
    chat["fit"] + chat["held_out"] + [t for x in chat["conversations"] for t in x[::2]]
    for chat in CHATS
]
SAID = [text for said in USERS for text in said]


def unique(texts: list[str]) -> bool:
    return len(set(texts)) == len(texts)


def test_no_text_to_preserve_is_given_twice_or_contains_a_question() -> None:
    texts = PRESERVED.read_text(encoding="utf-8").removesuffix("\n").split("\n\n")
    assert len(texts) == 100 and unique(texts)
    shots = [f"{given} ->" for task, _ in SHOTS for given in task]
    asked = [*shots, *SAID, *ASKED, *NEIGHBOURS, *(x for kind in UNRELATED for x in kind)]
    assert not [(text, prompt) for text in texts for prompt in asked if prompt in text]


def test_what_is_fitted_is_not_tested() -> None:
    for given, answers in SHOTS:
        assert len(given) >= 110 and unique(list(given))
        assert not [text for text in (*given, *answers) if "\n" in text or "->" in text]
    assert all(unique(said) for said in USERS)
    assert len(ASKED) == 4 * 32 and len(NEIGHBOURS) == 2 * 32 and unique([*ASKED, *NEIGHBOURS])
    for fact in FACTS:
        assert fact["new"] in fact["statement"] and fact["true"] not in fact["statement"]
    for prompts in UNRELATED:
        assert len(prompts) == 24 and unique(prompts)
        assert not {*SAID, *ASKED, *NEIGHBOURS} & set(prompts)
