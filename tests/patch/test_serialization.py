"""Patch files: what they hold, and which are refused: damaged, made-up, and other ones."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.patch_files import read, refuses, write
from support.random_models import case, two_layers
from torch import Tensor

from icl_patch import ContextPatch, ContextPatcher, PatchFormatError
from icl_patch.evaluation import tiny_models


@pytest.fixture(scope="module")
def patch() -> ContextPatch:
    """Three rows of seven kept tokens, behind a prefix of five."""
    with ContextPatcher(two_layers("gemma3"), "stable") as patcher:
        return patcher.compute(**case("prefix"))


@pytest.fixture
def saved(patch: ContextPatch, tmp_path: Path) -> Path:
    path = tmp_path / "p.safetensors"
    patch.save(path)
    return path


def test_the_file_is_as_documented(saved: Path, patch: ContextPatch) -> None:
    header, tensors = read(saved)
    factors = ["mlp.gate_proj.u", "mlp.up_proj.u", "mlp.down_proj.u", "mlp.down_proj.v"]
    factors += [f"post_feedforward_layernorm.{x}" for x in ("new_scale", "scale")]
    names = {f"layers.{i}.{x}" for i in (0, 1) for x in (*factors, "readers.v")}
    assert tensors.keys() == names | {f"logits.{x}" for x in ("argmax", "largest", "size")}
    assert (header["format"], header["kind"]) == (3, "per_token")
    assert (header["arithmetic"], header["tensor_parallel"]) == ("model", 1)
    written = saved.read_bytes()
    write(saved, header, tensors)
    assert saved.read_bytes() == written
    assert header["layers"] == [0, 1]
    assert header["kept_mask"] == patch.kept_mask.tolist()
    assert header["position_ids"] == patch.position_ids.tolist()


# -- damage


def damaged(content: bytes) -> Iterator[bytes]:
    """The content with one byte changed, anywhere and as often in its first quarter; and cut off,
    or with something behind it.
    """
    generator = random.Random(0)
    for number in range(300):
        place = generator.randrange(len(content) // 4 if number % 2 else len(content))
        byte = content[place] ^ generator.randrange(1, 256)
        yield content[:place] + bytes([byte]) + content[place + 1 :]
    lengths = [0, 7, 8, len(content) - 1, *(generator.randrange(len(content)) for _ in range(60))]
    yield from (content[:length] for length in lengths)
    yield from (content + b"\0", content + content)


def test_damaged_files_are_refused(saved: Path) -> None:
    assert not refuses(saved)
    for content in damaged(saved.read_bytes()):
        saved.write_bytes(content)
        assert refuses(saved)


def test_a_loaded_patch_does_not_change_with_its_file(saved: Path, patch: ContextPatch) -> None:
    loaded = ContextPatch.load(saved)
    with saved.open("r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(b"\0" * 4000)
    for mine, theirs in zip(loaded.layers, patch.layers, strict=True):
        assert all(torch.equal(factor, theirs[name]) for name, factor in mine.items())


# -- other files


def test_a_pickle_file_is_refused_and_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "sprung",)

    for zipped in (True, False):
        torch.save({"layers": Trap()}, tmp_path / "p.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(PatchFormatError, match="pickle"):
            ContextPatch.load(tmp_path / "p.pt")
    assert not (tmp_path / "sprung").exists()


def test_other_safetensors_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(PatchFormatError, match="icl_patch"):
        ContextPatch.load(path)
    for text in ("", "{", "null", "[1]", "3", "[" * 100_000, '{"format": 2}'):
        write(path, text, {"a": torch.zeros(2)})
        with pytest.raises(PatchFormatError, match="JSON object under 'icl_patch'"):
            ContextPatch.load(path)


def test_folders_and_devices_are_no_patch_files(tmp_path: Path) -> None:
    """Neither is waited for, nor read without end."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "link", "/dev/zero", "/dev/null"):
        with pytest.raises(PatchFormatError, match="a folder or a device"):
            ContextPatch.load(path)
    with pytest.raises(FileNotFoundError):
        ContextPatch.load(tmp_path / "none")


def test_a_path_that_safetensors_cannot_open_is_the_cause(
    saved: Path, patch: ContextPatch, tmp_path: Path
) -> None:
    path = tmp_path / "caf\udce9.safetensors"
    message = r"expected a path in UTF-8, .*caf\\udce9\.safetensors': rename it"
    with pytest.raises(ValueError, match=message):
        patch.save(path)
    assert not path.exists()
    saved.rename(path)
    with pytest.raises(ValueError, match=message):
        ContextPatch.load(path)


# -- files that were made up, with the right digest

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def entry(name: str, value: Any) -> Change:
    return lambda header, tensors: header.update({name: value})


def tensor(name: str, *shape: int) -> Change:
    return lambda header, tensors: tensors.update({name: torch.zeros(shape)})


def another_writer(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    header["blocks"][1]["form"]["writer"] = "pen"


def other_modules(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for block in header["blocks"]:
        block["path"] = block["path"].replace("layers", "blocks")


def narrow(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The residual stream's width cut everywhere: nothing in the file contradicts itself."""
    for name, x in tensors.items():
        tensors[name] = x[..., :40].contiguous() if x.shape[-1] == 48 else x


def one_layer(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    header["layers"] = [0]
    for name in [name for name in tensors if name.startswith("layers.1")]:
        del tensors[name]


MADE_UP: dict[str, Change] = {  # by what is said of them
    "blocks, layers and tokens .* out of range": entry("layers", [0, 2]),
    "arithmetic among model, .* got 'autocast bfloat17'": entry("arithmetic", "autocast bfloat17"),
    r"modules that the model has, got model\.blocks\.0": other_modules,
    "expected blocks, layers and tokens .*'pen'": another_writer,
    "expected patch format 3, got 1: compute the patch again": entry("format", 1),
    "expected kind 'per_token', got 'static'": entry("kind", "static"),
    "expected update of <class 'str'>, got 3": entry("update", 3),
    r"KeyError\('layers\.1\.readers\.v'\)": lambda _, x: x.pop("layers.1.readers.v"),
    "expected 17 known tensors, got 18": tensor("extra", 1),
    r"KeyError\('logits\.size'\)": lambda _, x: x.pop("logits.size"),
    r"logits\.largest \(3, 8\) torch\.float32": tensor("logits.largest", 3, 8),
    r"logits\.argmax \(3, 7\) torch\.float32": tensor("logits.argmax", 3, 7),
    r"u and v of widths 72 and 48 for .*, got \(72, 40\)": narrow,
    "expected the factors of 2 layers, got 1": one_layer,
}


@pytest.mark.parametrize("message", MADE_UP)
def test_files_that_are_made_up_with_the_right_digest(message: str, saved: Path) -> None:
    header, tensors = read(saved)
    MADE_UP[message](header, tensors)
    write(saved, header, tensors)
    with pytest.raises(PatchFormatError, match=message):
        ContextPatch.load(saved, two_layers("gemma3"))


def test_header_entries_that_are_missing(saved: Path) -> None:
    header, tensors = read(saved)
    for name in header.keys() - {"tokenizer", "revision"}:
        write(saved, {key: value for key, value in header.items() if key != name}, tensors)
        assert refuses(saved), name


def test_factors_rounded_to_bf16_are_read_as_fp32(saved: Path) -> None:
    header, tensors = read(saved)
    rounded = {
        name: x.bfloat16() if name.startswith("layers.") else x for name, x in tensors.items()
    }
    write(saved, header, rounded)
    loaded = ContextPatch.load(saved)
    for layer, factors in zip(loaded.layer_indices, loaded.layers, strict=True):
        for name, x in factors.items():
            assert x.dtype == torch.float32
            assert torch.equal(x, rounded[f"layers.{layer}.{name}"].float())


def test_experts_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Read without a model, a file is checked when it meets one."""
    path, mixtral = tmp_path / "p.safetensors", tiny_models.build("mixtral", num_hidden_layers=2)
    with ContextPatcher(mixtral, "stable") as patcher:
        patcher.compute(**case("prefix")).save(path)
        header, tensors = read(path)
        for chosen in ([0, 7], [3, 8], [-1, 2]):
            tensors["layers.1.mlp.experts.index"][2, 1] = torch.tensor(chosen)
            write(path, header, tensors)
            if chosen == [0, 7]:
                ContextPatch.load(path, mixtral)
                continue
            loaded = ContextPatch.load(path)
            message = r"index of model\.layers\.1\.mlp\.experts\.gate_up_proj from 0 to 7, got "
            with pytest.raises(PatchFormatError, match=message):
                ContextPatch.load(path, mixtral)
            with pytest.raises(PatchFormatError, match=message):
                patcher.forward(loaded.kept_ids, loaded, kept_mask=loaded.kept_mask)
