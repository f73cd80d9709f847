"""The page on what the papers' discussions leave open: its numbers, and its script on a small
random model.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from icl_patch import embedded

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "papers"))

import discussion  # noqa: E402

RESULTS = ROOT / "docs" / "papers"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return discussion.PAGE.read(RESULTS)["discussion"]


def test_the_committed_page_is_that_of_the_numbers(committed: dict[str, Any]) -> None:
    page = discussion.PAGE.text({"discussion": committed})
    assert page == (RESULTS / "discussion.md").read_text("utf-8")
    assert [row["steps"] for row in committed["transfer"]] == list(discussion.STEPS)


def test_the_script_runs_on_a_small_model(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = embedded.load()[1]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=2048,
    )
    folder = tmp_path / "small"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert discussion.main([str(folder), "--quick", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "discussion.json").read_text("utf-8"))
    assert max(numbers["steering"]["error"].values()) < 1e-4
    first, second = numbers["transfer"]
    assert first["weights"] == 0 < second["weights"]
    assert max(first["patch"], first["steering"]) < 1e-4 < first["none"]
    assert (tmp_path / "discussion.md").read_text("utf-8").startswith("# What the papers'")
    with pytest.raises(SystemExit):
        discussion.main(["--quick", "--redraw", str(folder)])
    assert "expected a folder, or --redraw" in capsys.readouterr().err
