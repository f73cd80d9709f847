"""One shard: rows become a patch file and its part of the index.

A shard is one batch, in an ordinary patch file: :class:`icl_patch.ContextPatch` loads it, and
``icl-patch inspect`` and ``replay`` take it. Its part of the index is a Parquet file with a row a
patch, written last: whatever the index names is there. The names are hashes of the rows, so that a
second run writes the same files.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from icl_patch.layers.device_hooks import input_device
from icl_patch.patch.atomic_file import write_atomically
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patch.serialization import check_finite
from icl_patch.patcher import ContextPatcher
from icl_patch.scale.contents import Contents, replay_errors
from icl_patch.scale.rows import Columns, EncodedRow
from icl_patch.scale.run import COLUMNS, INDEX, SHARDS, Run
from icl_patch.scale.statistics import sums_and_ranks


def compute_batch(patcher: ContextPatcher, rows: Sequence[EncodedRow]) -> ContextPatch:
    """The patch of rows of different lengths."""
    device = input_device(patcher.model)
    context, context_mask = _padded([row.context_ids[0] for row in rows], "left")
    kept, kept_mask = _padded([row.kept_ids[0] for row in rows], "right")
    return patcher.compute(
        context.to(device),
        kept.to(device),
        context_mask=context_mask.to(device),
        kept_mask=kept_mask.to(device),
    )


def extract_shard(
    patcher: ContextPatcher,
    rows: Sequence[EncodedRow],
    columns: Columns,
    contents: Contents,
    run: Run,
    folder: Path,
) -> pa.Table:
    """Compute the patch of rows, and write it with its part of the index into a run's folder.

    Returns:
        The part of the index, a row a patch.

    Raises:
        ControllabilityError: as :meth:`icl_patch.ContextPatcher.compute`.
        PatchFormatError: a factor is not finite.
        OSError: a file cannot be written.
    """
    patch = compute_batch(patcher, rows)
    ids = [row.row.id(columns) for row in rows]
    name = run.name_of(ids)
    rounded = contents.rounded(patch)
    stored = rounded.select(layers=contents.layers)
    if contents.statistics:
        for layer in stored.layers:
            check_finite(layer)
    else:
        stored.save(folder / SHARDS / f"{name}.safetensors")
    errors = [None] * len(rows) if rounded is patch else replay_errors(patcher, rounded)
    table = _index(patch.select(layers=contents.layers), rows, ids, name, errors, contents)
    table = table.replace_schema_metadata({"icl_patch": json.dumps(asdict(run))})
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    write_atomically(folder / INDEX / f"{name}.parquet", [memoryview(buffer.getvalue())])
    return table


def _padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Ids (B, T) int64 and mask (B, T) bool."""
    ids = pad_sequence(rows, batch_first=True, padding_side=side)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return ids, mask.bool()


def _index(
    patch: ContextPatch,
    rows: Sequence[EncodedRow],
    ids: Sequence[bytes],
    name: str,
    errors: Sequence[float | None],
    contents: Contents,
) -> pa.Table:
    """A row a patch; ``norms`` and the like are structs by module, a number for each layer (and
    token).
    """
    assert patch.report is not None
    misses = (patch.report.misses * patch.kept_mask).sum((0, 2)).tolist()
    norms = patch.norms()
    records = []
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
        if contents.statistics:
            sums, ranks = sums_and_ranks(patch, place)
            record["sums"] = {key: x.tolist() for key, x in sums.items()}
            record["ranks"] = {key: x.tolist() for key, x in ranks.items()}
        else:
            record |= {"file": f"{SHARDS}/{name}.safetensors", "offset": place}
        records.append(record)
    return pa.Table.from_pylist(records, _schema(list(norms), contents.statistics))


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
