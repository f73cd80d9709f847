"""The evaluation's cells on a small model: a stopped run goes on, and a page is made of them."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from icl_patch import embedded, static

pytest.importorskip("peft")
FOLDER = Path(__file__).parents[2] / "examples" / "static"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st", "uv", "wx", "yz")
FACT = {"statement": "Ore is red:", "true": "blue", "new": "red", "question": "Ore is"}
TASKS = {
    "few_shot": {"task": [{"name": "upper", "pairs": [(word, word.upper()) for word in WORDS]}]},
    "chats": {
        "chat": [
            {
                "name": "loud",
                "system": "Be loud.",
                "fit": [f"{word}?" for word in WORDS[:6]],
                "held_out": ["you?"],
                "conversations": [["hi", "HI", "who?"]],
            }
        ]
    },
    "facts": {
        "fact": [
            {
                **{name: text.replace("Ore", thing) for name, text in FACT.items()},
                "paraphrases": [f"{x} {thing} is" for x in ("The", "All", "Some")],
                "neighbours": [[f"No {thing} is", "red"]],
            }
            for thing in ("Ore", "Ash")
        ]
    },
    "unrelated": {kind: ["1 + 1", "a b c"] for kind in ("few_shot", "chat", "passage", "code")},
}


@pytest.fixture(scope="module")
def evaluation() -> Iterator[ModuleType]:
    """The script as a module, with tiny tasks and few texts to preserve."""
    fit = sys.modules[static.fit.__module__]
    patches = pytest.MonkeyPatch()
    for place in (static, fit):
        patches.setattr(place, "preserved_texts", lambda: ["a = 1", "Bees fly.", "Oh!", "1, 2"])
    sys.path.insert(0, str(FOLDER))
    module = importlib.import_module("evaluation")
    module.read = TASKS.__getitem__
    module.SHOTS, module.QUESTIONS, module.HELD_OUT = 2, 8, 3
    module.NEW_TOKENS, module.KEPT_TOKENS, module.FEW_QUESTIONS = 4, 2, 4
    module.SEEDS = 2
    yield module
    patches.undo()
    sys.path.remove(str(FOLDER))
    for name in ("evaluation", "baselines", "page"):
        sys.modules.pop(name, None)


def test_cells_of_each_kind_and_a_page(evaluation: ModuleType, tmp_path: Path) -> None:
    model, tokenizer = embedded.load()
    tokenizer.chat_template = TEMPLATE
    subject = evaluation.Subject(model, tokenizer, steps=2)
    out = tmp_path / "cells.jsonl"
    wanted = evaluation.cells(("upper",), ("loud",))
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    for count in (3, len(wanted)):  # the second call goes on
        evaluation.run(subject, wanted[:count], out)
    after = model.state_dict()
    assert list(after) == list(weights)  # nothing of PEFT's is left
    assert all(torch.equal(after[name], x) for name, x in weights.items())

    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert list(evaluation.known(out)) == [cell.key for cell in wanted]
    assert len(entries) == len(wanted)
    for entry in entries:
        groups = entry["tests"]
        if entry["method"] == evaluation.CONTEXT:
            # logits of one hidden state, from batches of two sizes: roundings of fp32
            assert all(abs(group["kl"]) < 1e-5 for group in groups.values())
            assert all(group["agreement"] == 1 for group in groups.values())
        if entry["method"] == evaluation.NONE:
            assert all(group["kept"] == 1 for group in entry["unrelated"].values())
        if entry["method"] in (evaluation.LORA, evaluation.OURS):
            assert entry["steps"] == 2
    page = importlib.import_module("page")
    page.main([str(out), "--out", str(tmp_path)])
    text = (tmp_path / "static-results.md").read_text()
    assert all(f"\n## {title}\n" in text for title in ("Few-shot tasks", "Chats", "Facts", "Cost"))
    assert (tmp_path / "pictures" / "static-front.png").stat().st_size > 5000


def test_weak_facts_are_those_the_model_believes_less(evaluation: ModuleType) -> None:
    subject = evaluation.Subject(*embedded.load())
    tests = subject.task("facts", "facts").tests
    (weak,), (strong,) = (tests[f"{x}, question"] for x in ("weak", "strong"))
    true = evaluation.encode(subject.tokenizer, " blue")
    beliefs = []
    for target in (weak, strong):
        ids = torch.tensor([target.ids[: target.asked[0] + 1] + true])
        with torch.no_grad():
            found = subject.model(ids).logits[0, -len(true) - 1 : -1].log_softmax(-1)
        beliefs.append(float(found[range(len(true)), true].sum()))
    assert beliefs[0] < beliefs[1]


def test_the_page_means_over_tasks_and_shows_the_range_of_seeds(evaluation: ModuleType) -> None:
    page = importlib.import_module("page")
    entries = [
        {"kind": "few_shot", "task": task, "method": "static patch", "seed": seed, "value": value}
        for task, seed, value in (("a", 0, 0.1), ("a", 1, 0.3), ("b", 0, 0.6))
    ]
    assert page.over_tasks(entries, lambda e: e["value"]) == pytest.approx(0.4)
    assert page.shown(entries[:2], lambda e: e["value"], "{:.1f}") == "0.2 [0.1–0.3]"
    assert page.shown(entries[2:], lambda e: e["value"], "{:.1f}") == "0.6"
    assert page.shown([], lambda e: e["value"]) == "–"
