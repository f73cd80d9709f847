"""What a run over a data set will do, before it writes anything."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from icl_patch.errors import ControllabilityError
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patcher import ContextPatcher
from icl_patch.scale.contents import Contents
from icl_patch.scale.rows import Columns, EncodedRow, Reject, Row, encode_row, read_rows
from icl_patch.scale.shard import compute_batch

_SAMPLE = 256  # the first rows, of which one must be right, and whose tokens are counted
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
    """Read the whole data set once, and if there is something to do, compute a patch.

    finished: the ids of the patches that are there.

    Raises:
        ValueError: the data set is empty or lacks a column, or none of its first rows can have a
            patch.
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
        elif (key := row.id(columns)) not in seen:
            seen.add(key)
            sample += [row] if len(sample) < _SAMPLE else []
            if key not in finished:
                todo, characters = todo + 1, characters + len(row.kept)
    size = _Size(0.0, 0, 0)
    if todo or not seen:
        size = _measure(patcher, sample, columns, contents, reason)
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return Plan(
        folder=folder,
        rows=rows,
        finished=len(seen) - todo,
        duplicates=rows - unreadable - len(seen),
        unreadable=unreadable,
        todo=todo,
        kept_tokens=round(characters * size.tokens_per_character),
        bytes_per_token=size.bytes_per_token,
        memory_per_token=size.memory_per_token,
        free=shutil.disk_usage(parent).free,
    )


@dataclass(frozen=True)
class _Size:
    """Kept tokens of a character, and bytes of a kept token, as in :class:`Plan`."""

    tokens_per_character: float
    bytes_per_token: int
    memory_per_token: int


def _measure(
    patcher: ContextPatcher, sample: list[Row], columns: Columns, contents: Contents, reason: str
) -> _Size:
    """Encode the rows, and compute the patch of a short one.

    reason: why there are no rows, if there are none.

    Raises:
        ValueError: no row can have a patch.
    """
    encoded = [encode_row(patcher, row, columns) for row in sample]
    usable = [row for row in encoded if isinstance(row, EncodedRow)]
    if encoded and not usable:
        reason = str(encoded[0])
    for row in sorted(usable, key=lambda row: sum(row.lengths))[:_TRIED]:
        try:
            patch = compute_batch(patcher, [row])
        except ControllabilityError as error:
            reason = str(Reject(row.row.number, str(error)))
            continue
        assert patch.logits is not None
        tokens = sum(row.lengths[0] for row in usable)
        stored = 0 if contents.statistics else _bytes_per_token(contents.stored(patch))
        return _Size(
            tokens / sum(len(row.row.kept) for row in usable),
            stored,
            _bytes_per_token(patch) + patch.logits[0, 0].nbytes,
        )
    raise ValueError(f"expected a data set with rows that can have a patch, got none: {reason}")


def _bytes_per_token(patch: ContextPatch) -> int:
    """Of factors of one kept token; the scales that all tokens share are left out."""
    return sum(x[0, 0].nbytes for layer in patch.layers for x in layer.values() if x.dim() > 1)


def _size(nbytes: float) -> str:
    """Bytes with a decimal prefix."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"
