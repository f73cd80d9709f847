"""What a run over a data set will do, before it writes anything."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from icl_patch.scale.extractor import Extractor
from icl_patch.scale.rows import Reject, Row, read_rows

_SAMPLE = 256  # the first rows, of which one must be right, and whose tokens are counted


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        folder: the folder. rows: of the data set. finished: patches that are there already.
        duplicates: rows with the texts of an earlier one, which share its patch. unreadable: rows
            that will be rejected. todo: patches to compute, by all processes together.
        kept_tokens: of these, estimated from the first rows. bytes_per_token: of their factors in
            the files. free: bytes on the disk.
    """

    folder: Path
    rows: int
    finished: int
    duplicates: int
    unreadable: int
    todo: int
    kept_tokens: int
    bytes_per_token: int
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
            f" of {decimal(self.bytes_per_token)}: about {decimal(self.nbytes)} into {self.folder},"
            f" {decimal(self.free)} are free"
        )
        if self.nbytes > self.free:
            text += ": TOO LITTLE (--factors-dtype, --layers and --statistics write less)"
        return text


def make_plan(extractor: Extractor, dataset: Path, finished: set[bytes]) -> Plan:
    """Read the whole data set once, and if there is something to do, compute a patch.

    finished: the ids of the patches that are there.

    Raises:
        ValueError: the data set is empty or lacks a column, or none of its first rows can have a
            patch.
    """
    seen: set[bytes] = set()
    sample: list[Row] = []
    reasons: list[str] = []
    rows = unreadable = todo = characters = 0
    for row in read_rows(dataset, extractor.columns):
        rows += 1
        if isinstance(row, Reject):
            unreadable += 1
            reasons += [] if reasons else [f"row {row.number}: {row.reason}"]
        elif (key := row.id(extractor.columns)) not in seen:
            seen.add(key)
            sample += [row] if len(sample) < _SAMPLE else []
            if key not in finished:
                todo, characters = todo + 1, characters + len(row.kept)
    kept_tokens, bytes_per_token = 0.0, 0
    if todo or not seen:

        def note(row: Row, reason: str) -> None:
            reasons.append(f"row {row.number}: {reason}")

        usable = extractor.encode(sample, note)
        measured = extractor.measure(usable, note)
        if measured is None:
            raise ValueError(
                "expected a data set with rows that can have a patch, got none:"
                f" {reasons[0] if reasons else 'it is empty'}"
            )
        bytes_per_token, tokens = measured, sum(row.lengths[0] for row in usable)
        kept_tokens = characters * tokens / sum(len(row.row.kept) for row in usable)
    folder = extractor.folder
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return Plan(
        folder=folder,
        rows=rows,
        finished=len(seen) - todo,
        duplicates=rows - unreadable - len(seen),
        unreadable=unreadable,
        todo=todo,
        kept_tokens=round(kept_tokens),
        bytes_per_token=bytes_per_token,
        free=shutil.disk_usage(parent).free,
    )
