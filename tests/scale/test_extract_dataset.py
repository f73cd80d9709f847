"""A patch for every row of a data set: right, whole, once, and each bad row with its reason."""

import hashlib
import itertools
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.data_sets import files, own_logits, prompts, write_json_lines
from support.full_disk import full_disk
from support.numeric import noise_limit, within_roundings
from support.random_models import Stock, build, longrope
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch import ContextPatch, ContextPatcher, PatchFormatError, embedded, metrics
from icl_patch.errors import FingerprintMismatch
from icl_patch.evaluation import tiny_models

scale = pytest.importorskip("icl_patch.scale", reason="no pyarrow")

from icl_patch.scale import extraction  # noqa: E402
from icl_patch.scale.rows import Row, read_rows  # noqa: E402

ROWS = prompts(12)
TOKENIZER = embedded.load()[1]
VOCABULARY = len(TOKENIZER)
SMALL = scale.Batching(rows=4)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_json_lines(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def patcher() -> Iterator[ContextPatcher]:
    """Exact, on a small Llama that reads bytes."""
    model = build("llama", vocab_size=VOCABULARY)
    with ContextPatcher(model, "exact", tokenizer=TOKENIZER) as patcher:
        yield patcher


@pytest.fixture(scope="module")
def extracted(
    patcher: ContextPatcher, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the patches of all rows, which tests leave as it is."""
    folder = tmp_path_factory.mktemp("extracted") / "patches"
    summary = scale.extract_dataset(patcher, dataset, folder, batching=SMALL)
    assert (summary.patches, summary.rejected, summary.rejects) == (len(ROWS), 0, None)
    return folder


def reasons(path: Path) -> dict[int, str]:
    lines = path.read_text().splitlines()
    return {record["row"]: record["reason"] for record in map(json.loads, lines)}


# Padding, rows of one length (its states see padding), batches of one (a direct patch of a scale
# writer is replayed whole), experts, and frequencies that depend on the longest row of a batch.
MODELS = {
    "llama": ("llama", "exact"),
    "one length": ("recurrent_gemma", "stable"),
    "undivided": ("gemma3", "direct"),
    "experts": ("qwen3_moe", "stable"),
    "LongRoPE": ("phi3", "stable"),
}
LONGROPE = longrope(18)


def model_of(family: str) -> PreTrainedModel:
    make = build if family in ("llama", "gemma3") else tiny_models.build
    changes: dict[str, Any] = {"vocab_size": VOCABULARY}
    if family == "phi3":
        changes |= {"rope_parameters": LONGROPE, "original_max_position_embeddings": 18}
    return make(family, **changes)


@pytest.mark.parametrize("case", MODELS)
def test_every_patch_replays_without_its_context(case: str, dataset: Path, tmp_path: Path) -> None:
    family, update = MODELS[case]
    model = model_of(family)
    limit = noise_limit(model)
    expected = [own_logits(model, TOKENIZER, row) for row in ROWS]
    with ContextPatcher(model, update, tokenizer=TOKENIZER) as patcher:
        summary = scale.extract_dataset(patcher, dataset, tmp_path / "out", batching=SMALL)
        assert summary.patches == len(ROWS)
        patches = scale.PatchDataset(tmp_path / "out")
        assert patches.index["row"].to_pylist() == list(range(len(ROWS)))
        for place, row in enumerate(ROWS):
            patch = patches[place]
            assert TOKENIZER.decode(patch.kept_ids[0]) == row["kept"]
            logits = patcher.forward(patch.kept_ids, patch)
            assert float(metrics.linf(logits[0], expected[place]).max()) <= limit
    sizes = [len(patch.kept_ids) for _, patch in patches.batches()]
    assert sum(sizes) == len(ROWS)
    assert (max(sizes) == 1) is (case == "undivided")


def test_a_whole_shard_is_bit_identical(patcher: ContextPatcher, extracted: Path) -> None:
    """To the unpatched model, run on the padded contexts and then on the kept tokens."""
    stock = Stock(build("llama", vocab_size=VOCABULARY))
    for table, patch in scale.PatchDataset(extracted).batches():
        rows = [ROWS[number] for number in table["row"].to_pylist()]
        inputs = {}
        for name, side in (("context", "left"), ("kept", "right")):
            options = {"padding": True, "padding_side": side, "return_tensors": "pt"}
            options["add_special_tokens"] = name == "context"
            encoded = TOKENIZER([row[name] for row in rows], **options)
            inputs[f"{name}_ids"] = encoded.input_ids
            inputs[f"{name}_mask"] = encoded.attention_mask.bool()
        expected = stock.logits(inputs)
        logits = patcher.forward(patch.kept_ids, patch)
        assert torch.equal(logits[patch.kept_mask], expected[patch.kept_mask])
        assert table["misses"].to_pylist() == [0] * len(rows)


def test_the_index_says_what_the_files_hold(extracted: Path) -> None:
    patches = scale.PatchDataset(extracted)
    assert len(patches) == len(ROWS)
    for place, entry in enumerate(patches.index.to_pylist()):
        row, patch = ROWS[place], patches[place]
        assert entry["row"] == place
        assert entry["context_sha256"] == hashlib.sha256(row["context"].encode()).hexdigest()
        assert entry["kept_sha256"] == hashlib.sha256(row["kept"].encode()).hexdigest()
        assert entry["context_tokens"] == len(row["context"]) + 1  # <bos>
        assert entry["kept_tokens"] == len(row["kept"]) == patch.kept_ids.shape[1]
        whole = ContextPatch.load(extracted / entry["file"]).kept_ids[entry["offset"]]
        assert torch.equal(whole[: entry["kept_tokens"]], patch.kept_ids[0])
        again = patches[entry["id"]]
        assert torch.equal(again.layers[0]["readers.v"], patch.layers[0]["readers.v"])
        for token in range(entry["kept_tokens"]):
            for name, change in patch.weight_changes(0, token):
                layer, module = re.fullmatch(r"model\.layers\.(\d)\.(.*)\.weight", name).groups()
                got = torch.tensor(entry["norms"][module][int(layer)][token])
                size = change.double().norm()
                assert within_roundings(got, size, change.shape[-1], size), (name, token)
    for several in (slice(0, 2), [0, 1]):
        with pytest.raises(TypeError, match="expected the place of one patch, or its id, got"):
            patches[several]
    assert json.loads(patches.index.schema.metadata[b"icl_patch"]) == vars(patches.run)


def dense_sums(patch: ContextPatch) -> dict[str, tuple[Tensor, float]]:
    """Every parameter's changes summed over the tokens, as matrices, and the sum of their norms."""
    sums: dict[str, tuple[Tensor, float]] = {}
    for token in range(patch.kept_ids.shape[1]):
        for name, change in patch.weight_changes(0, token):
            total, size = sums.get(name, (torch.zeros_like(change).double(), 0.0))
            sums[name] = total + change.double(), size + float(change.double().norm())
    return sums


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe"])
def test_statistics_are_those_of_the_matrices(family: str, dataset: Path, tmp_path: Path) -> None:
    model = model_of(family)
    statistics = scale.Contents(statistics=True, layers=slice(1, 3))
    alone = scale.Batching(rows=1)  # as below, so that the factors have the same bits
    with ContextPatcher(model, "stable", tokenizer=TOKENIZER) as patcher:
        scale.extract_dataset(patcher, dataset, tmp_path / "s", contents=statistics, batching=alone)
        ids = [TOKENIZER(row["context"], return_tensors="pt").input_ids for row in ROWS]
        alone = {"add_special_tokens": False, "return_tensors": "pt"}
        kept = [TOKENIZER(row["kept"], **alone).input_ids for row in ROWS]
        computed = [patcher.compute(*pair) for pair in zip(ids, kept, strict=True)]
    patches = scale.PatchDataset(tmp_path / "s")
    assert list((tmp_path / "s" / "shards").iterdir()) == []
    with pytest.raises(ValueError, match=r"expected patches with factors, .* statistics without"):
        patches[0]
    looked_at = 0
    for entry, patch in zip(patches.index.to_pylist(), computed, strict=True):
        assert entry["file"] is entry["offset"] is None
        squares, sizes, ranks = (Counter[tuple[int, str]]() for _ in range(3))
        for name, (total, size) in dense_sums(patch).items():
            layer, module = re.fullmatch(r"model\.layers\.(\d)\.(.*)", name).groups()
            key = int(layer) - 1, re.sub(r"(\.weight|\[\d+\])$", "", module)
            squares[key] += float(total.square().sum())
            sizes[key] += size
            matrix = total if total.dim() == 2 else total[None]
            spacing = torch.finfo(torch.float32).eps * max(matrix.shape)
            ranks[key] += int(torch.linalg.matrix_rank(matrix, rtol=spacing))
        for (layer, module), square in squares.items():
            if layer not in (0, 1):
                continue
            got = torch.tensor(entry["sums"][module][layer])
            total, size = (torch.tensor(x).double() for x in (square**0.5, sizes[layer, module]))
            # the elements of a matrix are rounded to fp32, and so is the sum in the index
            assert within_roundings(got, total, 2, size), (layer, module)
            assert entry["ranks"][module][layer] == ranks[layer, module], (layer, module)
            looked_at += 1
    assert looked_at >= 2 * 3 * len(ROWS)


def test_rounded_factors_and_their_error(
    patcher: ContextPatcher, dataset: Path, extracted: Path, tmp_path: Path
) -> None:
    rounded = scale.Contents(factors_dtype=torch.bfloat16)
    out, options = tmp_path / "bf16", {"contents": rounded, "batching": SMALL}
    summary = scale.extract_dataset(patcher, dataset, out, **options)
    shards = (folder.glob("shards/*") for folder in (out, extracted))
    sizes = [sum(path.stat().st_size for path in paths) for paths in shards]
    assert sizes[0] < 0.5 * sizes[1]
    errors = []
    for table, patch in scale.PatchDataset(out).batches():
        assert patch.digest is not None and patch.digest.bits is None
        with warnings.catch_warnings():  # its replay is that of the rounded factors
            warnings.simplefilter("error")
            logits = patcher.forward(patch.kept_ids, patch)
        for place, entry in enumerate(table.to_pylist()):
            kept = entry["kept_tokens"]
            model = build("llama", vocab_size=VOCABULARY)
            expected = own_logits(model, TOKENIZER, ROWS[entry["row"]])
            error = float(metrics.linf(logits[place, :kept], expected).max())
            # the file's own reference is the padded batch
            assert entry["replay_error"] == pytest.approx(error, abs=noise_limit(patcher.model))
            errors.append(error)
    limit = noise_limit(patcher.model)
    assert summary.largest_replay_error == pytest.approx(max(errors), abs=limit)
    assert max(errors) > 100 * limit  # bf16 has 2^16 times fp32's spacing
    dtypes = {x.dtype for layer in patch.layers for x in layer.values()}
    assert dtypes == {torch.float32}  # as it is replayed


def test_new_scales_are_not_rounded(dataset: Path, tmp_path: Path) -> None:
    rounded = scale.Contents(factors_dtype=torch.bfloat16)
    with ContextPatcher(model_of("gemma3"), "stable", tokenizer=TOKENIZER) as patcher:
        scale.extract_dataset(patcher, dataset, tmp_path / "out", contents=rounded)
    shards = map(load_file, (tmp_path / "out" / "shards").iterdir())
    factors = [(k, x) for shard in shards for k, x in shard.items() if k.startswith("layers.")]
    dtypes = {(name.endswith("scale"), x.dtype) for name, x in factors}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def test_some_layers(patcher: ContextPatcher, dataset: Path, tmp_path: Path) -> None:
    contents = scale.Contents(layers=slice(1, None))
    scale.extract_dataset(patcher, dataset, tmp_path / "part", contents=contents)
    patches = scale.PatchDataset(tmp_path / "part")
    patch = patches[0]
    assert patches.run.layers == [1, 2] == list(patch.layer_indices)
    assert len(patches.index["norms"][0].as_py()["mlp.up_proj"]) == 2
    with pytest.raises(ValueError, match="a part of one"):
        patcher.forward(patch.kept_ids, patch)
    with pytest.raises(ValueError, match=r"expected layers among 3, .* slice\(5, None, None\)"):
        scale.extract_dataset(
            patcher, dataset, tmp_path / "none", contents=scale.Contents(layers=slice(5, None))
        )
    assert not (tmp_path / "none").exists()


def test_further_rows_and_duplicates(
    patcher: ContextPatcher, extracted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is new is computed; equal rows share a patch."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(extracted, Path("s3:more"))  # which pyarrow takes for a URI
    leftover = folder / "shards" / ".icl-patch-1"
    leftover.touch()  # a process that was killed long ago left it
    os.utime(leftover, (0, 0))
    more = [*ROWS, {"context": "new", "kept": "row"}, *ROWS[:5], {"context": "new", "kept": "row"}]
    summary = scale.extract_dataset(
        patcher, write_json_lines(tmp_path / "more.jsonl", more), folder, batching=SMALL
    )
    plan = summary.plan
    assert (plan.rows, plan.finished, plan.todo, plan.duplicates) == (19, 12, 1, 6)
    assert summary.patches == 1
    ids = scale.PatchDataset(folder).index["id"].to_pylist()
    assert len(ids) == len(set(ids)) == len(ROWS) + 1
    assert files(extracted).items() <= files(folder).items()
    assert not list(folder.rglob(".*"))


MOVED = {"in front": [ROWS[-1], *ROWS], "reversed": ROWS[::-1], "other": prompts(24)[1::2]}


@pytest.mark.parametrize("case", MOVED)
def test_rows_that_are_not_where_the_index_says(
    case: str, patcher: ContextPatcher, extracted: Path, tmp_path: Path
) -> None:
    before = files(extracted)
    moved = write_json_lines(tmp_path / "rows.jsonl", MOVED[case])
    with pytest.raises(ValueError, match=r"rows are those of the patches in .*, got another row 0"):
        scale.extract_dataset(patcher, moved, extracted, batching=SMALL)
    assert files(extracted) == before


def test_runs_at_the_same_time(
    patcher: ContextPatcher, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One begins when another has its plan. No patch is in the index twice, and all are right, also
    in a shard of which another one has some rows.
    """
    count = itertools.count()  # names in the order of writing: the first patch of a row stays
    monkeypatch.setattr(scale.run.Run, "name_of", lambda run, _: f"{run.key}-{next(count):02}")
    out, some = tmp_path / "out", write_json_lines(tmp_path / "some.jsonl", ROWS[:5])

    def begin(_: Any) -> None:
        scale.extract_dataset(patcher, some, out, batching=SMALL)

    scale.extract_dataset(patcher, dataset, out, batching=SMALL, on_plan=begin)
    patches = scale.PatchDataset(out)
    assert patches.index["row"].to_pylist() == list(range(len(ROWS)))
    assert {f"shards/{x.name}" for x in out.glob("shards/*")} == {
        *patches.index["file"].to_pylist()
    }
    model = build("llama", vocab_size=VOCABULARY)
    found, cut = [], 0
    for table, patch in patches.batches():
        whole = ContextPatch.load(out / table["file"][0].as_py())
        cut += len(patch.kept_ids) < len(whole.kept_ids)
        logits = patcher.forward(patch.kept_ids, patch)
        for place, entry in enumerate(table.to_pylist()):
            own = own_logits(model, TOKENIZER, ROWS[entry["row"]])
            got = logits[place, : entry["kept_tokens"]]
            assert float(metrics.linf(got, own).max()) <= noise_limit(patcher.model)
            found.append(entry["row"])
    assert sorted(found) == list(range(len(ROWS))) and cut


def test_processes_share_the_work(patcher: ContextPatcher, tmp_path: Path) -> None:
    """Together they write what one process writes, and each bad row is rejected once."""
    bad = [{"context": "x" * 300, "kept": "y"}, {"kept": "y"}, "no object"]
    dataset = write_json_lines(tmp_path / "rows.jsonl", [*ROWS, *bad])
    single = scale.Batching(rows=1)
    written = []
    for rank in (2, 0, 1):
        summary = scale.extract_dataset(
            patcher, dataset, tmp_path / "shared", batching=single, share=scale.Share(rank, 3)
        )
        written.append(summary.patches)
    assert sum(written) == len(ROWS) and max(written) < len(ROWS)
    rejects = sorted((tmp_path / "shared").glob("rejects-*-of-00003.jsonl"))
    found = Counter(number for path in rejects for number in reasons(path))
    assert found == {len(ROWS): 1, len(ROWS) + 1: 1, len(ROWS) + 2: 1}
    again = scale.extract_dataset(patcher, dataset, tmp_path / "shared", batching=single)
    assert (again.patches, again.rejected) == (0, 3)
    scale.extract_dataset(patcher, dataset, tmp_path / "alone", batching=single)
    assert files(tmp_path / "shared") == files(tmp_path / "alone")


def test_bad_rows_go_to_the_rejects(tmp_path: Path) -> None:
    """Rows that the model cannot take, and one that has no patch: the others of its batch do."""
    model = build("llama", vocab_size=VOCABULARY)
    zero = TOKENIZER("\x01", add_special_tokens=False).input_ids[0]
    model.get_input_embeddings().weight.data[zero] = 0
    rows = [*ROWS[:3], {"context": "x" * 300, "kept": "y"}, {"context": "abc", "kept": "\x01de"}]
    dataset = write_json_lines(tmp_path / "rows.jsonl", [*rows, {"kept": "y"}])
    with ContextPatcher(model, "stable", tokenizer=TOKENIZER) as patcher:
        summary = scale.extract_dataset(patcher, dataset, tmp_path / "out")
        assert (summary.patches, summary.rejected) == (3, 3)
        again = scale.extract_dataset(patcher, dataset, tmp_path / "out")
        assert (again.patches, again.rejected, again.plan.finished) == (0, 3, 3)
        found = reasons(summary.rejects)
        assert found.keys() == {3, 4, 5}
        assert found[3] == (
            "expected at most 256 tokens, as many as the model has positions for, got 302"
        )
        assert "the input z of mlp.gate_proj is 0" in found[4]
        assert found[5] == "expected a column 'context', got 'kept'"
        assert sorted(scale.PatchDataset(tmp_path / "out").index["row"].to_pylist()) == [0, 1, 2]
        better = write_json_lines(dataset, ROWS[:3])
        assert scale.extract_dataset(patcher, better, tmp_path / "out").rejects is None
    assert not summary.rejects.exists()  # that of the run before


@pytest.mark.parametrize("statistics", [True, False])
def test_factors_that_are_not_finite(
    statistics: bool,
    patcher: ContextPatcher,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One row of a batch has them: it alone is rejected."""
    compute = patcher.compute
    bad = TOKENIZER(ROWS[2]["kept"], add_special_tokens=False, return_tensors="pt").input_ids[0]

    def computed(context: Tensor, kept: Tensor, **masks: Tensor) -> ContextPatch:
        patch = compute(context, kept, **masks)
        for row, ids in enumerate(kept):
            if torch.equal(ids[masks["kept_mask"][row]], bad):
                patch.layers[1]["mlp.up_proj.u"][row] = torch.nan
        return patch

    monkeypatch.setattr(patcher, "compute", computed)
    contents = scale.Contents(statistics=statistics)
    summary = scale.extract_dataset(patcher, dataset, tmp_path / "out", contents=contents)
    assert summary.patches == len(ROWS) - 1
    [(number, reason)] = reasons(summary.rejects).items()
    assert number == 2
    assert "expected finite factors, got NaN or infinity in" in reason


NO_ROWS: dict[str, tuple[list[Any], str]] = {
    "empty": ([], "can have a patch, got none: it is empty"),
    "column": ([{"prompt": "a"}], "got none: row 0: expected a column 'context', got 'prompt'"),
    "too long": ([{"context": "x" * 300, "kept": "y"}], "got none: row 0: expected at most 256"),
}


@pytest.mark.parametrize("case", NO_ROWS)
def test_without_a_good_row_nothing_is_written(
    case: str, patcher: ContextPatcher, tmp_path: Path
) -> None:
    rows, message = NO_ROWS[case]
    dataset = write_json_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        scale.extract_dataset(patcher, dataset, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_plan_is_right(patcher: ContextPatcher, dataset: Path, tmp_path: Path) -> None:
    """It comes before anything is written, and names the bytes that are written then."""
    plans: list[Any] = []

    def look(plan: Any) -> None:
        assert not (tmp_path / "out").exists()
        plans.append(plan)

    scale.extract_dataset(patcher, dataset, tmp_path / "out", batching=SMALL, on_plan=look)
    [plan] = plans
    assert (plan.rows, plan.todo, plan.finished) == (len(ROWS), len(ROWS), 0)
    assert plan.kept_tokens == sum(len(row["kept"]) for row in ROWS)
    patches = scale.PatchDataset(tmp_path / "out")
    factors = sum(patches[place].nbytes for place in range(len(ROWS)))
    assert plan.nbytes == factors
    assert f"about {plan.kept_tokens} kept tokens of" in str(plan)
    assert "TOO LITTLE" not in str(plan)
    full = scale.Plan(**vars(plan) | {"free": plan.nbytes - 1})
    assert "TOO LITTLE (--factors-dtype" in str(full)


def test_a_full_disk(
    patcher: ContextPatcher, dataset: Path, extracted: Path, tmp_path: Path
) -> None:
    """What was written is whole, and the run goes on where there is room."""
    sizes = sorted(path.stat().st_size for path in extracted.glob("shards/*"))
    with full_disk(1000), pytest.raises(OSError, match=r"File too large: '.*shards/"):
        scale.extract_dataset(patcher, dataset, tmp_path / "out", batching=SMALL)
    assert len(scale.PatchDataset(tmp_path / "out")) == 0
    with full_disk(sizes[0] + 1), pytest.raises(OSError, match=r"File too large: '.*shards/"):
        scale.extract_dataset(patcher, dataset, tmp_path / "out", batching=SMALL)
    there = scale.PatchDataset(tmp_path / "out")
    for _, patch in there.batches():
        assert patcher.forward(patch.kept_ids, patch).isfinite().all()
    assert files(tmp_path / "out").items() <= files(extracted).items()
    scale.extract_dataset(patcher, dataset, tmp_path / "out", batching=SMALL)
    assert files(tmp_path / "out") == files(extracted)


def test_files_of_another_run(dataset: Path, extracted: Path, tmp_path: Path) -> None:
    before = files(extracted)
    for update, seed, differing in (("stable", 0, "update"), ("exact", 7, "fingerprint")):
        model = build("llama", seed, vocab_size=VOCABULARY)
        with ContextPatcher(model, update, tokenizer=TOKENIZER) as other:
            message = f"expected patches of this run .* with {differing} "
            with pytest.raises(ValueError, match=message):
                scale.extract_dataset(other, dataset, extracted)
            row = write_json_lines(tmp_path / "row.jsonl", ROWS[:1])
            scale.extract_dataset(other, row, tmp_path / update)
    assert files(extracted) == before
    folder = shutil.copytree(extracted, tmp_path / "mixed")
    [foreign] = (tmp_path / "exact" / "shards").iterdir()
    shutil.copy(foreign, folder / "shards")
    with pytest.raises(ValueError, match=f"got {foreign.name}, which is of another run or model"):
        scale.PatchDataset(folder)
    (folder / "shards" / foreign.name).unlink()
    own = next((folder / "shards").iterdir())
    shutil.copy(foreign, own)  # under the name of an own one
    patches = scale.PatchDataset(folder)
    place = patches.index["file"].to_pylist().index(f"shards/{own.name}")
    with pytest.raises(FingerprintMismatch, match="expected a patch of the run in"):
        patches[place]


def test_damaged_and_missing_files(
    patcher: ContextPatcher, dataset: Path, extracted: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(extracted, tmp_path / "damaged")
    shard, other = sorted((folder / "shards").iterdir())[:2]
    shard.write_bytes(shard.read_bytes()[:-1])
    patches = scale.PatchDataset(folder)
    place = patches.index["file"].to_pylist().index(f"shards/{shard.name}")
    with pytest.raises(PatchFormatError, match="it is damaged"):
        patches[place]
    part = folder / "index" / f"{other.stem}.parquet"
    part.write_bytes(part.read_bytes()[:-7])
    with pytest.raises(PatchFormatError, match="expected whole Parquet files in"):
        scale.extract_dataset(patcher, dataset, folder, batching=SMALL)
    part.unlink()
    shard.unlink()  # both are deleted: both come back
    scale.extract_dataset(patcher, dataset, folder, batching=SMALL)
    assert files(folder) == files(extracted)
    shard.unlink()  # and its rows are no longer in the data set: the index forgets it
    new = [{"context": f"new {place}", "kept": "row"} for place in range(len(ROWS))]
    there = scale.PatchDataset(extracted).index["file"].to_pylist()
    others = [new[n] if there[n] == f"shards/{shard.name}" else ROWS[n] for n in range(len(ROWS))]
    scale.extract_dataset(patcher, write_json_lines(tmp_path / "rows.jsonl", others), folder)
    named = set(scale.PatchDataset(folder).index["file"].to_pylist())
    assert named == {f"shards/{path.name}" for path in (folder / "shards").iterdir()}


def test_a_folder_without_a_run_and_bad_arguments(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a folder of patches with a run\.json"):
        scale.PatchDataset(tmp_path)
    (tmp_path / "run.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match="expected the description of a run in"):
        scale.PatchDataset(tmp_path)
    with pytest.raises(ValueError, match=r"expected factors_dtype torch\.bfloat16, got torch\.fl"):
        scale.Contents(factors_dtype=torch.float16)
    with pytest.raises(ValueError, match="expected rows, tokens and nbytes ≥ 1, got Batching"):
        scale.Batching(rows=0)
    refusal = pytest.raises(ValueError, match=r"ContextPatcher\(model, tokenizer=tokenizer\)")
    with ContextPatcher(build("llama", vocab_size=VOCABULARY)) as without, refusal:
        scale.extract_dataset(without, dataset, tmp_path / "out")


@pytest.mark.parametrize("limit", ["tokens", "nbytes"])
def test_batches_have_limits(
    limit: str, patcher: ContextPatcher, dataset: Path, tmp_path: Path
) -> None:
    sizes = {"tokens": 100, "nbytes": 100_000}
    batching = scale.Batching(**{limit: sizes[limit]})
    scale.extract_dataset(patcher, dataset, tmp_path / "out", batching=batching)
    shards = list(scale.PatchDataset(tmp_path / "out").batches())
    assert 1 < len(shards) < len(ROWS)
    for table, patch in shards:
        rows, kept = patch.kept_ids.shape
        context = max(table["context_tokens"].to_pylist())
        size = rows * (kept + context) if limit == "tokens" else patch.nbytes
        assert size <= sizes[limit] or rows == 1


def test_batches_have_rows_of_similar_lengths(extracted: Path) -> None:
    """No batch is padded by more than an eighth, none could take the row after it too, and among
    rows of one kept length the contexts are in order.
    """
    columns = ("kept_tokens", "context_tokens")
    batches = sorted(
        list(zip(*(table[name].to_pylist() for name in columns), strict=True))
        for table, _ in scale.PatchDataset(extracted).batches()
    )
    flat = [pair for batch in batches for pair in batch]
    assert flat == sorted(flat)
    assert any(len({kept for kept, _ in batch}) > 1 for batch in batches)

    def is_right(kept: list[int]) -> bool:
        return len(kept) <= 4 and sum(kept) >= 7 / 8 * len(kept) * max(kept)

    for batch, following in itertools.pairwise([*batches, None]):
        kept = [tokens for tokens, _ in batch]
        assert is_right(kept)
        assert following is None or not is_right([*kept, following[0][0]])


def test_only_so_many_texts_are_in_memory(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read when those before them are passed."""
    read = 0

    def counted(*arguments: Any) -> Iterator[Row]:
        nonlocal read
        for row in read_rows(*arguments):
            read += 1
            yield row

    monkeypatch.setattr(extraction, "read_rows", counted)
    monkeypatch.setattr(extraction, "_WINDOW", 4)
    passed = 0
    rows = extraction._distinct(dataset, scale.Columns(), scale.Share(), [])
    for group in extraction._groups(rows, 2):
        assert len(group) <= 2 and passed < read <= passed + 4
        passed += len(group)
    assert passed == len(ROWS)


def read_by(library: Any, folder: Path, name: str) -> list[dict[str, Any]]:
    files = f"{folder}/index/*.parquet"
    if name == "pandas":
        return library.read_parquet(folder / "index").to_dict("records")
    if name == "duckdb":
        return library.sql(f"SELECT * FROM '{files}'").to_arrow_table().to_pylist()
    options = {"split": "train", "cache_dir": str(folder.parent / "cache")}
    return list(library.load_dataset("parquet", data_files=files, **options))


@pytest.mark.parametrize("library", ["pandas", "duckdb", "datasets"])
def test_other_libraries_read_the_index(library: str, extracted: Path) -> None:
    """``make ray`` installs them."""
    found = read_by(pytest.importorskip(library), extracted, library)
    expected = {entry["id"]: entry for entry in scale.PatchDataset(extracted).index.to_pylist()}
    assert len(found) == len(expected)
    for record in found:
        entry = expected[record["id"]]
        for name in ("row", "file", "offset", "kept_tokens", "misses"):
            assert record[name] == entry[name]
        assert list(record["norms"]["mlp.down_proj"][1]) == entry["norms"]["mlp.down_proj"][1]
