"""Patch files that were damaged, made up, or are no files: each is refused as such."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import build, tokens
from support.patch_files import read, refuses, write
from torch import Tensor

from icl_patch import ContextPatch, ContextPatcher, PatchFormatError


@pytest.fixture(scope="module")
def patch() -> ContextPatch:
    with ContextPatcher(build("llama", 0, num_hidden_layers=2), "stable") as patcher:
        return patcher.compute(tokens(0, 1, 5), tokens(1, 1, 2))


@pytest.fixture
def saved(patch: ContextPatch, tmp_path: Path) -> Path:
    path = tmp_path / "p.safetensors"
    patch.save(path)
    return path


def flips(content: bytes, count: int) -> Iterator[bytes]:
    """The content with one byte changed: anywhere, and as often in its first quarter."""
    generator = random.Random(0)
    for number in range(count):
        place = generator.randrange(len(content) // 4 if number % 2 else len(content))
        byte = content[place] ^ generator.randrange(1, 256)
        yield content[:place] + bytes([byte]) + content[place + 1 :]


def truncations(content: bytes, count: int) -> Iterator[bytes]:
    generator = random.Random(1)
    return (content[: generator.randrange(len(content))] for _ in range(count))


def accepted(path: Path, contents: Iterator[bytes]) -> int:
    count = 0
    for content in contents:
        path.write_bytes(content)
        count += not refuses(path)
    return count


MANY = pytest.param(10_000, 2_000, marks=pytest.mark.stress)


@pytest.mark.parametrize(("changed", "cut"), [(300, 60), MANY])
def test_damaged_files_are_refused(saved: Path, changed: int, cut: int) -> None:
    content = saved.read_bytes()
    assert accepted(saved, iter([content])) == 1
    assert accepted(saved, flips(content, changed)) == 0
    assert accepted(saved, truncations(content, cut)) == 0
    assert accepted(saved, iter([content + b"\0", content + content, b""])) == 0


def reversed_layers(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    header["layers"] = header["layers"][::-1]


def infinite(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.mlp.down_proj.u"][0, 0, 3] = torch.inf


def other_modules(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for block in header["blocks"]:
        block["path"] = block["path"].replace("layers", "blocks")


def entry(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda header, tensors: header.update({name: value})


MADE_UP = {
    "layers in another order": (reversed_layers, r"layers as increasing numbers ≥ 0, got \[1, 0\]"),
    "infinity": (infinite, r"finite factors.*layers\.0\.mlp\.down_proj\.u at row, token \[0, 0\]"),
    "no such modules": (other_modules, r"modules that the model has, got model\.blocks\.0"),
    "format 1": (entry("format", 1), "expected patch format 2, got 1: compute the patch again"),
    "format 2.0": (entry("format", 2.0), "'format'"),
    "a static patch": (entry("kind", "static"), "expected kind one of per_token, got 'static'"),
    "other arithmetic": (
        entry("arithmetic", "decimal"),
        "arithmetic one of model, batch_invariant",
    ),
    "no device": (entry("tensor_parallel", 0), "expected tensor_parallel ≥ 1, got 0"),
    "another update": (entry("update", "best"), "expected update one of direct, stable, exact"),
}


@pytest.mark.parametrize("fault", MADE_UP)
def test_files_that_are_made_up_with_the_right_digest(fault: str, saved: Path) -> None:
    header, tensors = read(saved)
    change, message = MADE_UP[fault]
    change(header, tensors)
    write(saved, header, tensors)
    with pytest.raises(PatchFormatError, match=message):
        ContextPatch.load(saved, build("llama", 0, num_hidden_layers=2))


def test_folders_and_devices_are_no_patch_files(tmp_path: Path) -> None:
    """Neither is waited for, nor read without end."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "link", "/dev/zero", "/dev/null"):
        with pytest.raises(PatchFormatError, match="a folder or a device"):
            ContextPatch.load(path)
    with pytest.raises(FileNotFoundError):
        ContextPatch.load(tmp_path / "none")


def test_a_loaded_patch_does_not_change_with_its_file(saved: Path, patch: ContextPatch) -> None:
    loaded = ContextPatch.load(saved)
    with saved.open("r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(b"\0" * 4000)
    for mine, theirs in zip(loaded.layers, patch.layers, strict=True):
        assert all(torch.equal(factor, theirs[name]) for name, factor in mine.items())
