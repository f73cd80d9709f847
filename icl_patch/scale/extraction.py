"""A patch for every row of a data set, shard by shard."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import pyarrow as pa

from icl_patch.errors import ControllabilityError, PatchFormatError
from icl_patch.models.positions import switch_lengths
from icl_patch.patch.atomic_file import write_atomically
from icl_patch.patcher import ContextPatcher
from icl_patch.scale.contents import Contents
from icl_patch.scale.plan import Plan, make_plan
from icl_patch.scale.ranks import Share
from icl_patch.scale.rows import Columns, EncodedRow, Reject, Row, encode_row, read_rows
from icl_patch.scale.run import Run, check_folder, finished_ids, open_run
from icl_patch.scale.shard import extract_shard

_GROUP = 8  # batches' rows, which one process tokenizes and cuts into batches
_PADDING = 1 / 8  # of a batch's kept tokens at most: it would be written too
# Rows that are sorted by length: their texts are in memory.
_WINDOW_ROWS = 4096
_WINDOW_CHARACTERS = 2**25


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
            raise ValueError(f"expected numbers ≥ 1, got {self}")


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
    if patcher.tokenizer is None:
        raise ValueError("expected ContextPatcher(model, tokenizer=...) for texts, got none")
    run = Run.of(patcher, contents)
    check_folder(folder, run)
    finished = finished_ids(folder)
    plan = make_plan(patcher, dataset, folder, columns, contents, finished)
    on_plan(plan)
    open_run(folder, run)
    rejects = _Rejects(folder, share)
    patches, passed, largest = 0, 0, 0.0
    for number, group in enumerate(_groups(dataset, columns, _GROUP * batching.rows, rejects)):
        if share.takes(number):
            todo = [row for row in group if row.id(columns) not in finished]
            encoded = rejects.sifted(encode_row(patcher, row, columns) for row in todo)
            for batch in _batches(patcher, list(encoded), batching, plan.memory_per_token):
                for table in _shards(patcher, batch, columns, contents, run, folder, rejects):
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

    def add(self, reject: Reject) -> None:
        """Take one row."""
        self.count += 1
        record = {"row": reject.number, "reason": reject.reason}
        self._lines.write(json.dumps(record).encode() + b"\n")

    def sifted(self, rows: Iterable[EncodedRow | Reject]) -> Iterator[EncodedRow]:
        """The other rows."""
        for row in rows:
            if isinstance(row, Reject):
                self.add(row)
            else:
                yield row

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
    for row in read_rows(dataset, columns):
        if isinstance(row, Reject):
            if rejects.share.takes(row.number):
                rejects.add(row)
        elif (key := row.id(columns)) not in seen:
            seen.add(key)
            yield row


def _batches(
    patcher: ContextPatcher, rows: list[EncodedRow], batching: Batching, memory_per_token: int
) -> Iterator[list[EncodedRow]]:
    """Rows that run at once, the shortest first."""
    attached = patcher.attached_model
    switches = switch_lengths(patcher.model)

    def kind(row: EncodedRow) -> tuple[int, int]:
        """Only rows of one kind have the logits in a batch that they have alone."""
        kept, context = row.lengths
        rotation = sum(kept + context > length for length in switches)
        return rotation, 0 if attached.takes_padding else context

    def fits(batch: list[EncodedRow]) -> bool:
        kept, context = (max(lengths) for lengths in zip(*(x.lengths for x in batch), strict=True))
        return (
            len(batch) <= (batching.rows if attached.divisible else 1)
            and len(batch) * (kept + context) <= batching.tokens
            and len(batch) * kept * memory_per_token <= batching.nbytes
            and len(batch) * kept * (1 - _PADDING) <= sum(row.lengths[0] for row in batch)
            and len(set(map(kind, batch))) == 1
        )

    batch: list[EncodedRow] = []
    for row in sorted(rows, key=lambda row: (kind(row), row.lengths)):
        if batch and not fits([*batch, row]):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _shards(
    patcher: ContextPatcher,
    batch: Sequence[EncodedRow],
    columns: Columns,
    contents: Contents,
    run: Run,
    folder: Path,
    rejects: _Rejects,
) -> Iterator[pa.Table]:
    """The index of a batch's shard; if some row cannot have a patch, of a shard for each of the
    others.
    """
    try:
        yield extract_shard(patcher, batch, columns, contents, run, folder)
    except (ControllabilityError, PatchFormatError) as error:
        if len(batch) == 1:
            rejects.add(Reject(batch[0].row.number, str(error)))
            return
        for row in batch:
            yield from _shards(patcher, [row], columns, contents, run, folder, rejects)
