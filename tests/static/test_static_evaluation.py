"""The evaluation's cells: what they measure, and that a stopped run goes on."""

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from icl_patch import static

FOLDER = Path(__file__).parents[2] / "examples" / "static"


@pytest.fixture(scope="module")
def evaluation() -> Iterator[ModuleType]:
    """The script as a module, with few unrelated prompts and texts."""
    sys.path.insert(0, str(FOLDER))
    module = importlib.import_module("evaluation")
    module.OTHER, module.PRESERVED = 2, 2
    module.STUDIED_PRESERVED = {"ridge": 2, "distill": 2}
    yield module
    sys.path.remove(str(FOLDER))
    for name in ("evaluation", "baselines", "page", "regression", "llama_model"):
        del sys.modules[name]


def test_a_run_goes_on_where_it_stopped(
    evaluation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [
        evaluation.Cell("language", "german", method, 4, 4, 0)
        for method in ("no context", "ridge, nothing preserved", "patch for each token")
    ]
    out = tmp_path / "cells.jsonl"
    monkeypatch.setattr(sys, "argv", ["evaluation.py", "--out", str(out)])
    for count in (1, 3):
        monkeypatch.setattr(evaluation, "grid", lambda _full, count=count: cells[:count])
        evaluation.main()
        first = out.read_text().splitlines()[0]
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert [entry["key"] for entry in entries] == [cell.key for cell in cells]
    assert json.dumps(entries[0]) == first
    plain, ridge, token = (entry["quality"] for entry in entries)
    assert plain["whole"] < ridge["whole"] < token["whole"] == 1
    assert ridge["kl"] < plain["kl"]
    assert abs(token["kl"]) < 1e-5
    assert all(kind["kl"] == 0 for kind in entries[0]["others"].values())
    assert any(kind["kl"] > 0 for kind in entries[1]["others"].values())


@torch.no_grad()
def test_a_steering_vector_is_added_behind_one_block(evaluation: ModuleType) -> None:
    cell = evaluation.Cell("format", "upper", "steering vector", 4, 4, 0)
    made = evaluation.batches(cell)
    wanted = [
        evaluation.spread(batch, evaluation.plain_logits(evaluation.runner(), batch.teacher.ids))
        for batch in made
    ]
    baselines = sys.modules["baselines"]

    def plain(ids: torch.Tensor) -> torch.Tensor:
        return evaluation.plain_logits(evaluation.runner(), ids)

    logits, nbytes = baselines.steering_vector(evaluation.runner(), made)
    assert nbytes == 4 * 128
    before, after = (baselines.mean_kl(made, wanted, way) for way in (plain, logits))
    assert after < before
    ids = made[0].student.ids
    assert torch.equal(logits(ids)[:, 0], plain(ids)[:, 0])  # nothing is added at the first token
    assert not torch.equal(logits(ids), plain(ids))


def test_the_one_shot_form_and_soft_tokens_are_measured(evaluation: ModuleType) -> None:
    baselines = sys.modules["baselines"]
    cell = evaluation.Cell("language", "german", "", 8, 4, 0)
    logits, _ = baselines.one_shot(evaluation.runner(), evaluation.batches(cell), 4)
    test = evaluation.rows_of([evaluation.example("language", "german", 8, False, 0)])
    with torch.no_grad():
        one_shot = evaluation.quality(test, logits)
        before = evaluation.quality(test, evaluation.METHODS["no context"](cell)[0])
    soft = {}
    for steps in (1, 12):
        tuned, nbytes = baselines.prompt_tuning(
            evaluation.runner(), evaluation.batches(cell), 4, steps, 0
        )
        assert nbytes == 4 * 4 * 128
        with torch.no_grad():
            soft[steps] = evaluation.quality(test, tuned)["kl"]
    timed, _ = baselines.prompt_tuning(
        evaluation.runner(), evaluation.batches(cell), 4, None, 0, seconds=0.0
    )
    with torch.no_grad():  # no time for a step
        assert evaluation.quality(test, timed)["kl"] > soft[1]
    assert one_shot["kl"] < before["kl"]
    assert soft[12] < soft[1]


def test_recall_asks_what_the_sample_did_not(evaluation: ModuleType) -> None:
    sample = evaluation.questions("recall", "bem", 2, False, 0)
    assert set(sample).isdisjoint(evaluation.questions("recall", "bem", 100, True, 0))
    assert isinstance(evaluation.example("recall", "bem", 2, False, 0), static.Example)


def test_recall_is_asked_in_other_words_too(evaluation: ModuleType) -> None:
    sample, other = (
        evaluation.example("recall", "bem", 2, False, 0),
        evaluation.paraphrased("bem", 0),
    )
    assert [row.labels for row in other] == list(sample.answers)  # the model knows what is asked
    for row, question in zip(other, sample.questions, strict=True):
        assert row.without[len(sample.prefix) : row.answer + 1] != question
    found = evaluation.measure(evaluation.Cell("recall", "bem", "no context", 2, 4, 0))
    assert [found[name]["questions"] for name in ("seen", "paraphrased", "quality")] == [2, 2, 1]


def test_a_studied_sample_has_no_held_out_question(evaluation: ModuleType) -> None:
    cell = evaluation.Cell("language", "german", "ridge, self-study", 4, 4, 0)
    studied = evaluation.studied(cell, 40)
    own = evaluation.example("language", "german", 4, False, 0)
    assert studied.questions[:4] == own.questions
    assert 20 < len(studied.questions) < 40
    test = evaluation.example("language", "german", 100, True, 0)
    assert set(studied.questions).isdisjoint(test.questions)


def test_the_linear_regression_is_measured_against_its_context(evaluation: ModuleType) -> None:
    regression = evaluation.regression
    block = regression.trained(300)
    regression.trained = lambda: block
    errors = {name: regression.measure(name, 64, None, 0)["error"] for name in regression.METHODS}
    assert errors["patch for each token"] < 1e-10
    # measured with 3,000 steps of training: 0.004, 1.1 and 0.33
    assert errors["ridge"] < 0.3 * min(errors["no context"], errors["mean of u vᵀ (Dherin)"])
    # the whole regression is the least squares of the difference; a rank of 1 is not
    assert regression.measure("ridge", 64, 1, 0)["error"] > errors["ridge"]


def test_the_llamas_documents_mark_their_answers(evaluation: ModuleType) -> None:
    rng = random.Random(0)
    documents = [evaluation.llama_model.document(rng) for _ in range(200)]
    bare = [text for text, _ in documents if not text.startswith(("mode ", "say "))]
    assert 20 <= len(bare) <= 60
    for text, spans in documents:
        assert len(spans) == 4
        assert all(text[start - 1] in ">." and text[stop - 1] == "\n" for start, stop in spans)
    first = next(text for text in bare if ">" in text).split("\n")[0]
    assert first == first[:4] + ">" + first[:4]  # without a context the word itself


def test_the_llama_is_trained_within_a_cell(
    evaluation: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation.llama_model, "STEPS", 1)
    with torch.no_grad():  # cells are measured so
        model, _ = evaluation.llama_model.train()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_tables_and_pictures_are_of_the_cells(evaluation: ModuleType, tmp_path: Path) -> None:
    page = sys.modules["page"]
    entries = [
        {
            "model": "embedded",
            "kind": kind,
            "name": name,
            "method": "ridge",
            "n": n,
            "rank": 4,
            "seed": seed,
            "quality": {"whole": 0.5 + 0.1 * seed, "kl": 0.25},
            "others": {kind: {"whole": 0.75} for kind in page.KINDS.values()},
            "cpu_seconds": 2.0,
            "bytes": 1000,
        }
        for kind, name in page.TASKS.values()
        for n in (16, 64)
        for seed in (0, 1)
    ]
    # more seeds of a task do not count more in the means over the tasks
    seeds = 3 * [{**entries[0], "quality": {"kl": 1.0}}]
    assert page.over_tasks([*seeds, entries[-1]], lambda e: e["quality"]["kl"]) == 0.625
    lines = page.tables(entries).splitlines()
    share = "0.55 (0.50–0.60)"
    rest = "0.250 | 0.75 | 0.75 | 0.75 | 0.75 | 2.0 | 1,000 |"
    assert lines[2] == f"| ridge | 64 | 4 | {' | '.join([share] * 5)} | {rest}"
    assert lines[3].startswith("| ridge | 16 | 4 |")
    fact = {"kind": "recall", "name": "bem", "seen": {"whole": 1.0}, "paraphrased": {"whole": 0.5}}
    recall = page.tables([*entries, {**entries[0], **fact}]).split("\n\n")[1]
    assert recall.splitlines()[2] == "| ridge | 1.00 | 0.50 | 0.50 |"
    for draw in (page.draw_quality, page.draw_cost):
        draw(entries, tmp_path / f"{draw.__name__}.png")
        assert (tmp_path / f"{draw.__name__}.png").stat().st_size > 5000
