"""A recorded patch: the factors of every block for every kept token, what they are valid for, and their file format.

A patch file is a safetensors file. Its tensors are ``layers.{i}.{name}``, each (B, T, width), row by row the factors of the kept tokens:

======================================= ====================================================================================
name                                    meaning
======================================= ====================================================================================
``{reader}.u``, ``readers.v``           ``W_reader + u vᵀ``; all readers of a block share v
``{down}.u``, ``{down}.v``              ``W_down + u vᵀ`` (absent in a direct patch of a scale writer)
``{down}.shift``                        ``b + Δb``
``{norm}.new_scale``, ``{norm}.scale``  m' in place of m; the latter is (width,), the norm's own, so that Δm = m' - m is at hand
``{experts}.index``                     (B, T, k) int64, the token's active experts; slot j holds the factors of expert ``index[j]``
``{experts}.gate_up_proj.u``            (B, T, k, width), ``W_j + u_j vᵀ`` with the readers' v
``{experts}.down_proj.u``, ``.v``       (B, T, d) and (B, T, k, width), ``W_j + u v_jᵀ``; or ``.shift`` (B, T, d), ``b_j + Δb``
======================================= ====================================================================================

Its metadata entry ``icl_patch`` is a JSON object: the fields of :class:`PatchInfo`, the path and form of every block, and ids, masks,
positions and slots as lists.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.changes import Change, changes_of
from icl_patch.errors import FingerprintMismatch, PatchFormatError
from icl_patch.families import Block, Form, Writer
from icl_patch.fingerprints import tokenizer_fingerprint, weight_fingerprint

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
    not hit; correction: size of the exact update's correction on top of the direct or stable one, relative to the block's output;
    experts_changed: how many of the experts that the patched router chose are not those chosen with the context.
    """

    reader_error: Tensor
    status: Tensor
    misses: Tensor
    correction: Tensor
    experts_changed: Tensor


@dataclass(frozen=True, eq=False)
class ContextPatch:
    """The change of weights that stands for a context, for ``B`` rows of ``T`` kept tokens.

    A token's patch is for that token, its history and its position only. All of it is recorded here:

    Attributes:
        info: what the patch belongs to.
        layers: the factors of every block, by name (see the module's table); layer_indices: which blocks; blocks: path and form of
            every block of the model.
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
    blocks: tuple[Block, ...]
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
        if self.info.update == "direct" and any(block.form.writer is Writer.SCALE for block in self.blocks):
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
        """Size of the change of every patched parameter: ``‖ΔW‖_F = ‖u‖ ‖v‖``, ``‖Δb‖`` and ``‖Δm‖``, by the module's name.

        Each is (L, B, T), with 0 for a block that has no such module; of experts it is the root of the sum of squares.
        """
        sizes: dict[str, dict[int, Tensor]] = {}
        for index, change in self._changes():
            sizes.setdefault(change.name, {})[index] = change.size()
        zero = torch.zeros(self.kept_ids.shape)
        found: dict[str, Tensor] = {}
        for name, by_layer in sizes.items():
            like = next(iter(by_layer.values()))
            found[name] = torch.stack([by_layer.get(index, zero.to(like)) for index in range(len(self.layers))])
        return found

    def _changes(self) -> Iterator[tuple[int, "Change"]]:
        """Every change in the patch, with its place among the layers."""
        for place, (index, layer) in enumerate(zip(self.layer_indices, self.layers, strict=True)):
            for change in changes_of(self.blocks[index].form, layer):
                yield place, change

    def weight_changes(self, row: int, token: int) -> Iterator[tuple[str, Tensor]]:
        """The materialised change of every patched parameter for one token: its name in the model's state dict, and ``u vᵀ``, Δb or Δm.

        Of a parameter that holds the matrices of many experts, ``name[e]`` is the e-th; the token's active experts change. One at a time:
        this is the only place where a matrix of a weight's size is built.
        """
        for place, change in self._changes():
            path = self.blocks[self.layer_indices[place]].path
            for name, materialised in change.materialised(row, token):
                yield f"{path}.{name}", materialised

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
        header["blocks"] = [{"path": block.path, "form": block.form.to_json()} for block in self.blocks]
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
        blocks = _blocks(header)
        layers = _layers(tensors, info, blocks, header["layers"], token_tensors["kept_ids"].shape)
        patch = cls(info=info, layers=layers, layer_indices=tuple(header["layers"]), blocks=blocks, **token_tensors)
        if tokenizer is not None:
            patch.check_tokenizer(tokenizer_fingerprint(tokenizer))
        if model is not None:
            patch.check_model(model)
            _check_widths(patch, model)
            patch = patch.to(model.device)
        return patch

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raises FingerprintMismatch if the patch was computed with another tokenizer than that of the hash, as far as it knows."""
        if self.info.tokenizer not in (None, fingerprint):
            raise FingerprintMismatch("expected a patch of ids of the given tokenizer, got one that was computed with another")

    def check_model(self, model: PreTrainedModel, fingerprint: str | None = None) -> None:
        """Raises FingerprintMismatch unless the weights that the patch changes, and their dtype, are this model's."""
        try:
            got = fingerprint or weight_fingerprint(model, self.blocks)
        except AttributeError:
            got = "other modules"
        if got != self.info.fingerprint:
            raise FingerprintMismatch(
                f"expected a patch of {model.config._name_or_path or type(model).__name__} (weights {got[:12]}…), "
                f"got one of {self.info.model} (weights {self.info.fingerprint[:12]}…)"
            )
        if _DTYPES[self.info.dtype] != model.dtype:
            raise FingerprintMismatch(f"expected a patch of a {model.dtype} model, got one of a {self.info.dtype} model")


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
    expected |= {"format": int, "layers": list, "blocks": list} | dict.fromkeys(_TOKEN_TENSORS, list)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise PatchFormatError(f"expected patch format {FORMAT}, got {header.get('format') if isinstance(header, dict) else header!r}")
    for name, kind in expected.items():
        if name not in header or not isinstance(header[name], kind) or (kind is int and isinstance(header[name], bool)):
            raise PatchFormatError(f"expected header entry {name!r} of {kind}, got {header.get(name)!r}")
    for name, allowed in (("update", UPDATES), ("dtype", _DTYPES)):
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


def _blocks(header: dict[str, Any]) -> tuple[Block, ...]:
    """The model's blocks, from the header."""
    blocks = []
    for entry in header["blocks"]:
        if not isinstance(entry, dict) or entry.keys() != {"path", "form"} or not isinstance(entry["path"], str):
            raise PatchFormatError(f"expected blocks with a path and a form, got {entry!r:.80}")
        try:
            blocks.append(Block(entry["path"], Form.from_json(entry["form"])))
        except ValueError as error:
            raise PatchFormatError(f"expected a known form of {entry['path']!r:.80}: {error}") from error
    if max(header["layers"]) >= len(blocks):
        raise PatchFormatError(f"expected layers among the {len(blocks)} blocks, got {header['layers']!r:.80}")
    return tuple(blocks)


def _layers(
    tensors: dict[str, Tensor], info: PatchInfo, blocks: tuple[Block, ...], indices: list[int], tokens: tuple[int, ...]
) -> tuple[dict[str, Tensor], ...]:
    names = {index: blocks[index].form.factor_names(info.update) for index in indices}
    expected = {f"layers.{index}.{name}" for index in indices for name in names[index]}
    if expected != tensors.keys():
        missing, extra = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
        raise PatchFormatError(f"expected {len(expected)} tensors; missing: {missing or 'none'!s:.200}, extra: {extra or 'none'!s:.200}")
    layers = tuple({name: tensors[f"layers.{index}.{name}"] for name in names[index]} for index in indices)
    width = next(x.shape[-1] if x.dim() else 0 for i, layer in zip(indices, layers, strict=True) for x in _residual_wide(names[i], layer))
    for index, layer in zip(indices, layers, strict=True):
        slots = next((layer[name].shape[-1:] for name, kind in names[index].items() if kind == "index"), ())
        for name, kind in names[index].items():
            _check_factor(f"layers.{index}.{name}", layer[name], kind, (*tokens, *(slots if kind == "slots" else ())), width)
    _check_finite(tensors)
    return layers


def _residual_wide(names: dict[str, str], layer: dict[str, Tensor]) -> Iterator[Tensor]:
    """A block's factors that are as wide as the residual stream: every block has one."""
    return (layer[name] for name, kind in names.items() if kind == "hidden")


def _check_factor(name: str, tensor: Tensor, kind: str, leading: tuple[int, ...], width: int) -> None:
    """Shape and dtype of one factor; the inner widths are checked against a model."""
    shape = {"hidden": (*leading, width), "norm": (width,)}.get(kind, (*leading, *tensor.shape[-1:]))
    if tuple(tensor.shape) != shape:
        raise PatchFormatError(f"expected {name} {shape}, got {tuple(tensor.shape)}")
    if kind == "index":
        if tensor.dtype != torch.int64 or (tensor.numel() and int(tensor.min()) < 0):
            raise PatchFormatError(f"expected {name} of numbers of experts in int64, got {tensor.dtype}")
    elif tensor.dtype not in (torch.float32, torch.float64):
        raise PatchFormatError(f"expected {name} in fp32 or fp64, got {tensor.dtype}")


def _check_widths(patch: ContextPatch, model: PreTrainedModel) -> None:
    """Raises PatchFormatError unless every factor fits the parameter it changes."""
    if patch.info.replayable and len(patch.blocks) != len(patch.layers):
        raise PatchFormatError(f"expected the factors of {len(patch.blocks)} layers, got {len(patch.layers)}")
    for place, change in patch._changes():
        path = f"{patch.blocks[patch.layer_indices[place]].path}.{change.name}"
        shape = _matrix_shape(model, path, change)
        if shape is None:
            continue
        got = (change.u.shape[-1],) if change.v is None else (change.u.shape[-1], change.v.shape[-1])
        expected = shape[::-1] if change.transposed else shape
        if got != expected:
            widths = " and ".join(map(str, expected))
            raise PatchFormatError(f"expected u and v of widths {widths} for {path}, got {got}")


def _matrix_shape(model: PreTrainedModel, path: str, change: Change) -> tuple[int, ...] | None:
    """The shape of the parameter that a change is for; None if a quantised module does not say."""
    if change.index is not None:
        parent, _, name = path.rpartition(".")
        return tuple(getattr(model.get_submodule(parent), name).shape[1:])
    parameter = getattr(model.get_submodule(path), change.parameter, None)
    if not isinstance(parameter, Tensor) or not parameter.is_floating_point():
        return None
    return tuple(parameter.shape)
