"""The file format of a patch: reading, writing and checking its header and tensors; and the check
that a patch fits a model.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch.errors import PatchFormatError
from icl_patch.invariance.arithmetic import ARITHMETICS, MODEL
from icl_patch.models.block_spec import Block, BlockSpec
from icl_patch.models.language_model import position_limit, vocabulary
from icl_patch.models.pipeline import is_on_another_rank
from icl_patch.patch.parameter_changes import ParameterChange, parameter_changes

if TYPE_CHECKING:
    from icl_patch.patch.context_patch import ContextPatch

FORMAT = 2
_NO_DIGEST = "0" * 64  # stands where the file's SHA-256 will stand
_LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors
UPDATES = ("direct", "stable", "exact")
TOKEN_TENSORS = (
    "kept_ids",
    "kept_mask",
    "position_ids",
    "kept_slots",
    "prefix_ids",
    "prefix_mask",
    "prefix_positions",
    "prefix_slots",
)
DTYPES = {
    "torch.float64": torch.float64,
    "torch.float32": torch.float32,
    "torch.bfloat16": torch.bfloat16,
    "torch.float16": torch.float16,
}
_ALLOWED: dict[str, Collection[str]] = {
    "kind": ("per_token",),
    "arithmetic": ARITHMETICS,
    "update": UPDATES,
    "dtype": DTYPES,
}
Header = dict[str, Any]


@dataclass(frozen=True)
class PatchInfo:
    """The model, tokenizer and run that a patch belongs to.

    Attributes:
        model, revision: the name or path and the commit of the model, if known.
        fingerprint: SHA-256 of the weights.
        tokenizer: SHA-256 of the tokenizer, None without one.
        family, update: the model's type, and the update's name. dtype: of the model.
        passes: the number of forward passes over the kept tokens.
        longest: the number of tokens, with the context, in the longest row of the batch.
        divisible: whether some rows, or the first tokens, can be replayed without the others.
        replayable: False if tokens or layers that a replay needs were cut out.
        kind: "per_token", a change of the weights for each kept token.
        arithmetic: "model" if the reproduced run rounds as the model's own modules do,
            "batch_invariant" if it rounds as they do on batch-invariant functions.
        tensor_parallel: the number of devices that share a weight in that run.
    """

    model: str
    revision: str | None
    fingerprint: str
    tokenizer: str | None
    family: str
    update: str
    dtype: str
    passes: int
    longest: int
    divisible: bool
    replayable: bool = True
    kind: str = "per_token"
    arithmetic: str = MODEL
    tensor_parallel: int = 1


def check_finite(tensors: dict[str, Tensor]) -> None:
    """Raises PatchFormatError naming the first tensor, and where it can row and token, that is not
    finite.
    """
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            where = (
                ""
                if tensor.dim() == 1
                else f" at row, token {(~tensor.isfinite().all(-1)).nonzero()[0].tolist()}"
            )
            raise PatchFormatError(f"expected finite factors, got NaN or infinity in {name}{where}")


# -- the file


def file_parts(header: Header, tensors: dict[str, Tensor]) -> tuple[bytes | memoryview, ...]:
    """The content of a patch file, in parts: a safetensors file with its SHA-256 in the header.

    The digest is that of the whole file with 64 zeros in its own place.
    """
    text = json.dumps({"format": FORMAT, "sha256": _NO_DIGEST, **header})
    content = safetensors.torch.save(tensors, {"icl_patch": text})
    before, after = _around(content, _NO_DIGEST)
    return before, _digest(before, after).encode(), after


def read_file(path: str | os.PathLike[str]) -> tuple[Header, dict[str, Tensor]]:
    """The header and the tensors of a patch file; raises PatchFormatError.

    The SHA-256 is checked first. Of the header's other entries only ``format`` is checked here.
    """
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise PatchFormatError(f"expected a patch file, got {path}, which is a folder or a device")
    with Path(path).open("rb") as file:
        header = _header(file, path)
        file.seek(0)
        content = file.read()
    digest = _digest(*_around(content, header["sha256"]))
    if digest != header["sha256"]:
        raise PatchFormatError(
            f"expected a file with the SHA-256 that it names, {header['sha256'][:12]}…, got {path} "
            f"with {digest[:12]}…: it is damaged. Copy it again, or compute the patch again"
        )
    try:
        return header, safetensors.torch.load(content)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise PatchFormatError(f"expected a safetensors file, got {path}: {error}") from error


def _header(file: BinaryIO, path: Any) -> Header:
    """The header, with ``format`` and ``sha256`` checked; the tensors are not read."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(os.fstat(file.fileno()).st_size - 8, _LONGEST_HEADER):
        raise PatchFormatError(f"expected a safetensors file (pickle is refused), got {path}")
    try:
        header = json.loads(json.loads(file.read(length))["__metadata__"]["icl_patch"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # a long number: ValueError
        message = f"expected a JSON object under 'icl_patch' in the metadata, got {path}"
        raise PatchFormatError(message) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        got = header.get("format") if isinstance(header, dict) else header
        cure = "compute the patch again"
        raise PatchFormatError(f"expected patch format {FORMAT}, got {got!r:.80}: {cure}")
    digest = header.get("sha256")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise PatchFormatError(f"expected sha256 of 64 hexadecimal digits, got {digest!r:.80}")
    return header


def _around(content: bytes, digest: str) -> tuple[memoryview, memoryview]:
    """The parts before and after the digest, which stands first in the file."""
    at = content.find(digest.encode())  # -1 if its characters are escaped: then it matches nothing
    return memoryview(content)[:at], memoryview(content)[at + len(digest) :]


def _digest(before: memoryview, after: memoryview) -> str:
    """SHA-256 of a file with zeros in place of its digest."""
    digest = hashlib.sha256(before)
    digest.update(_NO_DIGEST.encode())
    digest.update(after)
    return digest.hexdigest()


# -- the header


def check_header(header: Header) -> None:
    """Raises PatchFormatError unless all entries are there and have their types."""
    if header.get("kind") == "static":
        raise PatchFormatError(
            "expected kind one of per_token, got 'static': icl_patch.static.StaticPatch.load reads"
            " patches that are the same for all tokens"
        )
    expected: dict[str, Any] = {entry.name: entry.type for entry in fields(PatchInfo)}
    expected |= {"format": int, "layers": list, "blocks": list} | dict.fromkeys(TOKEN_TENSORS, list)
    for name, kind in expected.items():
        if (
            name not in header
            or not isinstance(header[name], kind)
            or (kind is int and isinstance(header[name], bool))
        ):
            raise PatchFormatError(
                f"expected header entry {name!r} of {kind}, got {header.get(name)!r}"
            )
    for name, allowed in _ALLOWED.items():
        if header[name] not in allowed:
            got = f"{header[name]!r:.80}"
            raise PatchFormatError(f"expected {name} one of {', '.join(allowed)}, got {got}")
    indices = header["layers"]
    numbers = all(type(index) is int and index >= 0 for index in indices)
    if not indices or not numbers or indices != sorted(set(indices)):
        raise PatchFormatError(f"expected layers as increasing numbers ≥ 0, got {indices!r:.80}")
    for name in ("passes", "longest", "tensor_parallel"):
        if header[name] < 1:
            raise PatchFormatError(f"expected {name} ≥ 1, got {header[name]}")


def _token_tensor(name: str, value: list[Any]) -> Tensor:
    """A header's rows of numbers (of booleans for a mask) as a tensor; no element is converted."""
    kind, dtype = (bool, torch.bool) if name.endswith("mask") else (int, torch.int64)
    if not value or not all(
        isinstance(row, list)
        and len(row) == len(value[0])
        and all(type(element) is kind and 0 <= element < 2**63 for element in row)
        for row in value
    ):
        raise PatchFormatError(
            f"expected {name} as rows of equal length of type {kind.__name__}, from 0 to 2⁶³ - 1,"
            f" got {value!r:.80}"
        )
    return torch.tensor(value, dtype=dtype).reshape(len(value), len(value[0]))


def token_tensors(header: dict[str, Any]) -> dict[str, Tensor]:
    """The header's ids, masks, positions and slots, which fit each other; raises
    PatchFormatError.
    """
    read = {name: _token_tensor(name, header[name]) for name in TOKEN_TENSORS}
    rows, tokens = read["kept_ids"].shape
    if tokens == 0:
        raise PatchFormatError(f"expected at least one kept token, got kept_ids {(rows, tokens)}")
    for name, tensor in read.items():
        columns = tokens if name in TOKEN_TENSORS[:4] else read["prefix_ids"].shape[1]
        if tensor.shape != (rows, columns):
            raise PatchFormatError(f"expected {name} {(rows, columns)}, got {tuple(tensor.shape)}")
    kept, prefix = read["kept_mask"].long(), read["prefix_mask"].long()
    if (kept.diff(dim=1) > 0).any() or not kept[:, 0].all():
        raise PatchFormatError("expected kept_mask with a token in every row, padding on the right")
    if (prefix.diff(dim=1) < 0).any():
        raise PatchFormatError("expected prefix_mask with padding on the left only")
    _check_order(read)
    last, longest = int(read["position_ids"].max()), header["longest"]
    if longest <= last:
        raise PatchFormatError(f"expected longest > {last}, the last position, got {longest}")
    return read


def _check_order(read: dict[str, Tensor]) -> None:
    """Raises PatchFormatError unless slots and positions increase from token to token, from the
    prefix to the kept tokens.
    """
    tokens = torch.cat([read["prefix_mask"], read["kept_mask"]], 1)
    for names in (("prefix_slots", "kept_slots"), ("prefix_positions", "position_ids")):
        places = torch.cat([read[name] for name in names], 1)
        falls = (places.diff(dim=1) <= 0) & tokens[:, :-1] & tokens[:, 1:]
        if falls.any():
            row = int(falls.any(1).nonzero()[0])
            got = places[row, tokens[row]].tolist()
            raise PatchFormatError(
                f"expected {' and '.join(names)} that increase from token to token, got {got!r:.80}"
                f" in row {row}"
            )


def read_blocks(header: dict[str, Any]) -> tuple[Block, ...]:
    """The model's blocks, from the header."""
    blocks = []
    for entry in header["blocks"]:
        if (
            not isinstance(entry, dict)
            or entry.keys() != {"path", "form"}
            or not isinstance(entry["path"], str)
        ):
            raise PatchFormatError(f"expected blocks with a path and a form, got {entry!r:.80}")
        try:
            blocks.append(Block(entry["path"], BlockSpec.from_json(entry["form"])))
        except ValueError as error:
            raise PatchFormatError(
                f"expected a known form of {entry['path']!r:.80}: {error}"
            ) from error
    if max(header["layers"]) >= len(blocks):
        raise PatchFormatError(
            f"expected layers among the {len(blocks)} blocks, got {header['layers']!r:.80}"
        )
    return tuple(blocks)


def read_layers(
    tensors: dict[str, Tensor],
    info: PatchInfo,
    blocks: tuple[Block, ...],
    indices: list[int],
    tokens: tuple[int, ...],
) -> tuple[dict[str, Tensor], ...]:
    """The factors of every block by name, all there and of the right shapes; raises
    PatchFormatError.
    """
    names = {index: blocks[index].spec.factor_names(info.update) for index in indices}
    expected = {f"layers.{index}.{name}" for index in indices for name in names[index]}
    if expected != tensors.keys():
        missing, extra = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
        raise PatchFormatError(
            f"expected {len(expected)} tensors; missing: {missing or 'none'!s:.200}, extra:"
            f" {extra or 'none'!s:.200}"
        )
    layers = tuple(
        {name: tensors[f"layers.{index}.{name}"] for name in names[index]} for index in indices
    )
    kinds = [(index, name, kind) for index in indices for name, kind in names[index].items()]
    widths = [
        (index, kind, tuple(tensors[f"layers.{index}.{name}"].shape[-1:]))
        for index, name, kind in kinds
    ]
    # every block has a factor as wide as the residual stream
    hidden = next(width for _, kind, width in widths if kind == "hidden")
    slots = {index: width for index, kind, width in widths if kind == "index"}
    for index, name, kind in kinds:
        path = f"layers.{index}.{name}"
        leading = (*tokens, *(slots.get(index, ()) if kind == "slots" else ()))
        _check_factor(path, tensors[path], kind, leading, hidden)
    check_finite(tensors)
    return tuple({name: widened(x) for name, x in layer.items()} for layer in layers)


def widened(factor: Tensor) -> Tensor:
    """A factor as it is replayed: one that was rounded to bf16 for its file, in fp32."""
    return factor.float() if factor.dtype == torch.bfloat16 else factor


def _check_factor(
    name: str,
    tensor: Tensor,
    kind: str,
    leading: tuple[int, ...],
    width: tuple[int, ...],
) -> None:
    """Shape and dtype of one factor; the inner widths are checked against a model."""
    own_width = tuple(tensor.shape[-1:])
    shape = {"hidden": leading + width, "norm": width}.get(kind, leading + own_width)
    if tuple(tensor.shape) != shape:
        raise PatchFormatError(f"expected {name} {shape}, got {tuple(tensor.shape)}")
    if kind == "index":
        if tensor.dtype != torch.int64 or (tensor.numel() and int(tensor.min()) < 0):
            raise PatchFormatError(
                f"expected {name} of numbers of experts in int64, got {tensor.dtype}"
            )
        twice = (tensor.sort(-1).values.diff(dim=-1) == 0).any(-1)
        if twice.any():
            place = twice.nonzero()[0].tolist()
            raise PatchFormatError(
                f"expected {name} of distinct experts, got {tensor[tuple(place)].tolist()} at row,"
                f" token {place}"
            )
    elif tensor.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise PatchFormatError(f"expected {name} in fp32, fp64 or bf16, got {tensor.dtype}")


# -- the patch against a model


def check_update(update: str) -> None:
    """Raises ValueError unless there is such an update."""
    if update not in UPDATES:
        raise ValueError(f"expected update {', '.join(UPDATES)}, got {update!r}")


def check_fit(patch: "ContextPatch", model: PreTrainedModel) -> None:
    """Raises PatchFormatError unless the model has the patch's tokens, positions and experts, and
    every factor fits its parameter.
    """
    _check_tokens(patch, model)
    if patch.info.replayable and len(patch.blocks) != len(patch.layers):
        raise PatchFormatError(
            f"expected the factors of {len(patch.blocks)} layers, got {len(patch.layers)}"
        )
    for index, layer in zip(patch.layer_indices, patch.layers, strict=True):
        block = patch.blocks[index]
        if is_on_another_rank(model, block.path):
            continue
        for change in parameter_changes(block.spec, layer):
            _check_change(block.path_of(change.name), change, model)


def _check_tokens(patch: "ContextPatch", model: PreTrainedModel) -> None:
    limits = {"ids": vocabulary(model), "positions": position_limit(model)}
    names = (
        ("kept_ids", "ids"),
        ("prefix_ids", "ids"),
        ("position_ids", "positions"),
        ("prefix_positions", "positions"),
    )
    for name, kind in names:
        tensor, limit = getattr(patch, name), limits[kind]
        if tensor.numel() and int(tensor.max()) >= limit:
            raise PatchFormatError(
                f"expected {name} from 0 to {limit - 1}, as many {kind} as the model has, got"
                f" {int(tensor.max())}"
            )
    if patch.info.longest > (most := limits["positions"]):
        raise PatchFormatError(
            f"expected longest of at most {most}, as many positions as the model has, got"
            f" {patch.info.longest}"
        )


def _check_change(path: str, change: ParameterChange, model: PreTrainedModel) -> None:
    """Widths of a change, and the experts it is for."""
    holder, _, name = (path, "", change.parameter) if change.index is None else path.rpartition(".")
    try:
        parameter = getattr(model.get_submodule(holder), name, None)
    except AttributeError as error:
        raise PatchFormatError(f"expected modules that the model has, got {holder}") from error
    # a quantised module does not say
    if not isinstance(parameter, Tensor) or not parameter.is_floating_point():
        return
    shape = tuple(parameter.shape)
    if change.index is not None:
        count, largest, shape = shape[0], int(change.index.max()), shape[1:]
        if largest >= count:
            raise PatchFormatError(
                f"expected the index of {path} from 0 to {count - 1}, got {largest}"
            )
    got = (change.u.shape[-1],) if change.v is None else (change.u.shape[-1], change.v.shape[-1])
    expected = shape[::-1] if change.transposed else shape
    if got != expected:
        widths = " and ".join(map(str, expected))
        raise PatchFormatError(f"expected u and v of widths {widths} for {path}, got {got}")
