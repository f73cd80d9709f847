"""The protocol over a data set: its numbers are those of each row's own run, by task."""

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import Run
from support.data_sets import prompts, write_json_lines
from support.random_models import build, longrope
from transformers import PreTrainedModel

from icl_patch import ContextPatch, embedded, verify
from icl_patch.evaluation import tiny_models
from icl_patch.recording.attached_model import AttachedModel

pytest.importorskip("icl_patch.scale", reason="no pyarrow")

from icl_patch.evaluation.verify_dataset import (
    DatasetReport,
    median_interval,
    verify_dataset,
    wilson_interval,
)
from icl_patch.scale import Columns

TOKENIZER = embedded.load()[1]
ROWS = [row | {"task": place % 3} for place, row in enumerate(prompts(13))]
BY_TASK = Columns(task="task")
STEPS = 3
STABLE: dict[str, Any] = {"update": "stable", "max_new_tokens": STEPS}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_json_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


def tiny() -> PreTrainedModel:
    return build("llama", vocab_size=len(TOKENIZER))


def test_the_numbers_are_those_of_each_row(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of replays that are wrong, so that some tokens differ; one row at a time, as :func:`verify`
    takes them.
    """
    replay = AttachedModel.replay

    def wrong(self: AttachedModel, patch: ContextPatch) -> tuple:
        logits, activations = replay(self, patch)
        waves = torch.sin(patch.kept_ids.sum() + torch.arange(logits.shape[-1]))
        return logits + 0.1 * logits.abs().amax() * waves, activations

    monkeypatch.setattr(AttachedModel, "replay", wrong)
    model = tiny()
    found = verify_dataset(model, TOKENIZER, dataset, BY_TASK, batch_rows=1, **STABLE)
    assert found.promises and not found.passed and found.rejected == 0
    texts = [row["context"] + row["kept"] for row in ROWS]
    own = [verify(model, TOKENIZER, context=text, **STABLE) for text in texts]
    assert [task.task for task in found.tasks] == ["0", "1", "2"]
    for number, task in enumerate([*found.tasks, found.total]):
        reports = own if task.task == "all" else own[number::3]
        linf, tvd = (
            [max(getattr(step, name) for step in report.steps) for report in reports]
            for name in ("linf", "tvd")
        )
        assert task.rows == len(reports)
        assert task.match == pytest.approx(sum(x.token_match for x in reports) / task.rows)
        identical = sum(x.bit_identical for x in reports) / task.rows
        assert task.bit_identical == pytest.approx(identical)
        assert task.linf == pytest.approx(statistics.median(linf))
        assert task.tvd == pytest.approx(statistics.median(tvd))
        assert (task.linf_max, task.tvd_max) == (max(linf), max(tvd))
        if task.rows < 6:
            assert task.linf_interval is None
        else:
            low, high = task.linf_interval
            assert {low, high} <= set(linf) and low < task.linf < high
        assert task.match_interval[0] <= task.match <= task.match_interval[1]
    assert 0 < found.total.match < 1
    floors = [report.noise_floor for report in own]
    assert found.noise_floor == {key: max(x[key] for x in floors) for key in floors[0]}


def test_a_batch_has_the_rows_numbers(dataset: Path) -> None:
    """Padded, up to the noise; exact ones are bit-identical to the padded batch."""
    model = tiny()
    alone, together = (
        verify_dataset(model, TOKENIZER, dataset, batch_rows=rows, **STABLE) for rows in (1, 5)
    )
    assert alone.tasks == together.tasks == []
    assert alone.total.match == together.total.match == 1 and together.passed
    limit = 10 * max(alone.noise_floor["linf_max"], together.noise_floor["linf_max"])
    assert alone.total.linf_max <= limit and together.total.linf_max <= limit
    exact = verify_dataset(model, TOKENIZER, dataset, max_new_tokens=STEPS, batch_rows=5)
    assert exact.passed and exact.promises
    assert exact.total.bit_identical == 1 and exact.total.linf_max == exact.total.tvd_max == 0


def test_a_model_that_takes_no_padding(tmp_path: Path) -> None:
    model = tiny_models.build("recurrent_gemma", vocab_size=len(TOKENIZER))
    dataset = write_json_lines(tmp_path / "rows.jsonl", ROWS[:3])
    found = verify_dataset(model, TOKENIZER, dataset, **STABLE)
    assert found.passed and (found.total.rows, found.rejected) == (3, 0)


def test_rows_on_both_sides_of_a_length_of_longrope(tmp_path: Path) -> None:
    """Each by itself, and one crosses it: a batch would go by its longest row."""
    model = tiny_models.build(
        "phi3",
        vocab_size=len(TOKENIZER),
        num_hidden_layers=2,
        rope_parameters=longrope(16),
        original_max_position_embeddings=16,
    )
    rows = [{"context": count * "xy z", "kept": "ab"} for count in (3, 5)]
    found = verify_dataset(
        model, TOKENIZER, write_json_lines(tmp_path / "rows.jsonl", rows), batch_rows=2, **STABLE
    )
    texts = [row["context"] + row["kept"] for row in rows]
    assert [len(TOKENIZER(text).input_ids) for text in texts] == [15, 23]
    own = [verify(model, TOKENIZER, context=text, **STABLE) for text in texts]
    assert (found.total.rows, found.rejected) == (2, 0)
    assert found.total.linf_max == max(step.linf for report in own for step in report.steps)


def test_rows_that_cannot_be_verified(tmp_path: Path) -> None:
    """Those of the same batch can; the progress counts all."""
    model = tiny()
    zero = TOKENIZER("\x01", add_special_tokens=False).input_ids[0]
    model.get_input_embeddings().weight.data[zero] = 0
    bad = [
        {"context": "a", "kept": ""},
        {"context": "x" * 253, "kept": "y"},  # with its bos and two new tokens one too many
        {"context": "ab", "kept": "c\x01"},
    ]
    dataset = write_json_lines(tmp_path / "rows.jsonl", [ROWS[0], *bad, ROWS[1]])
    steps: list[tuple[int, int]] = []
    counting = {"progress": lambda *counts: steps.append(counts)}
    found = verify_dataset(model, TOKENIZER, dataset, **STABLE, **counting)
    assert (found.total.rows, found.rejected) == (2, 3) and found.passed
    reasons = sorted(found.reasons)
    assert reasons[0] == "row 1: expected text in column 'kept', got ''"
    assert reasons[1].startswith("row 2: expected at most 256 tokens")
    assert reasons[2].startswith("row 3: ") and "is 0" in reasons[2]
    assert steps[0] == (0, 5) and steps[-1] == (5, 5)


NOTHING = {
    "empty": ([], {}, "none: it is empty"),
    "column": ([{"prompt": "a"}], {}, "none: row 0: expected a column 'context', got 'prompt'"),
    "task": (ROWS[:1], {"columns": Columns(task="kind")}, "none: row 0: expected a column 'kind'"),
    "short": ([{"context": "a", "kept": "b"}], {"keep_last": 2}, "more than 3 tokens, got 3"),
    "steps": (ROWS[:1], {"max_new_tokens": 0}, "expected max_new_tokens ≥ 1"),
    "rows": (ROWS[:1], {"batch_rows": 0}, "expected batch_rows ≥ 1, got 0"),
    "update": (ROWS[:1], {"update": "good"}, "expected update direct, stable, exact"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_without_a_good_row_or_argument(case: str, tmp_path: Path) -> None:
    rows, arguments, message = NOTHING[case]
    dataset = write_json_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        verify_dataset(tiny(), TOKENIZER, dataset, **arguments)


INTERVALS = [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611))]
INTERVALS += [(1, 29, (0.0061, 0.1718)), (20, 20, (0.8389, 1.0))]


@pytest.mark.parametrize(("count", "of", "interval"), INTERVALS)
def test_wilson_intervals(count: int, of: int, interval: tuple[float, float]) -> None:
    """Those of Newcombe (1998), table I, method 3."""
    assert wilson_interval(count / of, of) == pytest.approx(interval, abs=5e-5)


def test_the_interval_of_a_median_covers_it() -> None:
    """By the binomial distribution of the number of values below it; one rank less does not."""
    assert median_interval(torch.arange(5.0)) is None
    tighter = []
    for count in (6, 7, 13, 50, 199, 1000):
        shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0)).double()
        low, high = median_interval(shuffled)
        below = [math.comb(count, k) / 2**count for k in range(count + 1)]
        assert low == count - 1 - high
        assert sum(below[int(low) + 1 : int(high) + 1]) >= 0.95
        tighter.append(sum(below[int(low) + 3 : int(high) - 1]))
    assert max(tighter) < 0.95


def test_the_command(dataset: Path, tmp_path: Path, run: Run) -> None:
    """On the embedded model: a table, and the same as JSON; the exit status says that rows are
    missing.
    """
    command = ("--dataset", dataset, "--task-column", "task", "--max-new-tokens", 2)
    command += ("--update", "stable", "--batch-size", 5)
    status, text, _ = run("verify", *command)
    assert status == 0 and "promise kept: yes" in text and "│ all " in text
    status, text, _ = run("verify", *command, "--json")
    written = json.loads(text)
    assert status == 0 and written.pop("passed")
    assert asdict(DatasetReport(**written)) == written
    assert [task["rows"] for task in written["tasks"]] == [5, 4, 4]
    assert written["total"]["match"] == 1
    write_json_lines(tmp_path / "rows.jsonl", [ROWS[0], {"kept": "a"}])
    command = ("--dataset", tmp_path / "rows.jsonl", "--max-new-tokens", 1)
    status, text, _ = run("verify", *command)
    assert status == 1 and "promise kept: yes" in text
    assert "rows that could not be verified: 1" in text
    assert "row 1: expected a column 'context', got 'kept'" in text
