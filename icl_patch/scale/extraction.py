"""A patch for every row of a data set, shard by shard."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from icl_patch.patch.atomic_file import write_atomically
from icl_patch.patcher import ContextPatcher
from icl_patch.scale.contents import Contents
from icl_patch.scale.extractor import Batching, Extractor
from icl_patch.scale.plan import Plan, make_plan
from icl_patch.scale.ranks import Share
from icl_patch.scale.rows import Columns, Reject, Row, read_rows
from icl_patch.scale.run import finished_ids, open_run

_GROUP = 8  # batches' rows, which one process tokenizes and cuts into batches
# Rows that are sorted by length: their texts are in memory.
_WINDOW_ROWS = 4096
_WINDOW_CHARACTERS = 2**25


@dataclass(frozen=True)
class Summary:
    """What one process did.

    Attributes:
        plan: what was there before. share: the part of this process.
        patches: written. rejected: rows without a patch. rejects: the file with their reasons.
        largest_replay_error: of the rounded factors, None without.
    """

    plan: Plan
    share: Share
    patches: int
    rejected: int
    rejects: Path | None
    largest_replay_error: float | None


def extract_dataset(
    patcher: ContextPatcher,
    dataset: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    columns: Columns | None = None,
    *,
    contents: Contents | None = None,
    batching: Batching | None = None,
    share: Share | None = None,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Compute and write a patch for every row of a data set.

    The rows are read as a stream: in memory are the ids of all rows, the texts of at most 4096, and
    the patches of one batch, whose rows have similar lengths. A stopped run goes on where it was: a
    patch in the index is there, whole, and is not computed again. Rows that cannot have a patch go
    to a file of rejects with the reason.

    Args:
        patcher: with a tokenizer.
        dataset: a file or folder, see :func:`icl_patch.scale.rows.read_rows`.
        folder: is made; patches that are there must be of the same model, update and contents.
        columns: of the context and the kept text; ``Columns()`` by default.
        contents: which layers, in which dtype, or statistics alone.
        batching: how many rows run at once.
        share: the part of this process; by default as torchrun or SLURM say.
        on_plan: is called with what will be done, before anything is written.
        progress: is called with the number of rows passed, and of all.

    Raises:
        ValueError: the patcher has no tokenizer; the data set is missing, empty, lacks a column, or
            has no row that can have a patch; or the folder has files of another run.
        PatchFormatError: a part of the folder's index is damaged.
        FingerprintMismatch: the model's weights have changed during the run.
        OSError: a file cannot be read or written; those that were written are whole.
    """
    dataset, folder = Path(dataset), Path(folder)
    columns, contents = columns or Columns(), contents or Contents()
    batching, share = batching or Batching(), share or Share.from_environment()
    extractor = Extractor(patcher, folder, columns, contents, batching)
    finished = finished_ids(folder)
    plan = make_plan(extractor, dataset, finished)
    on_plan(plan)
    open_run(folder, extractor.run)
    rejects = _Rejects(folder, share)
    patches, passed, largest = 0, 0, 0.0
    for number, group in enumerate(_groups(dataset, columns, _GROUP * batching.rows, rejects)):
        if share.takes(number):
            todo = [row for row in group if row.id(columns) not in finished]
            for table in extractor.extract(todo, rejects.add):
                patches += len(table)
                largest = max(largest, *table["replay_error"].fill_null(0).to_pylist())
        passed += len(group)
        progress(passed, plan.distinct)
    rounded = patches > 0 and contents.factors_dtype is not None
    error = largest if rounded else None
    return Summary(plan, share, patches, rejects.count, rejects.save(), error)


class _Rejects:
    """The rows without a patch, as JSON lines.

    Every run meets them again, so the file is written at its end, in place of an earlier run's.
    """

    def __init__(self, folder: Path, share: Share) -> None:
        self._folder, self.share, self.count = folder, share, 0
        self._lines = TemporaryFile(dir=folder)  # noqa: SIM115 (it has no name and leaves nothing)

    def add(self, row: Row | Reject, reason: str) -> None:
        """Take one row with its reason."""
        self.count += 1
        record = {"row": row.number, "reason": reason}
        self._lines.write(json.dumps(record).encode() + b"\n")

    def save(self) -> Path | None:
        """Write the file and return its path, None if there are no rejects; a run of one number of
        processes removes the files of another.
        """
        of_world = f"of-{self.share.world_size:05d}.jsonl"
        path = self._folder / f"rejects-{self.share.rank:05d}-{of_world}"
        if self.share.rank == 0:
            for old in self._folder.glob("rejects-*.jsonl"):
                if not old.name.endswith(of_world):
                    old.unlink()
        if not self.count:
            path.unlink(missing_ok=True)
            return None
        self._lines.seek(0)
        write_atomically(path, self._lines)
        self._lines.close()
        return path


def _groups(dataset: Path, columns: Columns, size: int, rejects: _Rejects) -> Iterator[list[Row]]:
    """Rows of similar lengths, ``size`` at a time: every row with new texts is in one group.

    The groups do not depend on which patches are there, so that a continued run has the batches of
    one that was not stopped.
    """
    for window in _windows(_distinct(dataset, columns, rejects)):
        window.sort(key=lambda row: (len(row.kept), len(row.context)))
        for start in range(0, len(window), size):
            yield window[start : start + size]


def _windows(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows, as many at a time as may be in memory."""
    window: list[Row] = []
    characters = 0
    for row in rows:
        window.append(row)
        characters += len(row.kept) + len(row.context)
        if len(window) == _WINDOW_ROWS or characters >= _WINDOW_CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window


def _distinct(dataset: Path, columns: Columns, rejects: _Rejects) -> Iterator[Row]:
    """The rows that can be read, without duplicates; each process rejects a part of the others."""
    seen: set[bytes] = set()
    for number, row in enumerate(read_rows(dataset, columns)):
        if isinstance(row, Reject):
            if rejects.share.takes(number):
                rejects.add(row, row.reason)
        elif (key := row.id(columns)) not in seen:
            seen.add(key)
            yield row
