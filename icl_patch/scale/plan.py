"""What a run over a data set will do, before it writes anything."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from icl_patch.errors import ControllabilityError
from icl_patch.patcher import ContextPatcher
from icl_patch.scale.contents import Contents
from icl_patch.scale.rows import Columns, EncodedRow, Reject, Row, encode_row, read_rows
from icl_patch.scale.shard import compute_batch

_SAMPLE = 256  # rows to do, of which one must be right, and whose tokens are counted
_TRIED = 8  # of these, to measure the size of a patch


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        folder: the folder. rows: of the data set. finished: patches that are there already.
        duplicates: rows with the texts of an earlier one, which share its patch. unreadable: rows
            that will be rejected. todo: patches to compute, by all processes together.
        kept_tokens: of these, estimated from the first rows.
        bytes_per_token: of factors in the files. memory_per_token: of factors and logits.
        free: bytes on the disk.
    """

    folder: Path
    rows: int
    finished: int
    duplicates: int
    unreadable: int
    todo: int
    kept_tokens: int
    bytes_per_token: int
    memory_per_token: int
    free: int

    @property
    def distinct(self) -> int:
        """Rows that can be read, without duplicates."""
        return self.finished + self.todo

    @property
    def nbytes(self) -> int:
        """Bytes of factors to write, about."""
        return self.kept_tokens * self.bytes_per_token

    def __str__(self) -> str:
        text = (
            f"{self.rows} rows; patches to compute: {self.todo}, already there: {self.finished};"
            f" duplicates: {self.duplicates}, unreadable: {self.unreadable}"
        )
        if not self.kept_tokens:
            return text
        text += f"\nabout {self.kept_tokens} kept tokens"
        if not self.bytes_per_token:
            return f"{text}; statistics without factors into {self.folder}"
        text += (
            f" of {_size(self.bytes_per_token)}: about {_size(self.nbytes)} into {self.folder},"
            f" {_size(self.free)} are free"
        )
        if self.nbytes > self.free:
            text += ": TOO LITTLE (--factors-dtype, --layers and --statistics write less)"
        return text


def make_plan(
    patcher: ContextPatcher,
    dataset: Path,
    folder: Path,
    columns: Columns,
    contents: Contents,
    finished: set[bytes],
) -> Plan:
    """Read the whole data set once, and compute the patch of one of its rows.

    finished: the ids of the patches that are there.

    Raises:
        ValueError: the data set is empty or lacks a column, or there is no patch and none of its
            first rows can have one.
    """
    seen: set[bytes] = set()
    sample: list[Row] = []
    rows = unreadable = todo = characters = 0
    reason = "it is empty"
    for row in read_rows(dataset, columns):
        rows += 1
        if isinstance(row, Reject):
            unreadable += 1
            reason = str(row) if unreadable == 1 else reason
            continue
        key = row.id(columns)
        if key not in seen and key not in finished:
            todo, characters = todo + 1, characters + len(row.kept)
            sample += [row] if len(sample) < _SAMPLE else []
        seen.add(key)
    encoded = [encode_row(patcher, row, columns) for row in sample]
    usable = [row for row in encoded if isinstance(row, EncodedRow)]
    if sample and not usable:
        reason = str(encoded[0])
    stored = in_memory = 0
    for example in sorted(usable, key=lambda row: sum(row.lengths))[:_TRIED]:
        try:
            stored, in_memory = _bytes_per_token(patcher, example, contents)
            break
        except ControllabilityError as error:
            reason = str(Reject(example.row.number, str(error)))
    if not in_memory and len(seen) == todo:
        raise ValueError(f"expected rows in {dataset} that can have a patch, got none: {reason}")
    per_character = 0.0
    if usable:
        tokens = sum(row.lengths[0] for row in usable)
        per_character = tokens / sum(len(row.row.kept) for row in usable)
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return Plan(
        folder=folder,
        rows=rows,
        finished=len(seen) - todo,
        duplicates=rows - unreadable - len(seen),
        unreadable=unreadable,
        todo=todo,
        kept_tokens=round(characters * per_character),
        bytes_per_token=stored,
        memory_per_token=in_memory,
        free=shutil.disk_usage(parent).free,
    )


def _bytes_per_token(
    patcher: ContextPatcher, row: EncodedRow, contents: Contents
) -> tuple[int, int]:
    """Bytes of a kept token: of factors in the file, and of factors and logits in memory."""
    patch = compute_batch(patcher, [row])
    assert patch.logits is not None
    stored = 0 if contents.statistics else contents.stored(patch).nbytes
    tokens = row.lengths[0]
    return math.ceil(stored / tokens), math.ceil((patch.nbytes + patch.logits.nbytes) / tokens)


def _size(nbytes: float) -> str:
    """Bytes with a decimal prefix."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"
