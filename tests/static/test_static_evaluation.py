"""The evaluation's cells on a small model: a stopped run goes on, and a page is made of them."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chats import TEMPLATE

from icl_patch import embedded, static

pytest.importorskip("peft")
FOLDER = Path(__file__).parents[2] / "examples" / "static"
WORDS = ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st", "uv", "wx", "yz")
FACT = {"statement": "Ore is red:", "true": "blue", "new": "red", "question": "Ore is"}
CHAT = {"name": "loud", "system": "Be loud.", "fit": [f"{word}?" for word in WORDS[:6]]}
FACTS = [
    {
        **{name: text.replace("Ore", thing) for name, text in FACT.items()},
        "paraphrases": [f"{x} {thing} is" for x in ("The", "All", "Some")],
        "neighbours": [[f"No {thing} is", "red"]],
    }
    for thing in ("Ore", "Ash")
]
TASKS = {
    "few_shot": {"task": [{"name": "upper", "pairs": [(word, word.upper()) for word in WORDS]}]},
    "chats": {"chat": [CHAT | {"held_out": ["you?"], "conversations": [["hi", "HI", "who?"]]}]},
    "facts": {"fact": FACTS},
    "unrelated": {kind: ["1 + 1", "a b c"] for kind in ("few_shot", "chat", "passage", "code")},
}
SMALL = {"SHOTS": 2, "QUESTIONS": 8, "HELD_OUT": 3, "NEW_TOKENS": 4, "KEPT_TOKENS": 2}
SMALL |= {"FEW_QUESTIONS": 4, "SEEDS": 2}


def test_cells_of_each_kind_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny tasks and few texts to preserve."""
    for place in (static, sys.modules[static.fit.__module__]):
        monkeypatch.setattr(place, "preserved_texts", lambda: ["a = 1", "Bees fly.", "Oh!", "1, 2"])
    monkeypatch.syspath_prepend(FOLDER)
    evaluation: Any = importlib.import_module("evaluation")
    for name, value in {**SMALL, "read": TASKS.__getitem__}.items():
        monkeypatch.setattr(evaluation, name, value)
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

    tokenizer.chat_template = None
    base = evaluation.Subject(model, tokenizer, steps=2)
    wanted, out = evaluation.base_cells(("upper",)), tmp_path / "base.jsonl"
    evaluation.run(base, wanted, out)
    entries = page.read(out)
    assert [e["method"] for e in entries] == [evaluation.NONE, evaluation.CONTEXT, evaluation.OURS]
    assert "chat" not in entries[0]["unrelated"] and entries[0]["unrelated"].keys() >= {"code"}
    text = page.page(page.read(tmp_path / "cells.jsonl"), entries)
    rows = text.partition("\n## A base model\n")[2].splitlines()
    assert [row.split(" | ")[0] for row in rows[-2:]] == ["| upper", "| mean of 1"]
