"""Rows become shards of a folder: encoded, cut into batches, computed and written.

A shard is one batch, in an ordinary patch file: :class:`icl_patch.ContextPatch` loads it, and
``icl-patch inspect`` and ``replay`` take it. Its part of the index is a Parquet file with a row a
patch. It is written last, so every patch in the index exists. The names are hashes of the rows, so
a second run writes the same files.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import torch

from icl_patch.errors import ControllabilityError, NonFiniteError, PatchFormatError
from icl_patch.invariance.arithmetic import rounding_dtype
from icl_patch.layers.device_hooks import input_device
from icl_patch.metrics import replay_error
from icl_patch.models.positions import switch_lengths
from icl_patch.models.prompts import check_offsets, padded
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.logit_digest import LogitDigest
from icl_patch.patch.low_rank import LowRank
from icl_patch.patch.parameter_changes import parameter_changes
from icl_patch.patch.serialization import check_finite, widened
from icl_patch.patcher import ContextPatcher
from icl_patch.scale.rows import Columns, EncodedRow, Reject, Row, encode_row
from icl_patch.scale.run import COLUMNS, INDEX, SHARDS, Contents, Run, check_folder, write_part

_TRIED = 8  # rows, to measure the size of a patch
_PADDING = 1 / 8  # of a batch's kept tokens at most: it would be written too


@dataclass(frozen=True)
class Batching:
    """The largest batch, which becomes a shard; a longer row is a batch by itself.

    Attributes:
        rows: at most. tokens: at most, with the padding.
        nbytes: of factors and logits in memory, at most.
    """

    rows: int = 16
    tokens: int = 8192
    nbytes: int = 2**28

    def __post_init__(self) -> None:
        if min(self.rows, self.tokens, self.nbytes) < 1:
            raise ValueError(f"expected rows, tokens and nbytes ≥ 1, got {self}")


class Extractor:
    """Writes the patches of rows into a folder.

    Args: see :func:`icl_patch.scale.extract_dataset`.

    Raises:
        ValueError: the patcher has no tokenizer or a slow one, no layers would be left, or the
            folder has files of another run.
    """

    def __init__(
        self,
        patcher: ContextPatcher,
        folder: Path,
        columns: Columns,
        contents: Contents,
        batching: Batching,
    ) -> None:
        if patcher.tokenizer is None:
            raise ValueError(
                "expected a patcher with a tokenizer, got one without: ContextPatcher(model,"
                " tokenizer=tokenizer)"
            )
        check_offsets(patcher.tokenizer)
        self.patcher, self.folder = patcher, folder
        self.columns, self.contents, self.batching = columns, contents, batching
        self.run = Run.of(patcher, contents)
        check_folder(folder, self.run)
        self._memory_per_token: int | None = None
        self._switches = switch_lengths(patcher.model)

    def encode(self, rows: Iterable[Row], rejected: list[Reject]) -> list[EncodedRow]:
        """The rows that the model can take."""
        model, tokenizer = self.patcher.model, self.patcher.tokenizer
        assert tokenizer is not None
        encoded = []
        for row in rows:
            try:
                one = encode_row(model, tokenizer, row, self.columns)
                if one.lengths[1] <= (keep_first := self.contents.keep_first):
                    raise ValueError(
                        f"expected a context of more than {keep_first} tokens, got"
                        f" {one.lengths[1]}: lower keep_first"
                    )
                encoded.append(one)
            except ValueError as error:
                rejected.append(row.rejected(error, self.columns))
        return encoded

    def measure(self, rows: Sequence[EncodedRow], rejected: list[Reject]) -> int | None:
        """Compute the patch of a short row, after which batches keep to ``Batching.nbytes``.

        Returns:
            The bytes of a kept token's factors in the files; None if no row has a patch.
        """
        for row in sorted(rows, key=lambda row: sum(row.lengths))[:_TRIED]:
            try:
                patch = compute_batch(self.patcher, [row], self.contents.keep_first)
            except (ControllabilityError, NonFiniteError) as error:
                rejected.append(row.row.rejected(error, self.columns))
                continue
            assert patch.logits is not None
            self._memory_per_token = _bytes_per_token(patch) + patch.logits[0, 0].nbytes
            if self.contents.statistics:
                return 0
            stored = self.contents.rounded(patch).select(layers=self.contents.layers)
            return _bytes_per_token(stored)
        return None

    def extract(self, rows: Iterable[Row], rejected: list[Reject]) -> Iterator[pa.Table]:
        """Write the patches of rows that have none yet; yields the index of each shard."""
        encoded = self.encode(rows, rejected)
        if self._memory_per_token is None:
            self.measure(encoded, [])
        for batch in self._batches(encoded):
            yield from self._shards(batch, rejected)

    def _batches(self, rows: list[EncodedRow]) -> Iterator[list[EncodedRow]]:
        """Rows that run at once, the shortest first."""
        batch: list[EncodedRow] = []
        for row in sorted(rows, key=lambda row: (self._kind(row), row.lengths)):
            if batch and not self._fits([*batch, row]):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _kind(self, row: EncodedRow) -> tuple[int, int]:
        """Only rows of one kind have the logits in a batch that they have alone."""
        kept, context = row.lengths
        rotation = sum(kept + context > length for length in self._switches)
        return rotation, 0 if self.patcher.attached_model.takes_padding else context

    def _fits(self, batch: list[EncodedRow]) -> bool:
        kept, context = (max(lengths) for lengths in zip(*(x.lengths for x in batch), strict=True))
        most = self.batching
        return (
            len(batch) <= (most.rows if self.patcher.attached_model.divisible else 1)
            and len(batch) * (kept + context) <= most.tokens
            and len(batch) * kept * (self._memory_per_token or 0) <= most.nbytes
            and len(batch) * kept * (1 - _PADDING) <= sum(row.lengths[0] for row in batch)
            and self._kind(batch[0]) == self._kind(batch[-1])
        )

    def _shards(self, batch: Sequence[EncodedRow], rejected: list[Reject]) -> Iterator[pa.Table]:
        """The index of a batch's shard; if some row cannot have a patch, of a shard for each of the
        others.
        """
        try:
            yield self._write(batch)
        except (ControllabilityError, NonFiniteError, PatchFormatError) as error:
            if len(batch) == 1:
                rejected.append(batch[0].row.rejected(error, self.columns))
                return
            for row in batch:
                yield from self._shards([row], rejected)

    def _write(self, rows: Sequence[EncodedRow]) -> pa.Table:
        """Compute the patch of a batch, and write it with its part of the index, which is
        returned.
        """
        contents = self.contents
        patch = compute_batch(self.patcher, rows, contents.keep_first)
        ids = [row.row.id(self.columns) for row in rows]
        name = self.run.name_of(ids)
        rounded = contents.rounded(patch)
        errors: Sequence[float | None] = [None] * len(rows)
        if rounded is not patch:
            rounded, errors = self._replayed(rounded)
        stored = rounded.select(layers=contents.layers)
        if contents.statistics:
            for layer in stored.layers:
                check_finite(layer)
        else:
            stored.save(self.folder / SHARDS / f"{name}.safetensors")
        table = self._index(patch.select(layers=contents.layers), rows, ids, name, errors)
        write_part(self.folder / INDEX / f"{name}.parquet", table)
        return table

    def _replayed(self, patch: ContextPatch) -> tuple[ContextPatch, list[float]]:
        """A patch of rounded factors with the digest of their replay; and how far this is off,
        relative to the largest logit with the context, for each row.
        """
        layers = tuple({name: widened(x) for name, x in layer.items()} for layer in patch.layers)
        attached, mask = self.patcher.attached_model, patch.kept_mask
        logits = attached.replay_logits(replace(patch, layers=layers))
        assert patch.logits is not None
        dtype = rounding_dtype(patch.info.arithmetic, attached.model)
        digest = LogitDigest.of(logits, mask, dtype, identical=False)
        rows = zip(logits.split(1), patch.logits.split(1), mask.split(1), strict=True)
        return patch.with_digest(digest), [replay_error(*row) for row in rows]

    def _index(
        self,
        patch: ContextPatch,
        rows: Sequence[EncodedRow],
        ids: Sequence[bytes],
        name: str,
        errors: Sequence[float | None],
    ) -> pa.Table:
        """A row a patch; ``norms`` and the like are structs by module, a number for each layer (and
        token).
        """
        assert patch.report is not None
        misses = (patch.report.misses * patch.kept_mask).sum((0, 2)).tolist()
        norms, records = patch.norms(), []
        for place, row in enumerate(rows):
            kept, context = row.lengths
            record = {
                "id": ids[place].hex(),
                "row": row.row.number,
                "context_sha256": _sha256(row.row.context),
                "kept_sha256": _sha256(row.row.kept),
                "context_tokens": context,
                "kept_tokens": kept,
                "misses": misses[place] if patch.info.update == "exact" else None,
                "replay_error": errors[place],
                "norms": {key: x[:, place, :kept].tolist() for key, x in norms.items()},
            }
            if self.contents.statistics:
                record |= sums_and_ranks(patch, place)
            else:
                record |= {"file": f"{SHARDS}/{name}.safetensors", "offset": place}
            records.append(record)
        schema = _schema(list(norms), self.contents.statistics)
        schema = schema.with_metadata({"icl_patch": json.dumps(asdict(self.run))})
        return pa.Table.from_pylist(records, schema)


def _bytes_per_token(patch: ContextPatch) -> int:
    """The bytes of one kept token's factors, without the scales that all tokens share."""
    return sum(x[0, 0].nbytes for layer in patch.layers for x in layer.values() if x.dim() > 1)


def compute_batch(
    patcher: ContextPatcher, rows: Sequence[EncodedRow], keep_first: int = 0
) -> ContextPatch:
    """The patch of rows of different lengths."""
    device = input_device(patcher.model)
    context, context_mask = padded([row.context_ids[0] for row in rows], "left")
    kept, kept_mask = padded([row.kept_ids[0] for row in rows], "right")
    return patcher.compute(
        context.to(device),
        kept.to(device),
        context_mask=context_mask.to(device),
        kept_mask=kept_mask.to(device),
        keep_first=keep_first,
    )


def _schema(modules: list[str], statistics: bool) -> pa.Schema:
    def by_module(kind: pa.DataType) -> pa.DataType:
        return pa.struct([(name, kind) for name in modules])

    fields = [*COLUMNS, ("norms", by_module(pa.list_(pa.list_(pa.float32()))))]
    if statistics:
        fields += [
            ("sums", by_module(pa.list_(pa.float32()))),
            ("ranks", by_module(pa.list_(pa.int32()))),
        ]
    return pa.schema(fields)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sums_and_ranks(patch: ContextPatch, row: int) -> dict[str, dict[str, list[float]]]:
    """``‖Σ_t ΔW_t‖_F`` and the rank of ``Σ_t ΔW_t``, t the kept tokens of one row, for every
    changed parameter by its module's name; Δb and Δm have a rank of at most 1.

    From the factors, in fp64: no matrix of a weight's size is built. Singular values count if they
    exceed the largest one times the larger width times the spacing of fp32, in which most factors
    are computed. Of experts it is the root of the sum of squares, and the sum of the ranks.

    Returns:
        ``"sums"`` and ``"ranks"``, a number for each layer, 0 for a block that has no such module.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0] * len(patch.layers))
    ranks: dict[str, list[float]] = defaultdict(lambda: [0] * len(patch.layers))
    for place, (index, layer) in enumerate(zip(patch.layer_indices, patch.layers, strict=True)):
        for change in parameter_changes(patch.blocks[index].spec, layer):
            tokens = change.low_rank()[row, patch.kept_mask[row]]
            experts = None if tokens.index is None else tokens.index.flatten()
            total = LowRank(tokens.u.flatten(0, 1), tokens.v.flatten(0, 1), experts)
            parts = [total]
            if experts is not None:
                parts = [total[experts == expert] for expert in experts.unique()]
            sums[change.name][place] = float(total.norm())
            ranks[change.name][place] = sum(map(_rank, parts))
    return {"sums": sums, "ranks": ranks}


def _rank(change: LowRank) -> int:
    """The rank of ``Σ_r u_r v_rᵀ``, from the triangles of the factors' QR decompositions."""
    u, v = (torch.linalg.qr(factor.double().T, mode="r").R for factor in (change.u, change.v))
    spacing = torch.finfo(torch.float32).eps * max(change.u.shape[1], change.v.shape[1])
    return int(torch.linalg.matrix_rank(u @ v.T, rtol=spacing))
