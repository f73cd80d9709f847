"""Figures 3 and 4 on trained models: the closed loop is Algorithm 1 at every token, the quick form
runs on any folder, and the committed page is that of its numbers.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import real_protocol as protocol
import torch
from goldwaser_experiments import LAZY, MERGED
from support.numeric import noise_limit
from support.random_models import build, tokens

from icl_patch import embedded, metrics
from icl_patch.evaluation.baseline import baseline
from icl_patch.evaluation.report import format_value, percent
from icl_patch.models.block_detection import blocks_of
from icl_patch.recording.algorithm_1 import algorithm_1

RESULTS = Path(__file__).parents[2] / "docs" / "papers"


@pytest.mark.parametrize("update", ["direct", "stable"])
@pytest.mark.parametrize("kept", [0, 1])
@torch.no_grad()
def test_the_closed_loop_is_algorithm_1_at_every_token(update: str, kept: int) -> None:
    model, ids = build("gemma3"), tokens(0, 1, 9)
    run = baseline(model, ids, torch.ones_like(ids, dtype=torch.bool), 3)
    errors = protocol.closed_loop(model, update, run, kept)
    assert errors.shape == (1, 3, 3) and errors[..., 0].all()
    assert errors[..., 1].max() <= noise_limit(model, ids)
    low = build("gemma3", dtype=torch.bfloat16)
    run = baseline(low, ids, torch.ones_like(ids, dtype=torch.bool), 3)
    errors = protocol.closed_loop(low, update, run, kept)
    if kept:
        return
    whole = torch.cat([ids, run.tokens[:, :2]], 1)
    position = torch.tensor([[whole.shape[1] - 1]])
    with (
        algorithm_1(  # of the last token, without a cache
            low,
            blocks_of(low),
            lambda model: model(whole, use_cache=False),
            lambda model: model(whole[:, -1:], position_ids=position, use_cache=False),
            update,
        ) as found
    ):
        expected = metrics.linf(found.logits[:, -1], run.logits[:, -1])
    noise = noise_limit(low, ids)
    assert abs(float(errors[0, -1, 1]) - float(expected)) <= noise


def test_a_model_that_ends_in_a_matrix_has_one_update() -> None:
    assert list(protocol.ways(build("llama"))) == ["exact", "stable"]
    assert list(protocol.ways(build("gemma3"))) == ["exact", "stable", "direct"]


def test_the_quick_form_runs_on_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").symlink_to(embedded.MODEL_DIR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert protocol.main(["small", "--quick", "--out", "out"]) == 0
    page = protocol.page(tmp_path / "out")
    found = page.read(tmp_path / "out")["protocol-model"]["dtypes"]["bfloat16"]
    assert len(found["curves"]) == 1 + 2 * 11 and len(found["text"]) == 1
    for curve in found["curves"]:
        if curve["update"] == "exact":
            assert (curve["share"], curve["linf"][3], curve["tvd"]) == (1, 0, 0)
    assert "## model" in (tmp_path / "out" / "figures-3-and-4.md").read_text("utf-8")
    assert (tmp_path / "out" / "protocol-model.png").read_bytes().startswith(b"\x89PNG")


def test_the_committed_page_is_that_of_the_numbers() -> None:
    page = protocol.page(RESULTS)
    numbers, text = page.read(RESULTS), (RESULTS / f"{page.name}.md").read_text("utf-8")
    assert page.text(numbers) == text
    for name, found in numbers.items():
        assert (RESULTS / f"{name}.png").exists() and f"]({name}.png)" in text
        for dtype in found["dtypes"].values():
            for curve in dtype["curves"]:
                if (curve["update"], curve["held"]) == ("exact", LAZY):
                    assert (curve["share"], curve["linf"][3]) == (1, 0)


def curves(model: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Of the committed numbers in bf16: by kept token, update and how the patch is held."""
    numbers = protocol.page(RESULTS).read(RESULTS)[f"protocol-{model}"]["dtypes"]["bfloat16"]
    return {(x["kept"], x["update"], x["held"]): x for x in numbers["curves"]}


def test_rounding_all_updates_together_loses_tokens_in_bf16() -> None:
    found = curves("SmolLM2-135M-Instruct")
    assert found["0", "stable", MERGED]["share"] < 0.9 < found["1", "stable", MERGED]["share"]


def test_by_algorithm_1_both_updates_err_less_than_the_model_itself() -> None:
    """And the statements have the numbers of the page."""
    found = curves("gemma-3-270m")
    noise = found["", "", protocol.NOISE]
    for update, kept in itertools.product(("direct", "stable"), ("0", "1")):
        assert found[kept, update, protocol.CLOSED]["linf"][3] < noise["linf"][3]
    assert found["0", "direct", MERGED]["share"] < 0.1 < found["0", "stable", MERGED]["share"]
    lazy, closed, merged = (found["0", "direct", held] for held in (LAZY, protocol.CLOSED, MERGED))
    rows = (RESULTS / "statements.md").read_text("utf-8")
    shares = [percent(x["share"]) for x in (lazy, closed, merged)]
    assert "direct: lazy {}, by Algorithm 1 {}, added at once {} ".format(*shares) in rows
    stable = found["0", "stable", protocol.CLOSED]
    errors = [format_value(x["linf"][3]) for x in (closed, stable, noise)]
    text = "L∞ is at most {} with direct and {} with stable, the model's own noise being {} "
    assert text.format(*errors) in rows


def test_the_page_has_the_counts_of_exact_tokens() -> None:
    exact = json.loads(
        (RESULTS.parent / "data" / "real-exact-gemma-3-270m.json").read_text("utf-8")
    )
    low, full = (
        sum(each["tokens"] for each in exact["counts"] if each["dtype"] == dtype)
        for dtype in ("bfloat16", "float32")
    )
    text = f"So have {low + full} more tokens, {full} in fp32 and {low} in bf16, of 1 to 32 rows"
    page = " ".join((RESULTS / "figures-3-and-4.md").read_text("utf-8").split())
    assert text in page
    corrections = (x["correction"] for x in exact["counts"] if x["dtype"] == "float32")
    worst = max(corrections) / torch.finfo(torch.float32).eps
    assert f"correction in fp32 is {worst:.1f} units" in page
    assert {each["case"][1] for each in exact["counts"]} == {1, 3, 8, 32}
    assert max(each["case"][2] for each in exact["counts"]) == 700
