"""The finished blocks of a fit as files, from which a stopped fit continues."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from icl_patch.errors import PatchFormatError
from icl_patch.patch.atomic_file import write_atomically
from icl_patch.patch.serialization import file_parts, read_file
from icl_patch.static.examples import Row
from icl_patch.static.ridge import LowRank

_KIND = "static_fit"


@dataclass(frozen=True)
class RidgeOptions:
    """parts: in the order of a block; rank: of each change, None for no limit; folds: 1 fits
    without a held-out fold and takes the first of ``lambdas``; preserve_first: by which κ is
    multiplied in the first block and divided in the last.
    """

    parts: tuple[str, ...]
    rank: int | None
    folds: int
    lambdas: tuple[float, ...]
    preserve_first: float


@dataclass(eq=False)
class BlockFit:
    """The result of the fit of one block.

    Attributes:
        changes: path in the block -> the change fitted on all rows.
        by_fold: the same, fitted without the rows of each fold.
        ridges: part -> λ; explained: part -> share of the target's squares explained out of fold.
        residual: ``‖out_ctx − out‖ / ‖out_ctx‖`` at the answers' tokens, out of fold.
    """

    changes: dict[str, LowRank] = field(default_factory=dict)
    by_fold: list[dict[str, LowRank]] = field(default_factory=list)
    ridges: dict[str, float] = field(default_factory=dict)
    explained: dict[str, float] = field(default_factory=dict)
    residual: float = 0.0

    def to(self, device: torch.device) -> "BlockFit":
        """The same with all changes on a device."""

        def moved(changes: dict[str, LowRank]) -> dict[str, LowRank]:
            return {path: change.to(device) for path, change in changes.items()}

        return replace(
            self, changes=moved(self.changes), by_fold=[moved(fold) for fold in self.by_fold]
        )


def digest(rows: Sequence[Row]) -> str:
    """SHA-256 of rows."""
    return _sha256([asdict(row) for row in rows])


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@dataclass(frozen=True)
class FitState:
    """A folder with a file for each finished block.

    Attributes:
        folder: where the files are; it is made when the first one is written.
        fingerprint: of the model's weights.
        data: SHA-256 of the rows of all processes, and of the options.
    """

    folder: Path
    fingerprint: str
    data: str

    @classmethod
    def of(
        cls,
        folder: str | os.PathLike[str],
        fingerprint: str,
        rows: Sequence[str],
        options: RidgeOptions,
        kappa: float,
    ) -> "FitState":
        """The state of a fit; rows: the :func:`digest` of each process's."""
        return cls(Path(folder), fingerprint, _sha256([rows, asdict(options), kappa]))

    def _file(self, index: int) -> Path:
        return self.folder / f"block-{index:04d}.safetensors"

    def write(self, index: int, fitted: BlockFit) -> None:
        """Write a finished block; its file appears whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, changes in (("all", fitted.changes), *self._folds(fitted)):
            for path, change in changes.items():
                # of one fold both are the same tensor, which a file cannot hold twice
                for part, x in (("u", change.u), ("v", change.v)):
                    copied = x.clone(memory_format=torch.contiguous_format)
                    tensors[f"{name}.{path}.{part}"] = copied.cpu()
        header: dict[str, Any] = {
            "kind": _KIND,
            "fingerprint": self.fingerprint,
            "data": self.data,
            "folds": len(fitted.by_fold),
            "paths": list(fitted.changes),
            "ridges": fitted.ridges,
            "explained": fitted.explained,
            "residual": fitted.residual,
        }
        write_atomically(self._file(index), file_parts(header, tensors))

    @staticmethod
    def _folds(fitted: BlockFit) -> list[tuple[str, dict[str, LowRank]]]:
        return [(f"fold{k}", changes) for k, changes in enumerate(fitted.by_fold)]

    def read(self, index: int) -> BlockFit | None:
        """A finished block, None if there is none yet.

        Raises:
            PatchFormatError: the file is damaged.
            ValueError: it is of another model, or of other examples or options.
        """
        if not self._file(index).exists():
            return None
        header, tensors = read_file(self._file(index))
        if header.get("kind") != _KIND:
            raise PatchFormatError(f"expected a fit's block, got {self._file(index)}")
        for name, reason in (
            ("fingerprint", "of the weights of this model"),
            ("data", "of these examples and options"),
        ):
            if header[name] != getattr(self, name):
                raise ValueError(
                    f"expected blocks {reason} in {self.folder}, got {self._file(index).name} of"
                    " others: take another folder, or remove this one"
                )

        def changes(name: str) -> dict[str, LowRank]:
            return {
                path: LowRank(tensors[f"{name}.{path}.u"], tensors[f"{name}.{path}.v"])
                for path in header["paths"]
            }

        return BlockFit(
            changes("all"),
            [changes(f"fold{k}") for k in range(header["folds"])],
            header["ridges"],
            header["explained"],
            header["residual"],
        )
