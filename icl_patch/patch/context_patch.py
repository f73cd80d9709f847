"""A patch: the factors of every block for every kept token, with their model, tokens and positions.

``patch.layers`` has a dictionary for each block. B is the number of rows, T of kept tokens, k of
active experts. The names are paths relative to the block:

- ``{reader}.u`` (B, T, N) and ``readers.v`` (B, T, K): the reader's weight is ``W + u vᵀ``. All
  readers of one input share v; a reader of another input has ``{reader}.v``.
- ``{down}.u``, ``{down}.v``: the output matrix is ``W_down + u vᵀ``. A direct patch of a scale
  writer has neither. ``{down}.bias_change``: the bias is ``b + Δb``.
- ``{norm}.new_scale``: the scale m' that replaces m, and ``{norm}.scale`` (width,), the norm's own
  m, so that ``Δm = m' - m``.
- ``{experts}.index`` (B, T, k) int64: the token's active experts; slot j has the factors of expert
  ``index[j]``. ``{experts}.gate_up_proj.u`` (B, T, k, N): ``W_j + u_j vᵀ`` with the readers' v.
- ``{experts}.down_proj.u`` (B, T, d) and ``.v`` (B, T, k, width): ``W_j + u v_jᵀ``; or
  ``{experts}.down_proj.bias_change`` (B, T, d): ``b_j + Δb``. The names are those of transformers'
  own layout also for JetMoE (``input_linear``, ``output_linear``) and DBRX (the rows of ``w1``,
  then of ``v1``; ``w2ᵀ``), see :mod:`icl_patch.layers.experts`.

A patch file is a safetensors file with these tensors under ``layers.{i}.{name}``, see
:mod:`icl_patch.patch.serialization`. Its metadata entry ``icl_patch`` is a JSON object: the format,
the SHA-256 of the file, the fields of :class:`PatchInfo`, the path and form of every block, and
ids, masks, positions and slots as lists.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_map_only
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from icl_patch.errors import FingerprintMismatch, PatchFormatError
from icl_patch.invariance.arithmetic import BATCH_INVARIANT
from icl_patch.layers.device_hooks import input_device
from icl_patch.models.block_spec import Block
from icl_patch.patch.fingerprints import WatchedWeights, check_same_model, tokenizer_fingerprint
from icl_patch.patch.logit_digest import LogitDigest, tensor_state
from icl_patch.patch.parameter_changes import ParameterChange, parameter_changes
from icl_patch.patch.serialization import (
    TOKEN_TENSORS,
    PatchInfo,
    check_fit,
    read_patch,
    write_patch,
)
from icl_patch.texts import check_path


@dataclass(frozen=True)
class PatchReport:
    """The diagnostics of a patch, per layer, row and kept token, (L, B, T).

    Attributes:
        reader_error: the largest ``|(W + u vᵀ) z - W z_ctx|`` of the readers, relative to
            ``max |W z_ctx|``.
        status: the outcome of the RMSNorm inversion (:class:`icl_patch.ops.InversionStatus`; 0
            without one).
        misses: how many elements of the block's output differ, in a replay of the exact patch, from
            the output with the context. In a decode step: how many closing could not reach.
        correction: how much the exact update corrects the direct or stable one: the root mean
            square of the elements, each relative to its own size or to the typical size of its
            row, (mean √size)². One very large element therefore does not hide the others.
        experts_changed: the number of experts that the patched router chose but the router with the
            context did not.
    """

    reader_error: Tensor
    status: Tensor
    misses: Tensor
    correction: Tensor
    experts_changed: Tensor


register_dataclass(PatchReport)  # so that tree_map reaches its tensors


def blank_report(valid: Tensor) -> PatchReport:
    """The initial report of one block, (B, T) each."""

    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros_like(valid, dtype=dtype)

    counts, sizes = zeros(torch.int64), zeros(torch.float32)
    return PatchReport(sizes, zeros(torch.int8), counts, zeros(torch.float64), counts)


@dataclass(frozen=True, eq=False)
class ContextPatch:
    """The change of weights that replaces a context, for ``B`` rows of ``T`` kept tokens.

    A token's patch is valid only for that token, its history and its position. The attributes
    record all three:

    Attributes:
        info: the model, tokenizer and update that the patch belongs to.
        layers: the factors of every block, by name (see the module's table).
        layer_indices: the blocks that ``layers`` covers.
        blocks: path and form of every block of the model.
        kept_ids, kept_mask, position_ids, kept_slots: (B, T) int64, the mask bool; right-padded. A
            slot is a token's column in the whole sequence. Sliding windows count slots.
        prefix_ids, prefix_mask, prefix_positions, prefix_slots: (B, P), the tokens before the first
            absorbed one; left-padded.
        logits: (B, T, V) with the context, or None, since they are not saved. They are those of the
            unmodified model if the patch took two passes, and of the context stream if it took one.
        digest: a digest of the logits of a replay on the machine that made the patch; later replays
            are compared with it. None without such a replay. See :attr:`replay_digest`.
        report: the diagnostics; None for a loaded patch.
        weights: the model's weights, which :meth:`save` hashes again; None if the patch was loaded
            or copied.
        hooked: whether the model had forward hooks during the computation; it is not saved.
    """

    info: PatchInfo
    layers: tuple[dict[str, Tensor], ...]
    layer_indices: tuple[int, ...]
    blocks: tuple[Block, ...]
    kept_ids: Tensor
    kept_mask: Tensor
    position_ids: Tensor
    kept_slots: Tensor
    prefix_ids: Tensor
    prefix_mask: Tensor
    prefix_positions: Tensor
    prefix_slots: Tensor
    logits: Tensor | None = field(default=None, repr=False)
    digest: LogitDigest | None = field(default=None, repr=False)
    report: PatchReport | None = field(default=None, repr=False)
    weights: WatchedWeights | None = field(default=None, repr=False)
    hooked: bool = field(default=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # a copy may be for another process
        return vars(self) | {"weights": None, "digest": self._valid_digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        vars(self)["digest"] = self.digest and self.digest.of_tensors(self._replayed())

    @property
    def replay_digest(self) -> LogitDigest | None:
        """The digest, with bits if a replay should have the same bits. None if factors or tokens
        have changed since the digest was taken, so that the replay is another one.
        """
        digest = self._valid_digest
        return digest and digest.hashed(self.logits)

    @property
    def _valid_digest(self) -> LogitDigest | None:
        """The same, with bits only if they have been taken."""
        digest = self.digest
        return digest if digest and digest.replayed == tensor_state(self._replayed()) else None

    def with_digest(self, digest: LogitDigest | None) -> "ContextPatch":
        """The patch with the digest of its replay as it is now."""
        return replace(self, digest=digest and digest.of_tensors(self._replayed()))

    def _replayed(self) -> Iterator[Tensor]:
        """The tensors that a replay reads."""
        for layer in self.layers:
            yield from layer.values()
        yield from (getattr(self, name) for name in TOKEN_TENSORS)

    @property
    def passes(self) -> int:
        """Forward passes over the kept tokens that the patch took."""
        return self.info.passes

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.values())

    def __repr__(self) -> str:
        rows, tokens = self.kept_ids.shape
        return (
            f"ContextPatch({self.info.update}, {len(self.layers)} layers, {rows} x {tokens} tokens,"
            f" {self.nbytes} bytes)"
        )

    def to(self, device: torch.device | str) -> "ContextPatch":
        """The patch with every tensor on ``device``; raises TypeError for anything but a device."""
        place = torch.device(device)  # a dtype would change masks and ids too
        names = ("layers", "logits", "report", *TOKEN_TENSORS)
        tensors = {name: getattr(self, name) for name in names} | {"digest": self._valid_digest}
        moved = tree_map_only(Tensor, lambda x: x.to(place), tensors)
        return replace(self, **moved).with_digest(moved["digest"])

    def select(
        self, rows: slice = slice(None), tokens: slice = slice(None), layers: slice = slice(None)
    ) -> "ContextPatch":
        """A part of the patch: rows of the batch, kept tokens, layers.

        Any part can be measured and saved. A part can be replayed if it has all layers and its
        tokens start at the first, because each kept token attends to those before it. Two kinds of
        patches must be replayed whole, because other shapes change the result: a direct patch of a
        scale writer, which divides by activations, and a patch of a model with sparse attention,
        which breaks ties between tokens by their places. An exact patch in the model's arithmetic
        is bit-identical when replayed whole; its parts are right up to rounding. In the
        batch-invariant arithmetic its rows are bit-identical too.

        Raises:
            ValueError: the part would be empty, or the layers would change their order.
        """
        names = ("kept_ids", "kept_mask", "position_ids", "kept_slots")
        cut: dict[str, Any] = {name: getattr(self, name)[rows, tokens] for name in names}
        cut |= {name: getattr(self, name)[rows] for name in TOKEN_TENSORS if name not in names}
        chosen = self.layers[layers]
        if layers.step is not None and layers.step < 0:
            raise ValueError(f"expected layers in increasing order, got {layers}")
        if 0 in cut["kept_ids"].shape or not chosen:
            raise ValueError(
                f"expected at least one row, token and layer, got {rows}, {tokens}, {layers} of"
                f" {self!r}"
            )
        kept = range(self.kept_ids.shape[1])[tokens]
        whole = self.layer_indices[layers] == self.layer_indices and kept == range(len(kept))
        if not self.info.divisible:
            whole = whole and cut["kept_ids"].shape == self.kept_ids.shape
        part = replace(
            self,
            info=replace(self.info, replayable=self.info.replayable and whole),
            layers=tree_map_only(Tensor, lambda x: x if x.dim() == 1 else x[rows, tokens], chosen),
            layer_indices=self.layer_indices[layers],
            logits=None if self.logits is None else self.logits[rows, tokens],
            report=tree_map_only(Tensor, lambda x: x[layers][:, rows][:, :, tokens], self.report),
            **cut,
        )
        if (digest := self._valid_digest) is None or not part.info.replayable:
            return part.with_digest(None)
        all_rows, all_tokens = map(range, self.kept_ids.shape)
        same_rows = all_rows[rows] == all_rows or self.info.arithmetic == BATCH_INVARIANT
        return part.with_digest(digest.part(rows, tokens, same_rows and kept == all_tokens))

    def of_token(self, row: int, token: int) -> list[dict[str, Tensor]]:
        """The factors (width,) of one kept token in every layer. Negative numbers count from the
        end of the row's tokens.

        Raises:
            ValueError: there is no such row or kept token.
        """
        column = self._column(row, token)
        return [
            {name: x[row, column] for name, x in layer.items() if x.dim() > 1}
            for layer in self.layers
        ]

    def _column(self, row: int, token: int) -> int:
        """The column of a row's kept token. Raises as :meth:`of_token`."""
        rows, tokens = self.kept_ids.shape
        if not (-rows <= row < rows and -tokens <= token < tokens):
            raise ValueError(
                f"expected a row and a token of {rows} x {tokens}, got {row} and {token}"
            )
        kept = int(self.kept_mask[row].sum())
        token = token + kept if token < 0 else token  # kept tokens are right-padded
        if not 0 <= token < tokens or not self.kept_mask[row, token]:
            raise ValueError(f"expected a kept token of row {row}, which has {kept}, got padding")
        return token

    def norms(self) -> dict[str, Tensor]:
        """Size of the change of every patched parameter: ``‖ΔW‖_F = ‖u‖ ‖v‖``, ``‖Δb‖`` and
        ``‖Δm‖``, by the module's name.

        Each is (L, B, T), with 0 for a block without such a module. For experts it is the root of
        the sum of squares.
        """
        sizes: dict[str, dict[int, Tensor]] = {}
        for index, change in self._changes():
            sizes.setdefault(change.name, {})[index] = change.size()
        zero = torch.zeros(self.kept_ids.shape)
        stacked: dict[str, Tensor] = {}
        for name, by_layer in sizes.items():
            like = next(iter(by_layer.values()))
            stacked[name] = torch.stack(
                [by_layer.get(index, zero).to(like) for index in range(len(self.layers))]
            )
        return stacked

    def _changes(self) -> Iterator[tuple[int, "ParameterChange"]]:
        """Every change in the patch, with its place among the layers."""
        for place, (index, layer) in enumerate(zip(self.layer_indices, self.layers, strict=True)):
            for change in parameter_changes(self.blocks[index].spec, layer):
                yield place, change

    def weight_changes(self, row: int, token: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the materialised change of every patched parameter for one token: its name in the
        model's state dict, and ``u vᵀ``, Δb or Δm. Negative numbers count from the end of the
        row's tokens.

        If a parameter contains the matrices of many experts, ``name[e]`` is the e-th matrix; only
        the token's active experts change. Experts of JetMoE and DBRX have the names of
        transformers' own layout. The changes come one at a time: each is as large as its weight,
        and no other function builds such a matrix.

        Raises:
            ValueError: there is no such row or kept token.
        """
        column = self._column(row, token)
        return (
            (f"{self.blocks[self.layer_indices[place]].path}.{name}", materialised)
            for place, change in self._changes()
            for name, materialised in change.materialised(row, column)
        )

    # -- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the patch to a safetensors file; the file appears whole or not at all.

        A symbolic link stays, and its target is replaced. A replaced file keeps its permissions. If
        the model still exists, its weights are hashed; they must be those that the patch was
        computed with.

        Raises:
            FingerprintMismatch: the model's weights no longer have the patch's fingerprint.
            OSError: the file cannot be written.
            PatchFormatError: a factor is not finite.
            ValueError: the path is not UTF-8.
        """
        check_path(path)
        self._check_weights()
        write_patch(path, self)

    def _check_weights(self) -> None:
        check = None if self.weights is None else self.weights.check()
        if check is not None and check.fingerprint != self.info.fingerprint:
            raise FingerprintMismatch(
                f"expected {self.info.model} with the weights of the patch "
                f"({self.info.fingerprint[:12]}…), got other weights ({check.fingerprint[:12]}…): "
                "they changed before or after its computation. Compute it again, then save it"
            )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> "ContextPatch":
        """Read a patch file and check all of it before returning the patch. With a model, the
        tensors go to the model's device.

        Raises:
            PatchFormatError: the file is not a patch file; its SHA-256 is not the one in its
                header; an entry or a tensor is missing or unknown; or it does not fit the model.
            FingerprintMismatch: the patch was computed with weights, a dtype or a tokenizer other
                than the given ones.
            OSError: the file cannot be read.
            ValueError: the path is not UTF-8.
        """
        patch = cls(**read_patch(path))
        return patch.with_digest(patch.digest).fitted_to(model, tokenizer)

    def fitted_to(
        self, model: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> "ContextPatch":
        """This patch on the model's device, checked against the given ones. Raises as
        :meth:`load`.
        """
        if model is not None:
            self.check_model(model)  # another model has another tokenizer too: name the model
            check_fit(self, model)
        if tokenizer is not None:
            self.check_tokenizer(tokenizer_fingerprint(tokenizer))
        return self if model is None else self.to(input_device(model))

    def check_blocks(self, blocks: Sequence[Block]) -> None:
        """Raises PatchFormatError unless the patch was computed for blocks of these forms: a file
        may be of an earlier version, which read a block otherwise.
        """
        for block, own in zip(blocks, self.blocks, strict=False):
            for name, found in vars(own.spec).items():
                expected = getattr(block.spec, name)
                # a measured number may be rounded elsewhere in another way
                numbers = isinstance(found, float) and isinstance(expected, float)
                near = numbers and math.isclose(found, expected, rel_tol=2.0**-40)
                if found != expected and not near:
                    raise PatchFormatError(
                        f"expected a patch of blocks as this version reads them, with {name}"
                        f" {expected} in {block.path}, got one with {found}: compute the patch"
                        " again"
                    )

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raises FingerprintMismatch if the patch records another tokenizer than this hash."""
        if self.info.tokenizer not in (None, fingerprint):
            raise FingerprintMismatch(
                "expected a patch of ids of the given tokenizer, got one that was computed with"
                " another"
            )

    def check_model(self, model: PreTrainedModel, fingerprint: str | None = None) -> None:
        """Raises FingerprintMismatch unless the weights that the patch was computed with, and their
        dtype, are this model's; and TypeError unless it is a model.
        """
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"expected a model of transformers, got {type(model).__name__}")
        info = self.info
        check_same_model(model, info.model, info.dtype, info.fingerprint, fingerprint)
