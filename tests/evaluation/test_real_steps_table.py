"""Many processes that check a real model: what they find is summed, judged and kept."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import real_steps

ROOT = Path(__file__).parents[2]
# Stands for the process that measures: it notes how it was called, and fails where a file says so.
STUB = """
import json, os, sys
from pathlib import Path
folder = Path(__file__).parent
model, dtype, plan, out = sys.argv[1:]
environment = [name for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA",
               "MKL_ENABLE_INSTRUCTIONS") if name in os.environ]
with (folder / "calls").open("a") as file:
    file.write(" ".join([dtype, plan, *(f"{n}={os.environ[n]}" for n in environment)]) + "\\n")
if (folder / "fails").exists() and (folder / "fails").read_text() == dtype:
    sys.exit("out of memory")
counts = json.loads((folder / "counts.json").read_text())
Path(out).write_text(json.dumps([counts | {"way": way} for way in ("one pass", "compute")]))
"""
COUNTS = {
    "rows": 3, "reason": None, "tokens": 900, "identical": 900, "same_token": 899, "misses": 0,
    "taken_twice": 2, "saved": 7, "saved_identical": 7, "reader_error": 1e-7, "correction": 1e-7,
    "shortest": 20, "longest": 4000,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, and the stub in place of the process that measures."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "stub.py").write_text(STUB)
    (tmp_path / "counts.json").write_text(json.dumps(COUNTS))
    monkeypatch.setattr(real_steps, "RUN", [sys.executable, str(tmp_path / "stub.py")])
    monkeypatch.setattr(real_steps, "PARTS", tmp_path / "parts")
    monkeypatch.setattr(real_steps, "code_fingerprint", lambda: "code")
    for name in real_steps.ENVIRONMENTS:
        monkeypatch.delenv(name.partition("=")[0], raising=False)
    return tmp_path


def run(folder: Path, *options: str) -> int:
    return real_steps.main([str(folder / "model"), "--out", str(folder / "out.json"), *options])


def calls(folder: Path) -> list[str]:
    lines = sorted((folder / "calls").read_text().splitlines())
    (folder / "calls").unlink()
    return lines


def test_every_dtype_plan_and_environment_is_measured_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder) == 0
    found = calls(folder)
    dtypes = ("bfloat16", "float16", "float32")
    plans = [f"{dtype} {plan}" for dtype in dtypes for plan in ("1 row", "3 rows", "8 rows")]
    others = [
        f"{dtype} short {name}"
        for dtype in dtypes
        for name in real_steps.ENVIRONMENTS
        if not name.startswith("OMP")
    ]
    assert found == sorted([*plans, *others, *(f"{dtype} short" for dtype in dtypes)])
    content = json.loads((folder / "out.json").read_text())
    assert content["model"] == "model"
    assert len(content["counts"]) == 2 * len(found)
    as_it_is = [each for each in content["counts"] if each["environment"] == "as it is"]
    assert {each["dtype"] for each in as_it_is} == set(dtypes)
    assert sum(each["tokens"] for each in as_it_is) == 9 * 2 * 900
    text = capsys.readouterr().out
    assert text.endswith("0 bits differ\n")
    total = 900 * (3 + 6)  # three plans of a dtype and way, and the short one elsewhere
    assert f"float32 compute: {total:,} tokens, {total:,} identical" in text
    assert run(folder) == 0
    assert not (folder / "calls").exists()  # everything was there


def test_a_process_that_fails_is_named_and_run_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "fails").write_text("float32")
    assert run(folder, "--short") == 1
    assert len(calls(folder)) == 21
    text = capsys.readouterr().out
    assert text.count("ended with 1, see ") == 7
    assert "out of memory" in text
    assert not (folder / "out.json").exists()
    (folder / "fails").unlink()
    assert run(folder, "--short") == 0
    assert {line.split()[0] for line in calls(folder)} == {"float32"}


def test_counts_of_other_weights_or_code_are_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = folder / "model", [real_steps.parts_folder(folder / "model")]
    assert real_steps.parts_folder(model) == found[0]
    (model / "model.safetensors").write_bytes(b"x")
    found.append(real_steps.parts_folder(model))
    monkeypatch.setattr(real_steps, "code_fingerprint", lambda: "other")
    found.append(real_steps.parts_folder(model))
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"identical": 899},
        {"saved_identical": 6},
        {"misses": 1},
        {"reader_error": 1e-3},
        {"correction": float("nan")},
        {"reason": "mode='shared_cache' does not cover it"},
        {"tokens": 0, "identical": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_promise_that_does_not_hold_fails(wrong: dict[str, Any]) -> None:
    counts = COUNTS | {"dtype": "float32", "way": "compute", "environment": "as it is"}
    assert real_steps.failures([counts] * 6, 5000) == []
    [line] = real_steps.failures([*[counts] * 6, counts | wrong], 5000)
    assert line.startswith("not exact: ") and '"dtype": "float32"' in line


def test_the_committed_counts_keep_all_promises() -> None:
    path = ROOT / "docs" / "data" / "real-exact.json"
    if not path.exists():
        pytest.skip("no counts of a pretrained model are committed yet: make real writes them")
    counts = json.loads(path.read_text(encoding="utf-8"))["counts"]
    assert real_steps.failures(counts, real_steps.LEAST) == []
    found = {(each["dtype"], each["environment"]) for each in counts}
    environments = (real_steps.AS_IT_IS, *real_steps.ENVIRONMENTS)
    assert found == {(dtype, name) for dtype in real_steps.DTYPES for name in environments}
