"""A few numbers about the logits of a patch's replay on the machine that made the patch. Its file
stores them, so that a replay elsewhere, which may round differently, can be compared.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_dataclass

from icl_patch.tolerances import coarsest, rounding_limit

TensorState = tuple[tuple[int, int], ...]
_AT_ONCE = 2**16  # logits that are hashed in one go: a core's cache holds them
_MULTIPLIER = 0x1E3779B97F4A7C15  # odd, without a pattern


@dataclass(frozen=True, eq=False)
class LogitDigest:
    """A digest of the logits (V,) of each kept token.

    Attributes:
        argmax: (B, T) int64, the token with the largest logit; -1 where the logits are unknown: for
            padding, and for rows that had ended.
        largest, size: (B, T), that logit, and the largest absolute value of all logits; in the
            dtype of the arithmetic, which has fewer digits than the logits under autocast.
        bits: (B, T) int64, :func:`row_hashes` if a replay should have the same bits; else None.
        identical: whether a replay should have the same bits. While a patch is in memory, ``bits``
            is computed on demand.
        replayed: the state of the factors and tokens that gave the logits; it is not saved.
    """

    argmax: Tensor
    largest: Tensor
    size: Tensor
    bits: Tensor | None = None
    identical: bool = False
    replayed: TensorState = ()

    @classmethod
    def of(
        cls, logits: Tensor, known: Tensor, dtype: torch.dtype, identical: bool
    ) -> "LogitDigest":
        """The digest of logits (B, T, V).

        known: (B, T) bool, the tokens that have logits. dtype: of the arithmetic.
        """
        largest, argmax = logits.max(-1)
        size = torch.maximum(largest.abs(), logits.amin(-1).abs())
        dtype = coarsest(dtype, logits.dtype)
        argmax = argmax.masked_fill(~known, -1)
        return cls(argmax, largest.to(dtype), size.to(dtype), None, identical)

    @property
    def known(self) -> Tensor:
        """The tokens (B, T) bool that have logits."""
        return self.argmax >= 0

    def of_tensors(self, tensors: Iterable[Tensor]) -> "LogitDigest":
        """The same digest, recorded for these factors and tokens as they are now."""
        return replace(self, replayed=tensor_state(tensors))

    def hashed(self, logits: Tensor | None) -> "LogitDigest":
        """The digest with ``bits`` of these logits, if a replay should have the same bits."""
        if logits is None or not self.identical or self.bits is not None:
            return self
        return replace(self, bits=row_hashes(logits))

    def part(self, rows: slice, tokens: slice, identical: bool) -> "LogitDigest":
        """The digest of some rows and tokens. identical: whether their replay has the same bits."""
        names = ("argmax", "largest", "size", "bits")
        cut = {name: x[rows, tokens] for name in names if (x := getattr(self, name)) is not None}
        if not identical:
            cut |= {"bits": None, "identical": False}
        return replace(self, **cut)

    # -- comparing

    def other_bits(self, logits: Tensor) -> Tensor:
        """Whether a token's bits differ from the recorded ones, (B, T) bool."""
        if self.bits is None:
            return torch.zeros_like(self.known)
        return (row_hashes(logits) != self.bits) & self.known

    def errors(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """How far logits l' (B, T, V) are from the recorded l with argmax a; each (B, T) fp64::

            max(|l'_a - l_a|, max l' - l_a) / max |l|      at most max |l' - l| / max |l|
            (max l' - l'_a) / max |l|                      by which another token is ahead now

        About the first one: no element of l is above ``l_a``, so the element that is the largest
        now has grown by ``max l' - l_a`` or more. Two NaN are equal. NaN on one side gives
        infinity.
        """
        there, now = self.largest.double(), logits.amax(-1).double()
        same = logits.gather(-1, self.argmax.clamp(min=0).unsqueeze(-1)).squeeze(-1).double()
        off = torch.maximum((same - there).abs(), now - there)
        equal = (same == there) & (now == there) | now.isnan() & there.isnan() | ~self.known
        scale = torch.where(self.size > 0, self.size, 1).double()
        found = [(x / scale).nan_to_num(torch.inf, torch.inf) for x in (off, now - same)]
        return found[0].masked_fill(equal, 0.0), found[1].masked_fill(equal, 0.0)

    @property
    def limit(self) -> float:
        """The largest error that may be rounding."""
        return rounding_limit(self.largest.dtype)


register_dataclass(LogitDigest)  # so that tree_map reaches its tensors


def tensor_state(tensors: Iterable[Tensor]) -> TensorState:
    """Addresses and versions of tensors. They change if a tensor is replaced or written to."""
    return tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors)


def row_hashes(logits: Tensor) -> Tensor:
    """A hash of the bits of each row: (..., V) -> (...) int64; 0 and -0 are alike.

    ``Σ_k f_k x_k`` modulo 2⁶⁴, with the row as words x of 8 bytes, padded with zeros, and fixed odd
    factors f. A change of one logit always changes the hash; other changes go unnoticed only by
    accident.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    parts = rows.split(max(1, _AT_ONCE // rows.shape[1]))
    return torch.cat([_hashes(part) for part in parts]).view(logits.shape[:-1])


def _hashes(rows: Tensor) -> Tensor:
    # adding 0 turns -0 into 0
    words = F.pad(rows + 0, (0, -rows.shape[1] % (8 // rows.element_size())))
    words = words.contiguous().view(torch.int64)
    factors = _factors(words.shape[1]).to(rows.device)
    if words.is_cpu:
        return words.mv(factors)
    return (words * factors).sum(1)  # CUDA multiplies no matrices of integers


@cache
def _factors(count: int) -> Tensor:
    """Odd numbers (count,) int64 that look random: the place, multiplied and mixed."""
    x = torch.arange(1, count + 1) * _MULTIPLIER
    x = (x ^ (x >> 29)) * _MULTIPLIER
    return (x ^ (x >> 32)) | 1
