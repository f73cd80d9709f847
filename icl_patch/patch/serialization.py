"""The file format of a patch: reading, writing and checking its header and tensors. Also the check
that a patch fits a model.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from icl_patch.atomic_file import write_atomically
from icl_patch.errors import PatchFormatError
from icl_patch.invariance.arithmetic import ARITHMETICS, NATIVE
from icl_patch.models.block_spec import Block, BlockSpec
from icl_patch.models.pipeline import is_on_another_rank
from icl_patch.patch.logit_digest import LogitDigest
from icl_patch.patch.parameter_changes import ParameterChange, parameter_changes
from icl_patch.texts import check_path

if TYPE_CHECKING:
    from icl_patch.patch.context_patch import ContextPatch

FORMAT = 3
_NO_DIGEST = "0" * 64  # stands where the file's SHA-256 will stand
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
_DIGEST = ("argmax", "largest", "size", "bits")  # the last one may be absent
PER_TOKEN = "per_token"
Header = dict[str, Any]


@dataclass(frozen=True)
class PatchInfo:
    """The model, tokenizer and run that a patch belongs to.

    Attributes:
        model, revision: the model's name or path, and its commit if known.
        fingerprint: SHA-256 of the weights.
        tokenizer: SHA-256 of the tokenizer, None without one.
        family, update: the model's type and the update's name. dtype: the model's.
        passes: the number of forward passes over the kept tokens.
        longest: the number of tokens, with the context, in the longest row of the batch.
        divisible: whether some rows, or the first tokens, can be replayed without the others.
        replayable: False if tokens or layers that a replay needs are missing.
        kind: "per_token", a change of the weights for each kept token.
        arithmetic: how the reproduced run rounds: "model" if as the model's own modules do,
            "autocast bfloat16" or "autocast float16" if as they do under autocast,
            "batch_invariant" if as they do with batch-invariant functions.
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
    kind: str = PER_TOKEN
    arithmetic: str = NATIVE
    tensor_parallel: int = 1


def check_finite(tensors: dict[str, Tensor]) -> None:
    """Raises PatchFormatError if a tensor is not finite. The error names the first such tensor and,
    if known, its row and token.
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

    The digest is computed over the whole file, with 64 zeros in place of the digest.
    """
    text = json.dumps({"format": FORMAT, "sha256": _NO_DIGEST, **header})
    content = safetensors.torch.save(tensors, {"icl_patch": text})
    before, after = _around(content, _NO_DIGEST)
    return before, _digest(before, after).encode(), after


def read_file(path: str | os.PathLike[str]) -> tuple[Header, dict[str, Tensor]]:
    """The header and the tensors of a patch file.

    Of the header's entries only ``format`` and ``sha256`` are checked here.

    Raises:
        PatchFormatError: the file is damaged or not a patch.
        ValueError: the path is not UTF-8.
        OSError: the file cannot be read.
    """
    check_path(path)
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise PatchFormatError(f"expected a patch file, got {path}, which is a folder or a device")
    try:
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["icl_patch"])
        number, expected = header["format"], str(header["sha256"])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PatchFormatError(
            "expected a safetensors file (pickle is refused) with a JSON object under 'icl_patch'"
            f" in its metadata, got {path}: it is damaged or not a patch ({error!r:.200})"
        ) from error
    if number != FORMAT:
        raise PatchFormatError(
            f"expected patch format {FORMAT}, got {number!r:.80}: compute the patch again"
        )
    content = Path(path).read_bytes()
    digest = _digest(*_around(content, expected))
    if digest != expected:
        raise PatchFormatError(
            f"expected a file with the SHA-256 in its header, {expected[:12]}…, got {path} with"
            f" {digest[:12]}…: it is damaged. Copy it again, or compute the patch again"
        )
    return header, safetensors.torch.load(content)


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


# -- a patch's file: the digest proves that it is as it was written, maybe by another version


def write_patch(path: str | os.PathLike[str], patch: "ContextPatch") -> None:
    """Write a patch's file, whole or not at all; :func:`read_patch` reads it.

    Raises:
        PatchFormatError: a factor is not finite.
        OSError: the file cannot be written.
    """
    indexed = zip(patch.layer_indices, patch.layers, strict=True)
    tensors = {
        f"layers.{i}.{name}": x.contiguous().cpu()
        for i, layer in indexed
        for name, x in layer.items()
    }
    check_finite(tensors)
    tensors |= digest_tensors(patch.replay_digest)
    blocks = [{"path": block.path, "form": block.spec.to_json()} for block in patch.blocks]
    header = {**asdict(patch.info), "layers": list(patch.layer_indices), "blocks": blocks}
    header |= {name: getattr(patch, name).tolist() for name in TOKEN_TENSORS}
    write_atomically(path, file_parts(header, tensors))


def read_patch(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a :class:`icl_patch.ContextPatch` in a file.

    Raises:
        PatchFormatError, ValueError, OSError: as :func:`read_file`. PatchFormatError also if the
            patch is of another kind, or an entry is missing.
    """
    header, tensors = read_file(path)
    check_kind(header, PER_TOKEN, "StaticPatch.load and icl-patch generate read static patches")
    info = PatchInfo(**read_fields(header, PatchInfo))
    if info.arithmetic not in ARITHMETICS:
        known = ", ".join(ARITHMETICS)
        raise PatchFormatError(f"expected an arithmetic among {known}, got {info.arithmetic!r}")
    with reading("blocks, layers and tokens"):
        entries = [(entry["path"], entry["form"]) for entry in header["blocks"]]
        blocks = tuple(Block(path, BlockSpec.from_json(form)) for path, form in entries)
        names = {i: blocks[i].spec.factor_names(info.update) for i in header["layers"]}
        tokens = {
            name: torch.tensor(
                header[name], dtype=torch.bool if name.endswith("mask") else torch.int64
            )
            for name in TOKEN_TENSORS
        }
        layers = {
            i: {name: widened(tensors[f"layers.{i}.{name}"]) for name in names[i]} for i in names
        }
        digest = _read_digest(tensors, tokens["kept_ids"].shape)
        count = sum(map(len, layers.values())) + len(digest_tensors(digest))
        if count != len(tensors):
            raise ValueError(f"expected {count} known tensors, got {len(tensors)}")
    return {
        "info": info,
        "digest": digest,
        "layers": tuple(layers.values()),
        "layer_indices": tuple(layers),
        "blocks": blocks,
        **tokens,
    }


def digest_tensors(digest: LogitDigest | None) -> dict[str, Tensor]:
    """The tensors of a file that make up a digest."""
    named = {name: getattr(digest, name, None) for name in _DIGEST}
    return {f"logits.{name}": x.contiguous().cpu() for name, x in named.items() if x is not None}


def _read_digest(tensors: dict[str, Tensor], shape: torch.Size) -> LogitDigest | None:
    """The digest of kept tokens (B, T), if a file has one; raises KeyError or ValueError if a part
    of it is missing or of another kind.
    """
    if not any(name.startswith("logits.") for name in tensors):
        return None
    argmax, largest, size = (tensors[f"logits.{name}"] for name in _DIGEST[:3])
    bits = tensors.get("logits.bits")
    held = {"argmax": argmax, "largest": largest, "size": size}
    held |= {} if bits is None else {"bits": bits}
    for name, x in held.items():
        if x.shape != shape or x.is_floating_point() != (name in ("largest", "size")):
            raise ValueError(f"logits.{name} {tuple(x.shape)} {x.dtype}")
    return LogitDigest(argmax, largest, size, bits, identical=bits is not None)


def check_kind(header: Header, kind: str, other: str) -> None:
    """Raises PatchFormatError with the text ``other`` unless a file has a patch of this kind."""
    if header.get("kind") != kind:
        raise PatchFormatError(f"expected kind {kind!r}, got {header.get('kind')!r:.80}: {other}")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns the errors of a file that lacks something into PatchFormatError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PatchFormatError(
            f"expected {what} of a patch of this version, got {error!r:.200}: make the patch again"
        ) from error


def read_fields(header: Header, kind: type, *others: str) -> dict[str, Any]:
    """The header's entries for the fields of a dataclass but some others; raises PatchFormatError
    for one of another type.
    """
    found = {}
    for entry in fields(kind):
        if entry.name in others:
            continue
        expected: Any = entry.type
        found[entry.name] = value = header.get(entry.name)
        if not isinstance(value, expected):
            raise PatchFormatError(f"expected {entry.name} of {expected}, got {value!r:.80}")
    return found


def widened(factor: Tensor) -> Tensor:
    """A factor as a replay uses it: in fp32 if it was rounded to bf16 for its file."""
    return factor.float() if factor.dtype == torch.bfloat16 else factor


# -- the patch against a model


def check_update(update: str) -> None:
    """Raises ValueError if the update is unknown."""
    if update not in UPDATES:
        raise ValueError(f"expected update {', '.join(UPDATES)}, got {update!r}")


def check_fit(patch: "ContextPatch", model: PreTrainedModel) -> None:
    """Raises PatchFormatError unless the model has the patch's experts and every factor fits its
    parameter.
    """
    if patch.info.replayable and len(patch.blocks) != len(patch.layers):
        raise PatchFormatError(
            f"expected the factors of {len(patch.blocks)} layers, got {len(patch.layers)}"
        )
    for index, layer in zip(patch.layer_indices, patch.layers, strict=True):
        block = patch.blocks[index]
        if is_on_another_rank(model, block.path):
            continue
        for change in parameter_changes(block.spec, layer):
            check_change(block.path_of(change.name), change, model)


def check_change(path: str, change: ParameterChange, model: PreTrainedModel) -> None:
    """Raises PatchFormatError unless the model has the module, and the change fits its parameter in
    widths and experts.
    """
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
        count, shape = shape[0], shape[1:]
        least, largest = (int(x) for x in change.index.aminmax())
        if not 0 <= least <= largest < count:
            raise PatchFormatError(
                f"expected the index of {path} from 0 to {count - 1}, got {least} to {largest}"
            )
    got = (change.u.shape[-1],) if change.v is None else (change.u.shape[-1], change.v.shape[-1])
    expected = shape[::-1] if change.transposed else shape
    if got != expected:
        widths = " and ".join(map(str, expected))
        raise PatchFormatError(f"expected u and v of widths {widths} for {path}, got {got}")
