"""The patches of a data set, read back."""

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from icl_patch.errors import FingerprintMismatch
from icl_patch.patch.context_patch import ContextPatch
from icl_patch.scale.run import check_folder, read_index, read_run


class PatchDataset:
    """The patches that :func:`icl_patch.scale.extract_dataset` wrote into a folder, in the order of
    their rows.

    Args:
        folder: with the patches that are there now; later ones need a new object.

    Attributes:
        index: the Parquet index, a row a patch. run: what all patches share.

    Raises:
        ValueError: it is no such folder, or has files of another run.
        PatchFormatError: a part of the index is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.run = read_run(self.folder)
        check_folder(self.folder, self.run)
        self.index: pa.Table = read_index(self.folder).sort_by("row")
        self._places = {id_: place for place, id_ in enumerate(self.index["id"].to_pylist())}

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, key: int | str) -> ContextPatch:
        """One patch, by its place or its id: a row without padding. Its whole shard is read.

        It is replayed right up to rounding, also if it is exact, unless its shard has no other row;
        see :meth:`icl_patch.ContextPatch.select`. The shards of :meth:`batches` are bit-identical.

        Raises:
            KeyError, IndexError: there is no such patch.
            TypeError: the key is neither a place nor an id.
            ValueError: the data set has statistics without factors.
            PatchFormatError, FingerprintMismatch: the file is damaged, or of another run.
            OSError: the file cannot be read.
        """
        if not isinstance(key, str) and not hasattr(key, "__index__"):
            raise TypeError(
                f"expected the place of one patch, or its id, got {key!r:.40}; batches() returns"
                " several at once"
            )
        place = self._places[key] if isinstance(key, str) else range(len(self))[key]
        [row] = self.index.slice(place, 1).select(["file", "offset", "kept_tokens"]).to_pylist()
        patch = self._load(row["file"])
        rows = slice(row["offset"], row["offset"] + 1)
        return patch.select(rows=rows, tokens=slice(row["kept_tokens"]))

    def batches(self) -> Iterator[tuple[pa.Table, ContextPatch]]:
        """Every shard: its rows of the index, and their patch. If another shard has some of its
        rows, the others come one by one. Raises as :meth:`__getitem__`.
        """
        for file in dict.fromkeys(self.index["file"].to_pylist()):
            table = self.index.filter(pc.field("file") == file).sort_by("offset")
            patch = self._load(file)
            if len(table) == len(patch.kept_ids):
                yield table, patch
                continue
            for place, row in enumerate(table["offset"].to_pylist()):
                yield table.slice(place, 1), patch.select(rows=slice(row, row + 1))

    def _load(self, file: str | None) -> ContextPatch:
        if file is None:
            raise ValueError(
                f"expected patches with factors, {self.folder} has statistics without any: extract"
                " them again without --statistics, in Python with Contents(statistics=False)"
            )
        patch = ContextPatch.load(self.folder / file)
        got = (patch.info.fingerprint, patch.info.update, list(patch.layer_indices))
        if got != (self.run.fingerprint, self.run.update, self.run.layers):
            raise FingerprintMismatch(
                f"expected a patch of the run in {self.folder}, got one of another model, update or"
                f" layers in {file}: delete it, and the same run computes it again"
            )
        return patch
