"""Patches for the batches of a table, for engines that map a class over them, as Ray Data does."""

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.patcher import ContextPatcher
from icl_patch.scale.extractor import Batching, Extractor
from icl_patch.scale.rows import Columns, Reject, Row, read_record
from icl_patch.scale.run import Contents, finished_rows, open_run


class BatchExtractor:
    """Writes a patch for every row of a batch, for ``map_batches`` of Ray Data::

        rows = ray.data.read_parquet("prompts.parquet").repartition(target_num_rows_per_block=1024)
        done = rows.map_batches(
            BatchExtractor,
            fn_constructor_args=(load_model, "patches"),
            batch_format="pyarrow",
            batch_size=128,
            num_cpus=0.5,
            compute=ray.data.ActorPoolStrategy(size=2),
        )

    The folder is the run's checkpoint: patches that were there when the actor began are not
    computed again. An actor knows neither the places of its rows in the data set, which the index
    lacks, nor the rows of other actors: of equal rows each may compute a patch.

    Args:
        load: returns a model and its tokenizer; is called once.
        folder: on storage that all actors share.
        update: see :class:`icl_patch.ContextPatcher`.
        columns, contents, batching: see :func:`icl_patch.scale.extract_dataset`; batches are cut
            from the rows of one call.

    Raises:
        ValueError, PatchFormatError: as :func:`icl_patch.scale.extract_dataset`.
    """

    def __init__(
        self,
        load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]],
        folder: str | os.PathLike[str],
        update: str = "exact",
        columns: Columns | None = None,
        contents: Contents | None = None,
        batching: Batching | None = None,
    ) -> None:
        model, tokenizer = load()
        self._extractor = Extractor(
            ContextPatcher(model, update, tokenizer=tokenizer),
            Path(folder),
            columns or Columns(),
            contents or Contents(),
            batching or Batching(),
        )
        open_run(Path(folder), self._extractor.run)
        self._finished = finished_rows(Path(folder))

    def __call__(self, table: pa.Table) -> pa.Table:
        """Write the patches of a batch.

        Args:
            table: with the columns of contexts and kept texts.

        Returns:
            A row for each: ``id``, None if the row cannot be read, and ``reason``, None if the
            patch is there.

        Raises:
            FingerprintMismatch, OSError: as :func:`icl_patch.scale.extract_dataset`.
        """
        columns, finished = self._extractor.columns, self._finished
        rows = [read_record(None, record, columns) for record in table.to_pylist()]
        readable = {row.id(columns): row for row in rows if isinstance(row, Row)}
        todo = [row for key, row in readable.items() if key not in finished]
        rejected: list[Reject] = []
        for index in self._extractor.extract(todo, rejected):
            finished |= dict.fromkeys(map(bytes.fromhex, index["id"].to_pylist()))
        reasons = {row.id: row.reason for row in rejected}
        results = [
            {"id": None, "reason": row.reason}
            if isinstance(row, Reject)
            else {"id": row.id(columns).hex(), "reason": reasons.get(row.id(columns))}
            for row in rows
        ]
        schema = pa.schema([("id", pa.string()), ("reason", pa.string())])
        return pa.Table.from_pylist(results, schema)
