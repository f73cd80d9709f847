"""Patch files that were damaged, made up, or are no files: each is refused as such."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.models import build, tokens
from support.patch_files import ZEROS, read, refuses, sealed, write
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


def test_changes_that_leave_the_content_alone_are_refused_too(saved: Path) -> None:
    """Spaces that fill up the header, and capital digits."""
    content = saved.read_bytes()
    digest = read(saved)[0]["sha256"].encode()
    end = 8 + int.from_bytes(content[:8], "little")
    longer = (end - 8 + 8).to_bytes(8, "little") + content[8:end] + b" " * 8 + content[end:]
    others = [content.replace(digest, other) for other in (digest.upper(), ZEROS.encode())]
    for other in (longer, *others):
        saved.write_bytes(other)
        assert refuses(saved)


def test_swapped_offsets_are_refused(saved: Path) -> None:
    """Two tensors of one shape, each under the other's name."""
    content = saved.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    start = json.loads(content[8:end])
    names = ("layers.0.readers.v", "layers.1.readers.v")
    assert start[names[0]]["shape"] == start[names[1]]["shape"]
    offsets = [start[name]["data_offsets"] for name in names]
    for name, other in zip(names, reversed(offsets), strict=True):
        start[name]["data_offsets"] = other
    text = json.dumps(start, separators=(",", ":")).encode()
    assert len(text) <= end - 8
    saved.write_bytes(content[:8] + text.ljust(end - 8) + content[end:])
    assert safetensors.torch.load(saved.read_bytes()).keys() == read(saved)[1].keys()
    with pytest.raises(PatchFormatError, match=r"SHA-256.*damaged"):
        ContextPatch.load(saved)


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


def test_the_update_and_the_parallel_size_are_covered_by_the_digest(saved: Path) -> None:
    """Of a weight writer the direct and the stable update have the same tensors."""
    content = saved.read_bytes()
    update, size = rb'"update\": \"stable', rb'"tensor_parallel\": 1'
    for old, new in ((update, update.replace(b"stable", b"direct")), (size, size[:-1] + b"2")):
        assert content.count(old) == 1
        saved.write_bytes(content.replace(old, new))
        with pytest.raises(PatchFormatError, match="SHA-256"):
            ContextPatch.load(saved)
        digest = read(saved)[0]["sha256"].encode()
        saved.write_bytes(sealed(saved.read_bytes().replace(digest, ZEROS.encode())))
        assert not refuses(saved)


def test_a_digest_that_is_none_or_written_in_other_words(saved: Path) -> None:
    header, tensors = read(saved)
    digest = header.pop("sha256")
    write(saved, header, tensors)
    with pytest.raises(PatchFormatError, match="sha256 of 64 hexadecimal digits, got None"):
        ContextPatch.load(saved)
    escaped = "".join(f"\\u{ord(digit):04x}" for digit in digest)
    write(saved, json.dumps({"format": 2} | header)[:-1] + f', "sha256": "{escaped}"}}', tensors)
    assert refuses(saved)


@pytest.mark.parametrize("place", ["the file's header", "the patch's header"])
def test_a_number_of_5000_digits(place: str, saved: Path) -> None:
    """Python converts no more than 4,300."""
    number, (header, tensors) = "9" * 5000, read(saved)
    if place == "the patch's header":
        text = json.dumps(header).replace('"format": 2', f'"format": {number}')
        saved.write_bytes(safetensors.torch.save(tensors, {"icl_patch": text}))
    else:
        text = json.dumps({"__metadata__": {"icl_patch": "{}"}}).replace('"{}"', number)
        saved.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with pytest.raises(PatchFormatError, match="icl_patch"):
        ContextPatch.load(saved)


def test_a_header_that_is_longer_than_its_file_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    for length in (2**63, 2**40, 10**8 + 1):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        os.truncate(path, min(length + 8, 10**9))  # with a hole: no disk is used
        with pytest.raises(PatchFormatError, match="safetensors"):
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


def test_a_loaded_patch_does_not_change_with_its_file(saved: Path, patch: ContextPatch) -> None:
    loaded = ContextPatch.load(saved)
    with saved.open("r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(b"\0" * 4000)
    for mine, theirs in zip(loaded.layers, patch.layers, strict=True):
        assert all(torch.equal(factor, theirs[name]) for name, factor in mine.items())
