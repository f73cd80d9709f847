"""Rows become shards of a folder: encoded, cut into batches, computed and written."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from icl_patch.errors import ControllabilityError, PatchFormatError
from icl_patch.models.positions import switch_lengths
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.patcher import ContextPatcher
from icl_patch.scale.contents import Contents
from icl_patch.scale.rows import Columns, EncodedRow, Row, encode_row
from icl_patch.scale.run import Run, check_folder
from icl_patch.scale.shard import compute_batch, extract_shard

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
            raise ValueError(f"expected numbers ≥ 1, got {self}")


Rejecting = Callable[[Row, str], None]
"""Takes a row that cannot have a patch, and the reason."""


class Extractor:
    """Writes the patches of rows into a folder.

    Args: see :func:`icl_patch.scale.extract_dataset`.

    Raises:
        ValueError: the patcher has no tokenizer, no layers would be left, or the folder has files
            of another run.
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
            raise ValueError("expected ContextPatcher(model, tokenizer=...) for texts, got none")
        self.patcher, self.folder = patcher, folder
        self.columns, self.contents, self.batching = columns, contents, batching
        self.run = Run.of(patcher, contents)
        check_folder(folder, self.run)
        self._memory_per_token: int | None = None

    def encode(self, rows: Iterable[Row], reject: Rejecting) -> list[EncodedRow]:
        """The rows that the model can take."""
        model, tokenizer = self.patcher.model, self.patcher.tokenizer
        assert tokenizer is not None
        encoded = []
        for row in rows:
            try:
                encoded.append(encode_row(model, tokenizer, row, self.columns))
            except ValueError as error:
                reject(row, str(error))
        return encoded

    def measure(self, rows: Sequence[EncodedRow], reject: Rejecting) -> int | None:
        """Compute the patch of a short row, after which batches keep to ``Batching.nbytes``.

        Returns:
            The bytes of a kept token's factors in the files; None if no row has a patch.
        """
        for row in sorted(rows, key=lambda row: sum(row.lengths))[:_TRIED]:
            try:
                patch = compute_batch(self.patcher, [row])
            except ControllabilityError as error:
                reject(row.row, str(error))
                continue
            assert patch.logits is not None
            self._memory_per_token = _bytes_per_token(patch) + patch.logits[0, 0].nbytes
            if self.contents.statistics:
                return 0
            stored = self.contents.rounded(patch).select(layers=self.contents.layers)
            return _bytes_per_token(stored)
        return None

    def extract(self, rows: Iterable[Row], reject: Rejecting) -> Iterator[pa.Table]:
        """Write the patches of rows that have none yet; yields the index of each shard."""
        encoded = self.encode(rows, reject)
        if self._memory_per_token is None:
            self.measure(encoded, lambda row, reason: None)
        for batch in self._batches(encoded):
            yield from self._shards(batch, reject)

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

    @cached_property
    def _switches(self) -> frozenset[int]:
        return switch_lengths(self.patcher.model)

    def _fits(self, batch: list[EncodedRow]) -> bool:
        kept, context = (max(lengths) for lengths in zip(*(x.lengths for x in batch), strict=True))
        most = self.batching
        return (
            len(batch) <= (most.rows if self.patcher.attached_model.divisible else 1)
            and len(batch) * (kept + context) <= most.tokens
            and len(batch) * kept * (self._memory_per_token or 0) <= most.nbytes
            and len(batch) * kept * (1 - _PADDING) <= sum(row.lengths[0] for row in batch)
            and len(set(map(self._kind, batch))) == 1
        )

    def _shards(self, batch: Sequence[EncodedRow], reject: Rejecting) -> Iterator[pa.Table]:
        """The index of a batch's shard; if some row cannot have a patch, of a shard for each of the
        others.
        """
        try:
            yield extract_shard(
                self.patcher, batch, self.columns, self.contents, self.run, self.folder
            )
        except (ControllabilityError, PatchFormatError) as error:
            if len(batch) == 1:
                reject(batch[0].row, str(error))
                return
            for row in batch:
                yield from self._shards([row], reject)


def _bytes_per_token(patch: ContextPatch) -> int:
    """Of factors of one kept token; the scales that all tokens share are left out."""
    return sum(x[0, 0].nbytes for layer in patch.layers for x in layer.values() if x.dim() > 1)
