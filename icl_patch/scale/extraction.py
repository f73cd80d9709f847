"""A patch for every row of a data set, shard by shard."""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from icl_patch.atomic_file import write_atomically
from icl_patch.patcher import ContextPatcher
from icl_patch.scale.extractor import Batching, Extractor
from icl_patch.scale.rows import Columns, Reject, Row, read_rows
from icl_patch.scale.run import Contents, drop_duplicates, finished_rows, open_run

_GROUP = 8  # batches whose rows a process tokenizes together
_WINDOW = 1024  # rows that are sorted by length: their texts are in memory
_SAMPLE = 256  # the first rows: one must be right, and their tokens are counted
_VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))


@dataclass(frozen=True)
class Share:
    """Every ``world_size``-th shard, from number ``rank`` on."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"expected 0 ≤ rank < world_size, got rank {self.rank} and world_size"
                f" {self.world_size}"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Share":
        """From RANK and WORLD_SIZE, else SLURM_PROCID and SLURM_NTASKS, else everything.

        Raises:
            ValueError: they are no such numbers, or one of two is missing.
        """
        for names in _VARIABLES:
            if names[0] not in environment:  # salloc sets SLURM_NTASKS alone
                continue
            values = [environment.get(name, "nothing") for name in names]
            if not all(map(str.isdecimal, values)):
                got = " and ".join(values)
                raise ValueError(f"expected numbers in {' and '.join(names)}, got {got}")
            return cls(*map(int, values))
        return cls()

    def takes(self, number: int) -> bool:
        """Whether the shard with this number belongs to this process."""
        return number % self.world_size == self.rank


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        folder: the folder. rows: of the data set. finished: patches that exist.
        duplicates: rows with the texts of an earlier row; they share its patch. unreadable: rows
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


@dataclass(frozen=True)
class Summary:
    """The results of one process.

    Attributes:
        plan: made before the run. share: the part of this process.
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

    The rows are read as a stream. In memory are the ids of all rows, the reasons of rows without a
    patch, the texts of at most 1024 rows, and the patches of one batch. The rows of a batch have
    similar lengths. A stopped run goes on where it was: a patch in the index is whole, and is not
    computed again. Rows that cannot have a patch go to a file of rejects with the reason.

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
        ValueError: the patcher has no tokenizer or a slow one; the data set is missing, empty,
            lacks a column, or has no row that can have a patch; or the folder has files of another
            run, or patches of other rows.
        PatchFormatError: a part of the folder's index is damaged.
        FingerprintMismatch: the model's weights have changed during the run.
        OSError: a file cannot be read or written; those that were written are whole.
    """
    dataset, folder = Path(dataset), Path(folder)
    columns, contents = columns or Columns(), contents or Contents()
    batching, share = batching or Batching(), share or Share.from_environment()
    extractor = Extractor(patcher, folder, columns, contents, batching)
    finished = finished_rows(folder)
    plan = make_plan(extractor, dataset, finished)
    on_plan(plan)
    open_run(folder, extractor.run)
    rejected: list[Reject] = []
    patches, passed, largest = 0, 0, 0.0
    rows = _distinct(dataset, columns, share, rejected)
    for number, group in enumerate(_groups(rows, _GROUP * batching.rows)):
        if share.takes(number):
            todo = [row for row in group if row.id(columns) not in finished]
            for table in extractor.extract(todo, rejected):
                patches += len(table)
                largest = max(largest, *table["replay_error"].fill_null(0).to_pylist())
        passed += len(group)
        progress(passed, plan.distinct)
    drop_duplicates(folder)
    rounded = patches > 0 and contents.factors_dtype is not None
    error = largest if rounded else None
    rejects = _save_rejected(folder, share, rejected)
    return Summary(plan, share, patches, len(rejected), rejects, error)


def _save_rejected(folder: Path, share: Share, rejected: list[Reject]) -> Path | None:
    """Write the rows without a patch as JSON lines and return the file, None if there are none.

    Every run meets them again, so the file takes the place of an earlier run's; a run of one number
    of processes removes the files of another.
    """
    of_world = f"of-{share.world_size:05d}.jsonl"
    path = folder / f"rejects-{share.rank:05d}-{of_world}"
    if share.rank == 0:
        for old in folder.glob("rejects-*.jsonl"):
            if not old.name.endswith(of_world):
                old.unlink()
    if not rejected:
        path.unlink(missing_ok=True)
        return None
    lines = (json.dumps({"row": x.number, "reason": x.reason}) + "\n" for x in rejected)
    write_atomically(path, map(str.encode, lines))
    return path


def _groups(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    """Rows of similar lengths, ``size`` at a time.

    The groups do not depend on which patches are there, so that a continued run has the batches of
    one that was not stopped.
    """
    while window := list(itertools.islice(rows, _WINDOW)):
        window.sort(key=lambda row: (len(row.kept), len(row.context)))
        for start in range(0, len(window), size):
            yield window[start : start + size]


def _distinct(
    dataset: Path, columns: Columns, share: Share, rejected: list[Reject]
) -> Iterator[Row]:
    """The rows that can be read, without duplicates; each process rejects a part of the others."""
    seen: set[bytes] = set()
    for number, row in enumerate(read_rows(dataset, columns)):
        if isinstance(row, Reject):
            if share.takes(number):
                rejected.append(row)
        elif (key := row.id(columns)) not in seen:
            seen.add(key)
            yield row


def make_plan(extractor: Extractor, dataset: Path, finished: Mapping[bytes, int | None]) -> Plan:
    """Read the whole data set once, and if there is something to do, compute a patch.

    finished: the ids of the patches that are there, and their rows.

    Raises:
        ValueError: the data set is empty or lacks a column, none of its first rows can have a
            patch, or it has other rows where the patches say that theirs are.
    """
    seen: set[bytes] = set()
    sample: list[Row] = []
    rejected: list[Reject] = []
    rows = todo = characters = 0
    there = {number: key for key, number in finished.items()}
    for row in read_rows(dataset, extractor.columns):
        key = None if isinstance(row, Reject) else row.id(extractor.columns)
        if there.get(rows, key) != key:
            raise ValueError(
                f"expected a data set whose rows are those of the patches in {extractor.folder},"
                f" with new ones behind them, read in the same way, got another row {rows} in"
                f" {dataset}: add rows at the end, name the same columns and the same kind of"
                " prompt, or choose another folder"
            )
        rows += 1
        if isinstance(row, Reject):
            rejected.append(row)
        elif key is not None and key not in seen:
            seen.add(key)
            sample += [row] if len(sample) < _SAMPLE else []
            if key not in finished:
                todo, characters = todo + 1, characters + len(row.kept)
    unreadable = len(rejected)
    kept_tokens, bytes_per_token = 0.0, 0
    if todo or not seen:
        usable = extractor.encode(sample, rejected)
        measured = extractor.measure(usable, rejected)
        if measured is None:
            reasons = [f"row {row.number}: {row.reason}" for row in rejected[:1]]
            raise ValueError(
                "expected a data set with rows that can have a patch, got none:"
                f" {(*reasons, 'it is empty')[0]}"
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
