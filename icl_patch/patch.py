"""A recorded patch: the factors of every block for every kept token, what they are valid for, and their file format.

A patch file is a safetensors file. Its tensors are ``layers.{i}.{name}``, each (B, T, width), row by row the factors of the kept tokens:

====================================== =====================================================================================
name                                   meaning
====================================== =====================================================================================
``{reader}.u``, ``readers.v``          ``W_reader + u vᵀ``; all readers of a block share v
``{down}.u``, ``{down}.v``             ``W_down + u vᵀ`` (absent in a direct patch of a scale writer)
``{norm}.new_scale``, ``{norm}.scale`` m' in place of m; the latter is (width,), the norm's own, so that Δm = m' - m is at hand
====================================== =====================================================================================

Its metadata entry ``icl_patch`` is a JSON object: the fields of :class:`PatchInfo`, and ids, masks, positions and slots as lists.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.errors import FingerprintMismatch, PatchFormatError
from icl_patch.families import FAMILIES, Family, Writer, blocks_of

FORMAT = 1
UPDATES = ("direct", "stable", "exact")
_TOKEN_TENSORS = ("kept_ids", "kept_mask", "position_ids", "kept_slots", "prefix_ids", "prefix_mask", "prefix_positions", "prefix_slots")
_DTYPES = {"torch.float64": torch.float64, "torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16}


@dataclass(frozen=True)
class PatchInfo:
    """What a patch belongs to.

    model, revision: the name or path and the commit the model was loaded from, as far as it knows; fingerprint: SHA-256 of the weights
    that are patched; tokenizer: SHA-256 of the tokenizer, None if none was given; family, update, dtype (of the model); passes: forward
    passes over the kept tokens that the patch took; replayable: False once tokens or layers were cut out that a replay needs.
    """

    model: str
    revision: str | None
    fingerprint: str
    tokenizer: str | None
    family: str
    update: str
    dtype: str
    passes: int
    replayable: bool = True


@dataclass(frozen=True)
class PatchReport:
    """What recording observed, per layer, row and kept token, (L, B, T).

    reader_error: largest ``|(W + u vᵀ) z - W z_ctx|`` over the readers, relative to ``max |W z_ctx|``; status: of the RMSNorm inversion
    (:class:`icl_patch.ops.InversionStatus`; 0 where none was needed); misses: elements of the block's output that the exact update could
    not hit; correction: size of the exact update's correction on top of the direct or stable one, relative to the block's output.
    """

    reader_error: Tensor
    status: Tensor
    misses: Tensor
    correction: Tensor


@dataclass(frozen=True, eq=False)
class ContextPatch:
    """The change of weights that stands for a context, for ``B`` rows of ``T`` kept tokens.

    A token's patch is for that token, its history and its position only. All of it is recorded here:

    Attributes:
        info: what the patch belongs to.
        layers: the factors of every block, by name (see the module's table), each (B, T, width); layer_indices: which blocks.
        kept_ids, kept_mask, position_ids, kept_slots: (B, T) int64, the mask bool; right-padded. The slot is the column in the whole
            sequence, which sliding windows are counted in.
        prefix_ids, prefix_mask, prefix_positions, prefix_slots: (B, P), the tokens before the first absorbed one; left-padded.
        logits: (B, T, V) with the context, or None (they are not saved): of the untouched model if the patch took two passes, of the
            context stream if it took one.
        report: what recording observed, or None for a loaded patch.
    """

    info: PatchInfo
    layers: tuple[dict[str, Tensor], ...]
    layer_indices: tuple[int, ...]
    kept_ids: Tensor
    kept_mask: Tensor
    position_ids: Tensor
    kept_slots: Tensor
    prefix_ids: Tensor
    prefix_mask: Tensor
    prefix_positions: Tensor
    prefix_slots: Tensor
    logits: Tensor | None = field(default=None, repr=False)
    report: PatchReport | None = field(default=None, repr=False)

    @property
    def passes(self) -> int:
        """Forward passes over the kept tokens that the patch took."""
        return self.info.passes

    @property
    def family(self) -> Family:
        """The family of the model it belongs to."""
        return next(family for family in FAMILIES if family.name == self.info.family)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.values())

    def __repr__(self) -> str:
        rows, tokens = self.kept_ids.shape
        return f"ContextPatch({self.info.update}, {len(self.layers)} layers, {rows} x {tokens} tokens, {self.nbytes} bytes)"

    def to(self, device: torch.device | str) -> "ContextPatch":
        """The patch with every tensor on ``device``."""
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in _TOKEN_TENSORS}
        layers = tuple({name: tensor.to(device) for name, tensor in layer.items()} for layer in self.layers)
        logits = None if self.logits is None else self.logits.to(device)
        report = None if self.report is None else PatchReport(**{k: v.to(device) for k, v in vars(self.report).items()})
        return replace(self, layers=layers, logits=logits, report=report, **moved)

    def select(self, rows: slice = slice(None), tokens: slice = slice(None), layers: slice = slice(None)) -> "ContextPatch":
        """A part of the patch: rows of the batch, kept tokens, layers.

        Any part can be measured and saved. It can be replayed if all layers are there and the tokens start at the first (each kept
        token attends to the ones before it), except that a direct patch of a scale writer, which divides by activations, must be
        replayed whole: in other shapes they round differently. An exact patch is bit-identical when it is replayed whole; a part of
        one is right up to rounding.

        Raises:
            ValueError: nothing would be left.
        """
        names = ("kept_ids", "kept_mask", "position_ids", "kept_slots")
        cut: dict[str, Any] = {name: getattr(self, name)[rows, tokens] for name in names}
        cut |= {name: getattr(self, name)[rows] for name in _TOKEN_TENSORS if name not in names}
        chosen = self.layers[layers]
        if 0 in cut["kept_ids"].shape or not chosen:
            raise ValueError(f"expected rows, tokens and layers that leave something, got {rows}, {tokens}, {layers} of {self!r}")
        kept = range(self.kept_ids.shape[1])[tokens]
        whole = self.layer_indices[layers] == self.layer_indices and kept == range(len(kept))
        if self.info.update == "direct" and self.family.writer is Writer.SCALE:
            whole = whole and cut["kept_ids"].shape == self.kept_ids.shape
        report = self.report
        if report is not None:
            report = PatchReport(**{name: tensor[layers][:, rows][:, :, tokens] for name, tensor in vars(report).items()})
        return replace(
            self,
            info=replace(self.info, replayable=self.info.replayable and whole),
            layers=tuple({k: v if v.dim() == 1 else v[rows, tokens] for k, v in layer.items()} for layer in chosen),
            layer_indices=self.layer_indices[layers],
            logits=None if self.logits is None else self.logits[rows, tokens],
            report=report,
            **cut,
        )

    def norms(self) -> dict[str, Tensor]:
        """Size of the change of every patched parameter: ``‖ΔW‖_F = ‖u‖ ‖v‖`` and ``‖Δm‖``, each (L, B, T), by the module's name."""
        sizes: dict[str, list[Tensor]] = {}
        for layer in self.layers:
            for name, u, v in self._rank_ones(layer):
                sizes.setdefault(name, []).append(u.norm(dim=-1) * v.norm(dim=-1))
            norm = self.family.post_norm
            if norm is not None:
                sizes.setdefault(norm, []).append((layer[f"{norm}.new_scale"] - layer[f"{norm}.scale"]).norm(dim=-1))
        return {name: torch.stack(size) for name, size in sizes.items()}

    def _rank_ones(self, layer: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        for reader in self.family.readers:
            yield reader, layer[f"{reader}.u"], layer["readers.v"]
        down = self.family.down
        if f"{down}.u" in layer:
            yield down, layer[f"{down}.u"], layer[f"{down}.v"]

    def weight_changes(self, row: int, token: int) -> Iterator[tuple[str, Tensor]]:
        """The materialised change of every patched parameter for one token: its name in the model's state dict, and ``u vᵀ`` or ``Δm``.

        One at a time: this is the only place where a matrix of a weight's size is built.
        """
        for index, layer in zip(self.layer_indices, self.layers, strict=True):
            path = f"{self.family.layers}.{index}"
            for name, u, v in self._rank_ones(layer):
                yield f"{path}.{name}.weight", torch.outer(u[row, token], v[row, token].to(u.dtype))
            norm = self.family.post_norm
            if norm is not None:
                yield f"{path}.{norm}.weight", layer[f"{norm}.new_scale"][row, token] - layer[f"{norm}.scale"]

    # -- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the patch to a safetensors file; the file appears whole or not at all.

        Raises:
            PatchFormatError: a factor is not finite.
        """
        path = Path(path)
        indexed = zip(self.layer_indices, self.layers, strict=True)
        tensors = {f"layers.{i}.{name}": x.contiguous().cpu() for i, layer in indexed for name, x in layer.items()}
        _check_finite(tensors)
        header = {"format": FORMAT, **asdict(self.info), "layers": list(self.layer_indices)}
        header |= {name: getattr(self, name).tolist() for name in _TOKEN_TENSORS}
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        try:
            save_file(tensors, temporary, metadata={"icl_patch": json.dumps(header)})
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(path)
        except BaseException:
            temporary.unlink()
            raise

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> "ContextPatch":
        """Read a patch file, checked whole before anything is returned; with a model, its tensors go to the model's device.

        Raises:
            PatchFormatError: the file is not a patch file, or its tensors are missing, extra, of the wrong shape or not finite.
            FingerprintMismatch: the patch was computed with other patched weights, another dtype or another tokenizer than the given ones.
        """
        try:
            with safe_open(path, "pt") as file:
                header = _parse_header((file.metadata() or {}).get("icl_patch"), path)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise PatchFormatError(f"expected a safetensors file (pickle files are refused), got {path}: {error}") from error
        info = PatchInfo(**{entry.name: header[entry.name] for entry in fields(PatchInfo)})
        token_tensors: dict[str, Any] = _token_tensors(header)
        layers = _layers(tensors, info, header["layers"], token_tensors["kept_ids"].shape)
        patch = cls(info=info, layers=layers, layer_indices=tuple(header["layers"]), **token_tensors)
        if tokenizer is not None:
            patch.check_tokenizer(tokenizer_fingerprint(tokenizer))
        if model is not None:
            patch.check_model(model)
            if info.replayable:
                _check_widths(layers, model)
            patch = patch.to(model.device)
        return patch

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raises FingerprintMismatch if the patch was computed with another tokenizer than that of the hash, as far as it knows."""
        if self.info.tokenizer not in (None, fingerprint):
            raise FingerprintMismatch("expected a patch of ids of the given tokenizer, got one that was computed with another")

    def check_model(self, model: PreTrainedModel, fingerprint: str | None = None) -> None:
        """Raises FingerprintMismatch unless the weights that the patch changes, and their dtype, are this model's."""
        got = fingerprint or weight_fingerprint(model)
        if got != self.info.fingerprint:
            raise FingerprintMismatch(
                f"expected a patch of {model.config._name_or_path or type(model).__name__} (weights {got[:12]}…), "
                f"got one of {self.info.model} (weights {self.info.fingerprint[:12]}…)"
            )
        if _DTYPES[self.info.dtype] != model.dtype:
            raise FingerprintMismatch(f"expected a patch of a {model.dtype} model, got one of a {self.info.dtype} model")


def weight_fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over the weights that a patch changes: names, shapes, dtypes and bytes, in order."""
    digest = hashlib.sha256()
    for block in blocks_of(model):
        for part in block.family.patched:
            for name, parameter in block.module.get_submodule(part).named_parameters():
                weight = parameter.detach().contiguous().cpu()
                digest.update(f"{block.path}.{part}.{name} {tuple(weight.shape)} {weight.dtype}".encode())
                digest.update(weight.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over a tokenizer's vocabulary and special tokens."""
    description = {"vocabulary": sorted(tokenizer.get_vocab().items()), "special": sorted(map(str, tokenizer.all_special_tokens))}
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _check_finite(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            where = "" if tensor.dim() == 1 else f" at row, token {(~tensor.isfinite().all(-1)).nonzero()[0].tolist()}"
            raise PatchFormatError(f"expected finite factors, got NaN or infinity in {name}{where}")


def _parse_header(text: str | None, path: Any) -> dict[str, Any]:
    try:
        header = json.loads(text or "")
    except (json.JSONDecodeError, RecursionError) as error:
        raise PatchFormatError(f"expected a JSON object under 'icl_patch' in the metadata of {path}, got none") from error
    expected: dict[str, Any] = {entry.name: entry.type for entry in fields(PatchInfo)}
    expected |= {"format": int, "layers": list} | dict.fromkeys(_TOKEN_TENSORS, list)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise PatchFormatError(f"expected patch format {FORMAT}, got {header.get('format') if isinstance(header, dict) else header!r}")
    for name, kind in expected.items():
        if name not in header or not isinstance(header[name], kind) or (kind is int and isinstance(header[name], bool)):
            raise PatchFormatError(f"expected header entry {name!r} of {kind}, got {header.get(name)!r}")
    for name, allowed in (("update", UPDATES), ("dtype", _DTYPES), ("family", [family.name for family in FAMILIES])):
        if header[name] not in allowed:
            raise PatchFormatError(f"expected {name} one of {', '.join(allowed)}, got {header[name]!r}")
    indices = header["layers"]
    if not indices or not all(type(index) is int and index >= 0 for index in indices) or len(set(indices)) < len(indices):
        raise PatchFormatError(f"expected layers as distinct numbers ≥ 0, at least one, got {indices!r:.80}")
    if header["passes"] < 1:
        raise PatchFormatError(f"expected at least one pass, got {header['passes']}")
    return header


def _token_tensor(name: str, value: list[Any]) -> Tensor:
    """A header's rows of numbers (of booleans for a mask) as a tensor; no element is converted."""
    kind, dtype = (bool, torch.bool) if name.endswith("mask") else (int, torch.int64)
    rows_fit = all(isinstance(row, list) and len(row) == len(value[0]) for row in value)
    if not value or not rows_fit or not all(type(element) is kind for row in value for element in row):
        raise PatchFormatError(f"expected {name} as rows of equal length of type {kind.__name__}, got {value!r:.80}")
    for row in value:
        if not all(0 <= element < 2**63 for element in row):
            raise PatchFormatError(f"expected {name} of numbers from 0 to 2⁶³ - 1, got {row!r:.80}")
    return torch.tensor(value, dtype=dtype).reshape(len(value), len(value[0]))


def _token_tensors(header: dict[str, Any]) -> dict[str, Tensor]:
    read = {name: _token_tensor(name, header[name]) for name in _TOKEN_TENSORS}
    for name, tensor in read.items():
        group = read["kept_ids" if name in _TOKEN_TENSORS[:4] else "prefix_ids"]
        if tensor.shape != group.shape or len(tensor) != len(read["kept_ids"]):
            raise PatchFormatError(f"expected {name} {tuple(group.shape)}, got {tuple(tensor.shape)}")
    for name, mask in (("kept_mask", read["kept_mask"]), ("prefix_mask", read["prefix_mask"].flip(1))):
        if (mask.long().diff(dim=1) > 0).any() or not (mask.any(1).all() or mask.shape[1] == 0 or name == "prefix_mask"):
            raise PatchFormatError(f"expected {name} with padding on the {'right' if name == 'kept_mask' else 'left'} only")
    if read["kept_ids"].numel() == 0:
        raise PatchFormatError(f"expected at least one kept token, got kept_ids {tuple(read['kept_ids'].shape)}")
    return read


def factor_names(family: Family, update: str) -> Iterable[str]:
    """The names of a block's factors."""
    yield from (f"{reader}.u" for reader in family.readers)
    yield "readers.v"
    if family.writer is not Writer.SCALE or update != "direct":
        yield from (f"{family.down}.u", f"{family.down}.v")
    if family.post_norm is not None:
        yield from (f"{family.post_norm}.new_scale", f"{family.post_norm}.scale")


def _layers(tensors: dict[str, Tensor], info: PatchInfo, indices: list[int], tokens: tuple[int, ...]) -> tuple[dict[str, Tensor], ...]:
    family = next(family for family in FAMILIES if family.name == info.family)
    names = list(factor_names(family, info.update))
    expected = {f"layers.{index}.{name}" for index in indices for name in names}
    if expected != tensors.keys():
        missing, extra = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
        raise PatchFormatError(f"expected {len(expected)} tensors; missing: {missing or 'none'!s:.200}, extra: {extra or 'none'!s:.200}")
    layers = tuple({name: tensors[f"layers.{index}.{name}"] for name in names} for index in indices)
    for index, layer in zip(indices, layers, strict=True):
        width = layer["readers.v"].shape[-1:]  # of the residual stream; the inner width is checked against a model
        for name, tensor in layer.items():
            own = tensor.shape[-1:] if name.endswith(".v") or name.removesuffix(".u") in family.readers else width
            shape = tuple(own) if name.endswith(".scale") else (*tokens, *own)
            if tuple(tensor.shape) != shape:
                raise PatchFormatError(f"expected layers.{index}.{name} {shape}, got {tuple(tensor.shape)}")
            if tensor.dtype not in (torch.float32, torch.float64):
                raise PatchFormatError(f"expected layers.{index}.{name} in fp32 or fp64, got {tensor.dtype}")
    _check_finite(tensors)
    return layers


def _check_widths(layers: tuple[dict[str, Tensor], ...], model: PreTrainedModel) -> None:
    """Raises PatchFormatError unless every factor fits the matrix it changes."""
    blocks = blocks_of(model)
    if len(blocks) != len(layers):
        raise PatchFormatError(f"expected the factors of {len(blocks)} layers, got {len(layers)}")
    for block, layer in zip(blocks, layers, strict=True):
        for part in (*block.family.readers, block.family.down):
            if f"{part}.u" not in layer:
                continue
            weight: Any = block.module.get_submodule(part).weight
            rows, columns = weight.shape
            v = layer["readers.v" if part in block.family.readers else f"{part}.v"]
            if (layer[f"{part}.u"].shape[-1], v.shape[-1]) != (rows, columns):
                got = (layer[f"{part}.u"].shape[-1], v.shape[-1])
                raise PatchFormatError(f"expected u and v of widths {rows} and {columns} for {block.path}.{part}, got {got}")
