"""The rows of a data set, one at a time: from JSON lines, Parquet, or a folder of ``datasets``."""

import hashlib
import json
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.models.language_model import check_length, check_vocabulary
from icl_patch.models.prompts import make_prompt, split_ids
from icl_patch.texts import check_text, read_lines, read_text

_READ_AT_ONCE = 1024  # rows of a Parquet file


@dataclass(frozen=True)
class Columns:
    """The columns of a data set, and the prompts that they make, see
    :func:`icl_patch.models.prompts.make_prompt`.

    Attributes:
        context, kept: the names of the columns with the context, and with the text after it.
        chat: whether the prompt is a chat, in which the context begins the user's message.
        system: whether the context is the system message of a chat.
        task: the name of the column with the row's task, text or a number; None without.
    """

    context: str = "context"
    kept: str = "kept"
    chat: bool = False
    system: bool = False
    task: str | None = None

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names):
            names = ", ".join(map(repr, self.names))
            raise ValueError(f"expected a column of its own for each part of a row, got {names}")

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [name for name in (self.context, self.kept, self.task) if name is not None]

    @property
    def prompt(self) -> str:
        """The kind of prompt: "text", "chat" or "system"."""
        return "system" if self.system else "chat" if self.chat else "text"


@dataclass(frozen=True)
class Row:
    """A row that can be read; ``number`` is its place in the data set, from 0, if it is known."""

    number: int | None
    context: str
    kept: str
    task: str | None = None

    def id(self, columns: Columns) -> bytes:
        """16 bytes of SHA-256 over the texts and the kind of prompt."""
        content = json.dumps([columns.prompt, self.context, self.kept])
        return hashlib.sha256(content.encode()).digest()[:16]

    def rejected(self, error: Exception, columns: Columns) -> "Reject":
        """This row without its texts, and why it has no patch."""
        return Reject(self.number, str(error), self.id(columns))


@dataclass(frozen=True)
class Reject:
    """A row that cannot be read, or that has no patch, with the reason; ``id`` of its texts, if
    they can be read.
    """

    number: int | None
    reason: str
    id: bytes | None = None


@dataclass(frozen=True)
class EncodedRow:
    """A row as token ids, (1, C) and (1, T) int64."""

    row: Row
    context_ids: Tensor
    kept_ids: Tensor

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of kept tokens, and of context tokens."""
        return self.kept_ids.shape[1], self.context_ids.shape[1]


def read_rows(dataset: Path, columns: Columns) -> Iterator[Row | Reject]:
    """The rows of a file or folder, in order; nothing else of it is kept in memory.

    Args:
        dataset: a file of JSON lines (``.jsonl``, ``.ndjson``, ``.json``) or Parquet; a folder that
            ``Dataset.save_to_disk`` wrote; or a folder of such files, which are read in the order
            of their names. Blank lines are no rows.

    Raises:
        ValueError: there are no such files, or they are damaged, or lack a column.
        OSError: a file cannot be read.
    """
    number = 0
    for file in _files(dataset):
        for record in _READERS[file.suffix](file, columns):
            yield read_record(number, record, columns)
            number += 1


def encode_row(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: Row, columns: Columns
) -> EncodedRow:
    """The tokens of a row; raises ValueError if the model cannot take them."""
    context, system = (None, row.context) if columns.system else (row.context, None)
    prompt = make_prompt(tokenizer, row.kept, context=context, system=system, chat=columns.chat)
    encoded = EncodedRow(row, *split_ids(tokenizer, prompt))
    check_length(model, sum(encoded.lengths))
    for ids in (encoded.context_ids, encoded.kept_ids):
        check_vocabulary(model, ids, torch.ones_like(ids, dtype=torch.bool))
    return encoded


def read_record(number: int | None, record: Any, columns: Columns) -> Row | Reject:
    """The row of a record: a dictionary, or anything else that stood in its place."""
    if isinstance(record, Exception):
        return Reject(number, str(record))
    if not isinstance(record, dict):
        return Reject(number, f"expected a JSON object on one line, got {record!r:.80}")
    texts = []
    for name in columns.names:
        if name not in record:
            names = ", ".join(map(repr, record)) or "none"
            return Reject(number, f"expected a column {name!r}, got {names:.200}")
        text = record[name]
        if name == columns.task and isinstance(text, int):
            text = str(text)
        if not isinstance(text, str) or not text:
            return Reject(number, f"expected text in column {name!r}, got {text!r:.80}")
        try:
            check_text(text)
        except ValueError as error:
            return Reject(number, f"in column {name!r}: {error}")
        texts.append(text)
    return Row(number, *texts)


def _files(dataset: Path) -> list[Path]:
    if not dataset.exists():
        raise ValueError(f"expected a data set, got {dataset}, which does not exist")
    files = _files_of_folder(dataset) if dataset.is_dir() else [dataset]
    for file in files:
        if file.suffix not in _READERS:
            known = ", ".join(_READERS)
            raise ValueError(f"expected a data set, a file ending in one of {known}, got {file}")
    return files


def _files_of_folder(folder: Path) -> list[Path]:
    try:
        if (splits := folder / "dataset_dict.json").is_file():
            names = json.loads(read_text(splits))["splits"]
            raise ValueError(
                f"expected one split of {folder}, got all of them ({', '.join(names)}): name its"
                f" folder, such as {folder / names[0]}"
            )
        if (state := folder / "state.json").is_file():
            data_files = json.loads(read_text(state))["_data_files"]
            return [folder / entry["filename"] for entry in data_files]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected a folder as Dataset.save_to_disk writes it, got {folder}: {error!r}"
        ) from error
    files = sorted(file for file in folder.iterdir() if file.suffix in _READERS)
    if not files:
        known = ", ".join(_READERS)
        raise ValueError(f"expected files ending in one of {known} in {folder}, found none")
    return files


def _json_lines(file: Path, columns: Columns) -> Iterator[Any]:
    """A value a line, or the error of one that is not JSON."""
    for line in read_lines(file):
        if isinstance(line, ValueError):
            yield line
        elif line.strip(string.whitespace):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                yield ValueError(f"expected a JSON object on one line: {error}")


def _columnar(file: Path, columns: Columns) -> Iterator[Any]:
    """The rows of Parquet, or of Arrow's stream format, which ``datasets`` writes. In place of a
    row that is not UTF-8 there is its error.
    """
    parquet = file.suffix == ".parquet"
    try:
        if parquet:
            opened = pq.ParquetFile(file.absolute())  # "s3:x" is a URI for pyarrow
            _check_columns(file, opened.schema_arrow.names, columns)
            batches = opened.iter_batches(_READ_AT_ONCE, columns=columns.names)
        else:
            batches = pa.ipc.open_stream(pa.memory_map(str(file)))
            _check_columns(file, batches.schema.names, columns)
        for batch in batches:
            yield from _records(batch.select(columns.names))
    except (pa.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None):  # the file cannot be read
            raise
        kind = "Parquet" if parquet else "Arrow's stream format"
        raise ValueError(f"expected a whole file of {kind}, got {file}: {error}") from error


def _records(batch: pa.RecordBatch) -> list[Any]:
    """The rows of a batch. In place of a row that is not UTF-8 there is its error."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) > 1:
            return [record for n in range(len(batch)) for record in _records(batch.slice(n, 1))]
        byte = f"0x{error.object[error.start]:02x}"
        return [ValueError(f"expected UTF-8 text, got byte {byte} at {error.start} of a column")]


def _check_columns(file: Path, names: list[str], columns: Columns) -> None:
    """Raises ValueError if one is missing."""
    for name in columns.names:
        if name not in names:
            raise ValueError(
                f"expected a column {name!r} in {file}, got {', '.join(names)}: name it with"
                " --context-column and --kept-column (Columns in Python)"
            )


_READERS: dict[str, Callable[[Path, Columns], Iterator[Any]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_lines,
    ".parquet": _columnar,
    ".arrow": _columnar,
}
