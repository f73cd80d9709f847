"""The page on what the papers' discussions leave open: its numbers, and its script on a small
random model.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import discussion
import pytest
import torch
from pages import TEMPLATES
from support.random_models import build

from icl_patch import embedded

RESULTS = Path(__file__).parents[2] / "docs" / "papers"


def committed() -> dict[str, Any]:
    return discussion.page(RESULTS).read(RESULTS)


MODELS = list(committed().values())


def test_the_committed_page_is_that_of_the_numbers() -> None:
    page = discussion.page(RESULTS).text(committed())
    assert page == (RESULTS / "discussion.md").read_text("utf-8")
    for numbers in MODELS:
        assert [row["steps"] for row in numbers["transfer"]] == list(discussion.STEPS)


def test_no_number_of_the_templates_is_written_by_hand() -> None:
    """But for those of formulas, settings, references and dtypes."""
    allowed = (
        r"\{[{%].*?[}%]\}|^    .*|`[^`]*`|\]\([^)]*\)|Section 5|rank-1|2022, Equation 2|0 to 1"
    )
    allowed += r"|Gemma 3 1B|bf16|fp16|fp32|9[058]\S* %|87.5 %|1e-[46]|50 and 90 %|25 %|Algorithm 1"
    allowed += r"|Theorem 1|about 100 %"
    allowed += r"|Definitions 3 and 4|\| 75 %|‖: 5 %"
    for name in ("discussion", "real-model", "SmolLM2-135M-Instruct", "gemma-3-270m"):
        text = re.sub(allowed, "", (TEMPLATES / f"{name}.md").read_text("utf-8"), flags=re.M | re.S)
        assert not re.findall(r".*\d.*", text), name


@pytest.mark.parametrize("numbers", MODELS, ids=lambda numbers: numbers["model"])
def test_the_conclusions_hold(numbers: dict[str, Any]) -> None:
    """What the page says in words."""
    transfer, both = numbers["transfer"], numbers["composition"]
    for old, new in pairwise(transfer):
        assert old["weights"] < new["weights"] and old["patch"] < new["patch"]
    assert all(row["patch"] < row["none"] for row in transfer)
    correlations = numbers["attribution"]["correlation"].values()
    assert all(found["mean"] > 0.5 for found in correlations)
    assert min(x["least"] for m in MODELS for x in m["attribution"]["correlation"].values()) < 0.5
    if elsewhere := numbers.get("direct_on_a_copy"):
        assert elsewhere["here"] < 1e-6 and elsewhere["elsewhere"] > 0.99
    for name, missed in both["rest"]["sum"].items():
        assert missed > 0.5 and both["rest"]["its own"][name] < missed
    if steering := numbers.get("steering"):
        assert max(steering["error"].values()) < 1e-4
        assert steering["side_effect"]["rome"] < steering["side_effect"]["patch"]
        assert all(old["steering"] < new["steering"] for old, new in pairwise(transfer))
        assert both["distance"]["its own"] < both["distance"]["sum"]


@pytest.mark.stress  # test_papers_protocol.py has a quick form on any model
@pytest.mark.parametrize(
    ("family", "layers"),
    [("llama", {"num_hidden_layers": 2}), ("gemma3", {})],  # the latter's blocks end in a scale
)
def test_the_script_runs_on_a_small_model(
    family: str,
    layers: dict[str, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = embedded.load()[1]
    folder = tmp_path / "small"
    model = build(family, vocab_size=len(tokenizer), max_position_embeddings=2048, **layers)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert discussion.main([str(folder), "--quick", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "discussion-small.json").read_text("utf-8"))
    first, second = numbers["transfer"]
    assert first["weights"] == 0 < second["weights"]
    assert first["patch"] < 1e-4 < first["none"]
    page = (tmp_path / "discussion.md").read_text("utf-8")
    assert page.startswith("# What the papers'")
    if family == "gemma3":
        assert "steering" not in numbers and "## Steering" not in page
        return
    assert max(numbers["steering"]["error"].values()) < 1e-4
    assert first["steering"] < 1e-4
    with pytest.raises(SystemExit):
        discussion.main(["--quick", "--redraw", str(folder)])
    assert "expected a folder, or --redraw" in capsys.readouterr().err
