"""Records of bits: what differs is found and named, however small, and nothing else is."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.numeric import bits
from torch import Tensor

from icl_patch import ContextPatch, ContextPatcher
from icl_patch.evaluation import tiny_models

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import compare_bits
import record_bits
from compare_bits import differences
from record_bits import Record


def flip_lowest_bit(x: Tensor) -> None:
    """The smallest change there is: of one element, in place."""
    assert x.is_contiguous()
    bits(x).view(-1)[-1] ^= 1


def patch_of(model: Any) -> ContextPatch:
    with ContextPatcher(model, "stable") as patcher:
        return patcher.compute(record_bits.tokens(0, 2, 5), record_bits.tokens(1, 2, 3))


def entries_of(patch: ContextPatch) -> dict[str, str]:
    record = Record()
    record.patch("x", patch)
    return record.entries


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_digest_is_of_the_bits(dtype: torch.dtype) -> None:
    x = torch.arange(1, 13).to(dtype).reshape(3, 4)
    digest = record_bits.digest
    assert digest(x) == digest(x.clone()) == digest(x.T.contiguous().T)
    changed = x.clone()
    flip_lowest_bit(changed)
    others = [changed, x.T, x.reshape(4, 3), x.view(-1), x[:0], x.to(torch.float16)]
    assert len({digest(other) for other in (x, *others)}) == 1 + len(others)
    if dtype.is_floating_point:
        assert digest(torch.zeros(1, dtype=dtype)) != digest(-torch.zeros(1, dtype=dtype))


def test_a_flipped_bit_of_a_factor_is_found_and_named() -> None:
    patch = patch_of(tiny_models.build("gemma3"))
    before = entries_of(patch)
    assert "x/factors/layers.3.post_feedforward_layernorm.new_scale" in before
    assert differences(before, entries_of(patch)) == []
    flip_lowest_bit(patch.layers[2]["mlp.down_proj.u"])
    flip_lowest_bit(patch.kept_ids)
    assert differences(before, entries_of(patch)) == [
        "differs: x/factors/layers.2.mlp.down_proj.u",
        "differs: x/kept_ids",
    ]


def test_a_flipped_bit_of_a_weight_is_found_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_bits, "UPDATES", ("stable", "exact"))

    def recorded(flipped: bool) -> dict[str, str]:
        model, record = tiny_models.build("llama", num_hidden_layers=2), Record()
        weight = model.model.layers[1].mlp.up_proj.weight.data
        bits(weight).view(-1)[-1] ^= flipped << 22  # the first after the point
        cases = record_bits.cases_of("llama", torch.float32)
        record_bits.record_model(record, "m", model, cases)
        return record.entries

    before = recorded(False)
    assert differences(before, recorded(False)) == []
    lines = differences(before, recorded(True))
    differing = {line.removeprefix("differs: m/") for line in lines}
    expected = {
        f"{update}/{case}/{entry}"
        for update in ("stable", "exact")
        for case in ("context", "prefix")
        for entry in ("logits", "replay", "factors/layers.1.mlp.up_proj.u")
    }
    expected.add("exact/generate/two_pass/3/logits")
    for mode in ("two_stream", "shared_cache", "auto"):
        expected |= {f"stable/generate/{mode}/{entry}" for entry in ("0/logits", "3/logits")}
    assert expected <= differing
    assert not [name for name in differing if "layers.0" in name]


def test_a_changed_tensor_and_a_changed_field_of_a_file_are_told_apart(tmp_path: Path) -> None:
    path, record, changed = tmp_path / "patch.safetensors", Record(), Record()
    patch_of(tiny_models.build("llama")).save(path)
    record_bits.record_content(record, "file", path)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()["icl_patch"])
    flip_lowest_bit(tensors["layers.1.readers.v"])
    header["passes"] += 1
    header["blocks"][3]["path"] += "x"
    save_file(tensors, path, metadata={"icl_patch": json.dumps(header)})
    record_bits.record_content(changed, "file", path)
    assert differences(record.entries, changed.entries) == [
        "differs: file/tensors/layers.1.readers.v",
        "differs: file/header/icl_patch/passes",
        "differs: file/header/icl_patch/blocks/3/path",
    ]


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Two records that differ in one entry, and in the name of another."""
    paths = {}
    for side, value in (("old", 1), ("new", 2)):
        record = Record()
        record.json("x", {"same": 0, "changed": value, f"{side}_name": [3]})
        monkeypatch.setattr(record_bits, "record_all", lambda quick, record=record: record)
        paths[side] = tmp_path / side / "bits.json"
        assert record_bits.main([str(paths[side]), "--quick"]) == 0
    return paths


def test_comparing_names_what_differs(
    records: dict[str, Path],
    capsys: pytest.CaptureFixture,
) -> None:
    old, new = map(str, records.values())
    capsys.readouterr()
    assert compare_bits.main([old, old]) == 0
    assert capsys.readouterr().out == "0 differences in 3 entries\n"
    assert compare_bits.main([old, new]) == 1
    lines = ["differs: x/changed", "only in OLD: x/old_name", "only in NEW: x/new_name"]
    assert capsys.readouterr() == ("\n".join([*lines, "3 differences in 3 entries\n"]), "")


def test_a_quick_record_is_not_compared_with_a_whole_one(
    records: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole = tmp_path / "whole.json"
    whole.write_text('{"quick": false, "environment": {}, "entries": {}}', encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        compare_bits.main([str(whole), str(records["old"])])
    assert left.value.code == 2
    assert "got one of each" in capsys.readouterr().err
