"""The folder of a run: what all its patches share, and which patches are there.

    run.json                    the model, the update and the contents
    shards/{name}.safetensors   the factors of a batch
    index/{name}.parquet        a row for each of its patches

Every name begins with the run's key.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from icl_patch.atomic_file import remove_leftovers, write_atomically
from icl_patch.errors import PatchFormatError
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patcher import ContextPatcher

FORMAT = 1
SHARDS, INDEX, RUN = "shards", "index", "run.json"
# Of the index. Norms and statistics follow; their types depend on the model.
COLUMNS = (
    ("id", pa.string()),
    ("row", pa.int64()),
    ("context_sha256", pa.string()),
    ("kept_sha256", pa.string()),
    ("context_tokens", pa.int32()),
    ("kept_tokens", pa.int32()),
    ("file", pa.string()),
    ("offset", pa.int32()),
    ("misses", pa.int64()),
    ("replay_error", pa.float64()),
)


@dataclass(frozen=True)
class Contents:
    """The written parts of every patch.

    Attributes:
        layers: the blocks; all by default. Patches of some blocks only cannot be replayed.
        factors_dtype: None for the dtype in which the factors are computed, or torch.bfloat16,
            which takes half the bytes or less; the index then has the error of each replay. New
            scales of norms are not rounded.
        statistics: no factors at all, but norms, and norm and rank of the sum over a row's tokens.
        keep_first: as in :meth:`icl_patch.ContextPatcher.compute`.

    Raises:
        ValueError: another dtype, or a negative number.
    """

    layers: slice = field(default_factory=lambda: slice(None))
    factors_dtype: torch.dtype | None = None
    statistics: bool = False
    keep_first: int = 0

    def __post_init__(self) -> None:
        if self.keep_first < 0:
            raise ValueError(f"expected keep_first ≥ 0, got {self.keep_first}")
        if self.factors_dtype not in (None, torch.bfloat16):
            raise ValueError(f"expected factors_dtype torch.bfloat16, got {self.factors_dtype}")

    def rounded(self, patch: ContextPatch) -> ContextPatch:
        """A patch with factors in the dtype of the files."""
        if self.factors_dtype is None:
            return patch

        def narrowed(name: str, factor: Tensor) -> Tensor:
            # of a scale the change is smaller than its value
            kept = not factor.is_floating_point() or name.endswith((".scale", ".new_scale"))
            return factor if kept else factor.to(self.factors_dtype)

        layers = ({name: narrowed(name, x) for name, x in each.items()} for each in patch.layers)
        return replace(patch, layers=tuple(layers))


@dataclass(frozen=True)
class Run:
    """The properties that all patches of a folder share.

    Attributes: see :class:`icl_patch.patch.serialization.PatchInfo` and :class:`Contents`.
        ``model`` is a name or a path, which is not compared.
    """

    model: str
    fingerprint: str
    tokenizer: str | None
    update: str
    dtype: str
    layers: list[int]
    factors_dtype: str | None
    statistics: bool
    keep_first: int
    format: int = FORMAT

    @classmethod
    def of(cls, patcher: ContextPatcher, contents: Contents) -> "Run":
        """The run of a patcher; raises ValueError if no layers would be left."""
        attached = patcher.attached_model
        layers = list(range(len(attached.block_specs)))[contents.layers]
        if not layers or layers != sorted(layers):
            raise ValueError(
                f"expected layers among {len(attached.block_specs)}, in increasing order, got"
                f" {contents.layers}"
            )
        dtype = contents.factors_dtype
        return cls(
            model=patcher.model.config.name_or_path or "",
            fingerprint=patcher.fingerprint,
            tokenizer=attached.tokenizer_fingerprint,
            update=patcher.update,
            dtype=str(patcher.model.dtype),
            layers=layers,
            factors_dtype=None if dtype is None else str(dtype),
            statistics=contents.statistics,
            keep_first=contents.keep_first,
        )

    @property
    def compared(self) -> dict[str, Any]:
        """The entries in which two runs of one folder must agree."""
        return {name: value for name, value in asdict(self).items() if name != "model"}

    @property
    def key(self) -> str:
        """12 hexadecimal digits that begin the names of the run's files."""
        return hashlib.sha256(json.dumps(self.compared).encode()).hexdigest()[:12]

    def name_of(self, ids: Sequence[bytes]) -> str:
        """The name of a shard, without its suffix."""
        return f"{self.key}-{hashlib.sha256(b''.join(ids)).hexdigest()[:24]}"


def read_run(folder: Path) -> Run:
    """The run that a folder holds.

    Raises:
        ValueError: there is none, or its description is damaged.
    """
    path = folder / RUN
    if not path.is_file():
        raise ValueError(
            f"expected a folder of patches with a {RUN}, got {folder}: icl-patch extract --dataset"
            " makes one"
        )
    try:
        return Run(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"expected the description of a run in {path}, got {error}") from error


def check_folder(folder: Path, run: Run) -> None:
    """Raises ValueError unless all patches in a folder, if there are any, are of this run."""
    if (folder / RUN).exists():
        there = read_run(folder).compared
        differing = [name for name, value in run.compared.items() if there.get(name) != value]
        if differing:
            raise ValueError(
                f"expected patches of this run in {folder}, got those of another, with"
                f" {', '.join(f'{x} {there.get(x)!s:.40}' for x in differing)} in place of"
                f" {', '.join(f'{run.compared[x]!s:.40}' for x in differing)}: choose another"
                " folder"
            )
    for part in (SHARDS, INDEX):
        for name in _names(folder / part):
            if not name.startswith(f"{run.key}-"):
                raise ValueError(
                    f"expected only files of this run in {folder / part} ({run.key}-…), got {name},"
                    " which is of another run or model: move it away, or choose another folder"
                )


def open_run(folder: Path, run: Run) -> None:
    """Make the folder with the description of its run, unless it is there.

    If a shard was deleted, its part of the index is deleted too: the patches are computed again.
    """
    for part in (SHARDS, INDEX):
        (folder / part).mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder / part)
    for name in [] if run.statistics else _names(folder / INDEX):
        if not (folder / SHARDS / name).with_suffix(".safetensors").exists():
            (folder / INDEX / name).unlink(missing_ok=True)
    if not (folder / RUN).exists():
        write_atomically(folder / RUN, [json.dumps(asdict(run), indent=1).encode()])


def read_index(folder: Path, columns: list[str] | None = None) -> pa.Table:
    """The index of a folder, all columns or some.

    Raises:
        PatchFormatError: a part of it is damaged.
    """
    if not _names(folder / INDEX):
        empty = pa.schema(COLUMNS).empty_table()
        return empty if columns is None else empty.select(columns)
    try:
        # absolute: a name such as "s3:x" is a URI for pyarrow
        return pq.read_table((folder / INDEX).absolute(), columns=columns)
    except (pa.ArrowInvalid, OSError) as error:
        raise PatchFormatError(
            f"expected whole Parquet files in {folder / INDEX}, got {error}: delete the damaged"
            " file, and the same run computes its patches again"
        ) from error


def finished_rows(folder: Path) -> dict[bytes, int | None]:
    """The ids of the patches in a folder, 16 bytes each, which are in the index, with their
    factors; and their rows in the data set, None if unknown.
    """
    shards = {f"{SHARDS}/{name}" for name in _names(folder / SHARDS)} | {None}
    table = read_index(folder, ["id", "row", "file"])
    entries = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return {bytes.fromhex(id_): row for id_, row, file in entries if file in shards}


def drop_duplicates(folder: Path) -> None:
    """Let the index have every patch once, in the first part by name. Processes that run at the
    same time with other batches write some twice.
    """
    ids = read_index(folder, ["id"])["id"].to_pylist()
    seen: set[str] = set()
    for name in _names(folder / INDEX) if len(set(ids)) < len(ids) else []:
        path = folder / INDEX / name
        table = pq.read_table(path.absolute())
        new = [id_ not in seen for id_ in table["id"].to_pylist()]
        seen.update(table["id"].to_pylist())
        if not all(new):
            write_part(path, table.filter(pa.array(new)))  # if empty, others may be reading it
        if not any(new):
            (folder / SHARDS / name).with_suffix(".safetensors").unlink(missing_ok=True)


def write_part(path: Path, table: pa.Table) -> None:
    """Write a part of the index."""
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    write_atomically(path, [memoryview(buffer.getvalue())])


def _names(folder: Path) -> list[str]:
    """The files of a folder but those that are being written."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
